"""Lanczos processes for many maps at a time: all pairs of a sweep in one batch.

A is BᵀB for pairs whose smaller side is the output of site i, and BBᵀ for those whose
smaller side is the input of site j. After k steps A V = V T + β v eᵀ with orthonormal
columns V and a tridiagonal T, whose eigenvalues (Ritz values) approach those of A from
below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf, prod

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import eigh_tridiagonal
from torch import Tensor

from lipcert.network.normal_form import Network
from lipcert.network.program import Shape
from lipcert.network.sweep import Pair, Sweep
from lipcert.norms.recurrence import Recurrence
from lipcert.progress import Report, no_report

Array = NDArray[np.float64]
_DROPPED = 0.8
_LOOKS = 4
"""Steps after which it is asked again whether they are enough."""
_RESOLUTION = 1e-14
"""What is left of A q after the orthogonalisation is rounding, if it is not above this part of A."""
_EPS = 2.0**-52
_ROWS = 6
"""Rows of every pair that are in memory at a time, beside its basis."""


def cost(steps: int, path: float, n: int) -> float:
    """Multiplications of this many steps with a matrix of order n: two products each, and the orthogonalisation."""
    return 2 * steps * path + steps**2 * n


def memory(network: Network, pair: Pair, steps: int) -> int:
    """Bytes for one pair: the basis, and a row at the widest nodes."""
    n = order(network, pair)
    widest = max(prod(node.shape) for node in network.nodes)
    return 8 * (min(steps, n) * n + _ROWS * widest)


def order(network: Network, pair: Pair) -> int:
    """n of the matrix A of a pair."""
    j, i = pair
    return min(network.out_size(i), network.in_size(j))


class Process:
    """Lanczos for one pair."""

    def __init__(self, start: Tensor, steps: int) -> None:
        """`start` is one row."""
        self.done = False
        # Of A and T: squares of their entries must neither overflow nor vanish.
        self.unit = 1.0
        # Orthonormal rows, filled one by one.
        self._basis = start.new_empty(steps, start.numel())
        self._basis[0] = start.reshape(-1) / torch.linalg.vector_norm(start)
        self.vector = self._basis[0].reshape(start.shape)
        self._alpha: list[float] = []
        # The last one leads to the vector that would be next.
        self._beta: list[float] = []
        self._lost: list[float] = []

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
        if exhausted or step + 1 == len(self._basis):
            self.done = True
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
        return 0 if self.done else len(self._basis) - len(self._alpha)

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


@torch.no_grad()
def run_lanczos(
    network: Network,
    steps: Mapping[Pair, int],
    seed: tuple[int, ...],
    progress: Report = no_report,
    enough: Callable[[Pair, Process], bool] = lambda pair, process: False,
) -> dict[Pair, Process]:
    """As many steps for every pair, fewer if it has enough; its start depends on the seed and the pair only."""
    processes: dict[Pair, Process] = {}
    for pair, (_, shape) in _smaller_sides(network, steps).items():
        start = _random_vector(prod(shape), (*seed, *pair)).to(network.device)
        most = min(steps[pair], prod(shape))
        processes[pair] = Process(start.reshape(1, *shape), most)
    work = sum(process.left() for process in processes.values())
    batch = _Batch(network, list(steps))
    while batch.pairs:
        batch.advance(processes)
        for pair in batch.pairs:
            process = processes[pair]
            # Chance is in the start alone, and one event, |⟨u, b⟩| ≤ τ, is all that can
            # fail, after however many steps: to look at the bound and then stop does
            # not make it less certain.
            looks = not process.done and process.steps % _LOOKS == 0
            if looks and enough(pair, process):
                process.done = True
        # A new schedule costs a little: pairs that are done travel along until they are
        # more than a fifth.
        active = [pair for pair in batch.pairs if not processes[pair].done]
        if len(active) < _DROPPED * len(batch.pairs):
            batch = _Batch(network, active)
        progress(1 - sum(process.left() for process in processes.values()) / work)
    return processes


def _random_vector(n: int, key: tuple[int, ...]) -> Tensor:
    # A hash of the seed and the pair: starts of different pairs do not depend on each
    # other.
    state = np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1)
    # Normally distributed entries have a direction that is uniform on the sphere, as
    # the theorem asks.
    generator = torch.Generator().manual_seed(int(state))
    return torch.randn(n, generator=generator, dtype=torch.float64)


def _smaller_sides(
    network: Network, pairs: Iterable[Pair]
) -> dict[Pair, tuple[bool, Shape]]:
    """Whether A acts on the output of site i, the smaller side, and the shape of its vectors."""
    sides = {}
    for j, i in sorted(pairs):
        if network.out_size(i) <= network.in_size(j):
            sides[j, i] = True, network.nodes[network.sites[i].output].shape
        else:
            sides[j, i] = False, network.nodes[network.sites[j].source].shape
    return sides


class _Batch:
    """Pairs that travel together: with BᵀB from the outputs of sites, with BBᵀ from the inputs."""

    def __init__(self, network: Network, pairs: Sequence[Pair]) -> None:
        self.pairs = pairs
        last = max((j for j, _ in pairs), default=0)
        # BᵀB and BBᵀ have the same largest eigenvalue; the smaller one has shorter
        # vectors, and a smaller √n.
        sides = _smaller_sides(network, pairs)
        from_start = {pair for pair in pairs if sides[pair][0]}
        self._from_start = Sweep(network, last, only=from_start)
        self._from_end = Sweep(network, last, only=set(pairs) - from_start)

    def advance(self, processes: Mapping[Pair, Process]) -> None:
        """One step of all pairs."""
        start, end = self._from_start, self._from_end
        images = start.forward(_vectors(processes, start.starts))
        _advance(processes, start.starts, start.adjoint(images))
        images = end.adjoint(_vectors(processes, end.ends))
        _advance(processes, end.ends, end.forward(images))


def _vectors(
    processes: Mapping[Pair, Process], rows: Mapping[int, Sequence[Pair]]
) -> dict[int, Tensor]:
    """By site, one row for each of its pairs: the vector of its process."""
    vectors = {}
    for site, pairs in rows.items():
        vectors[site] = torch.cat([processes[pair].vector for pair in pairs])
    return vectors


def _advance(
    processes: Mapping[Pair, Process],
    rows: Mapping[int, Sequence[Pair]],
    images: Mapping[int, Tensor],
) -> None:
    """Take in the rows of A q; a process that is done ignores its own."""
    for site, pairs in rows.items():
        for row, pair in enumerate(pairs):
            # Rows are in the order of `pairs`, as `_vectors` has put them together.
            if not processes[pair].done:
                processes[pair].advance(images[site][row])
