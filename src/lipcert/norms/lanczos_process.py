"""The Lanczos process for one symmetric matrix A.

After k steps A V = V T + β v eᵀ with orthonormal columns V and a tridiagonal T, whose
eigenvalues (Ritz values) approach those of A from below.
"""

from __future__ import annotations

from math import inf

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import eigh_tridiagonal
from torch import Tensor

from lipcert.norms.recurrence import Recurrence

Array = NDArray[np.float64]
_RESOLUTION = 1e-14
"""What is left of A q after the orthogonalisation is rounding, if it is not above this part of A."""
_EPS = 2.0**-52


class Process:
    """Steps from one start; whoever advances it multiplies with A."""

    def __init__(self, start: Tensor, steps: int) -> None:
        """`start` is one row."""
        self._most = steps
        # Of A and T: squares of their entries must neither overflow nor vanish.
        self.unit = 1.0
        # Orthonormal rows, filled one by one; none when all is done.
        self._basis: Tensor | None = start.new_empty(steps, start.numel())
        self._basis[0] = start.reshape(-1) / torch.linalg.vector_norm(start)
        self.vector = self._basis[0].reshape(start.shape)
        self._alpha: list[float] = []
        # The last one leads to the vector that would be next.
        self._beta: list[float] = []
        self._lost: list[float] = []

    @property
    def done(self) -> bool:
        return self._basis is None

    def finish(self) -> None:
        """No more steps: the basis, which takes the memory, is let go."""
        # A process that is done travels along for a while, with the last vector.
        self.vector = self.vector.clone()
        self._basis = None

    @property
    def steps(self) -> int:
        """How many steps are done."""
        return len(self._alpha)

    def advance(self, image: Tensor) -> None:
        """One step: orthogonalise A q against the whole basis, and append the next vector.

        The two parts that A q has in exact arithmetic are removed first. What the rest
        of the basis then removes is rounding, so that once is enough; twice if little
        is left.
        """
        assert self._basis is not None, "the process is done"
        step = len(self._alpha)
        # In units of the largest entry of A b, the numbers of T are moderate whatever
        # the weights are.
        if step == 0:
            self.unit = float(image.abs().max()) or 1.0
        scaled = image.reshape(-1) / self.unit
        known = self._basis[: step + 1]
        # The three-term recurrence: A q_k = β_{k−1} q_{k−1} + α_k q_k + β_k q_{k+1}.
        self._alpha.append(float(known[step] @ scaled))
        rest = scaled - self._alpha[-1] * known[step]
        if step > 0:
            rest = rest - self._beta[-1] * known[step - 1]
        w, norm = _orthogonalised(rest, known)
        self._lost.append(self._loss(scaled, rest, w, norm))
        exhausted = norm <= _RESOLUTION * max(*self._alpha, *self._beta, 0.0)
        self._beta.append(norm)
        if exhausted or step + 1 == self._most:
            self.finish()
            return
        self._basis[step + 1] = w / norm
        self.vector = self._basis[step + 1].reshape(self.vector.shape)

    def _loss(self, scaled: Tensor, rest: Tensor, w: Tensor, norm: float) -> float:
        """A bound on what the arithmetic of this step changed in A q = β'q' + αq + βq⁺, in units."""
        # What reorthogonalisation took away is seen; the rest are a few roundings of
        # every entry of the vectors that were added, and of the quotient w/β.
        removed = float(torch.linalg.vector_norm(rest - w))
        previous = self._beta[-1] if self._beta else 0.0
        size = float(torch.linalg.vector_norm(scaled)) + abs(self._alpha[-1])
        return removed * (1 + 1e-9) + 8 * _EPS * (size + previous + norm)

    def recurrence(self) -> Recurrence:
        """The numbers of all steps so far, and how inexact they are."""
        return Recurrence(
            tuple(self._alpha), tuple(self._beta), tuple(self._lost), self.unit
        )

    def left(self) -> int:
        """How many steps are left."""
        return 0 if self.done else self._most - len(self._alpha)

    def ritz(self) -> float:
        """The largest Ritz value; infinite if the products overflow."""
        if self.overflows():
            return inf
        return self.unit * max(float(self.ritz_values()[-1]), 0.0)

    def overflows(self) -> bool:
        return not np.isfinite([*self._alpha, *self._beta, self.unit]).all()

    def ritz_values(self) -> Array:
        """θ_1 ≤ … ≤ θ_k, the eigenvalues of T, in units."""
        # The last β leads out of the basis and is no entry of T.
        alpha, beta = np.array(self._alpha), np.array(self._beta[:-1])
        values: Array = eigh_tridiagonal(alpha, beta, eigvals_only=True)
        return values


def _orthogonalised(w: Tensor, known: Tensor) -> tuple[Tensor, float]:
    """What is left of w beside the rows of `known`, which it should be orthogonal to already, and its norm."""
    before = float(torch.linalg.vector_norm(w))
    # Rounding lets q_{k+1} drift towards eigenvectors that have converged, and their
    # Ritz values would come up twice: many steps would say what few did.
    w = w - known.T @ (known @ w)
    norm = float(torch.linalg.vector_norm(w))
    if norm < 0.7 * before:
        w = w - known.T @ (known @ w)
        norm = float(torch.linalg.vector_norm(w))
    return w, norm
