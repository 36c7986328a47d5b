"""Randomised upper bounds on ‖B_ji‖: Lanczos from a fresh random start, all norms of a sweep in one batch.

For a symmetric positive semidefinite A of order n and a start drawn uniformly from the sphere, the largest Ritz value
θ_k after k steps satisfies P[θ_k < (1 − ε)·λ_max] ≤ 1.648·√n·exp(−√ε(2k − 1)) (Kuczyński & Woźniakowski 1992). So
√(θ_k/(1 − ε)) is an upper bound on the norm, except with that probability. The start must be independent of A: it is
drawn anew for every bound, never warm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, exp, inf, log, prod, sqrt

import numpy as np
import torch
from scipy.linalg import eigh_tridiagonal
from torch import Tensor

from lipcert.network.normal_form import Network
from lipcert.network.sweep import Pair, Sweep
from lipcert.progress import Report, no_report


def failure_probability(n: int, steps: int, epsilon: float) -> float:
    """The Kuczyński–Woźniakowski bound on P[θ_k < (1 − ε)·λ_max] for order n; zero once the steps exhaust the space."""
    if steps >= n:
        return 0.0
    return min(1.0, 1.648 * sqrt(n) * exp(-sqrt(epsilon) * (2 * steps - 1)))


def required_steps(n: int, epsilon: float, probability: float) -> int:
    """The smallest number of steps whose failure probability is at most `probability`."""
    steps = ceil((log(1.648 * sqrt(n) / probability) / sqrt(epsilon) + 1) / 2)
    return max(1, min(n, steps))


def eigenvalue_gap(inflation: float) -> float:
    """ε for eigenvalues such that 1/√(1 − ε) = 1 + inflation for norms."""
    return 1 - (1 + inflation) ** -2


def gap_after(n: int, steps: int, epsilon: float) -> float:
    """ε after this many steps. Steps that exhaust the space leave only what a numerically early end can hide."""
    if steps >= n:
        return min(epsilon, 1e-3)
    return epsilon


class _Process:
    """Lanczos for one pair, with A = BᵀB or BBᵀ."""

    def __init__(self, start: Tensor, steps: int) -> None:
        """`start` is one row, of length 1."""
        self.vector = start
        self.done = False
        self._basis = start.new_zeros(steps, start.numel())  # orthonormal rows, filled one by one
        self._basis[0] = start.reshape(-1)
        self._alpha: list[float] = []
        self._beta: list[float] = []

    def advance(self, image: Tensor) -> None:
        """One step: orthogonalise A q against the whole basis, twice, and append the next vector."""
        step = len(self._alpha)
        w = image.reshape(-1)
        known = self._basis[: step + 1]
        self._alpha.append(float(known[step] @ w))
        for _ in range(2):
            w = w - known.T @ (known @ w)
        norm = float(torch.linalg.vector_norm(w))
        scale = max(*self._alpha, *self._beta, 1e-300)
        if step + 1 == len(self._basis) or norm <= 1e-14 * scale:
            self.done = True
            return
        self._beta.append(norm)
        self._basis[step + 1] = w / norm
        self.vector = self._basis[step + 1].reshape(self.vector.shape)

    def ritz(self) -> float:
        """The largest Ritz value; infinite if the products overflow."""
        if not np.isfinite([*self._alpha, *self._beta]).all():
            return inf
        values = eigh_tridiagonal(
            np.array(self._alpha), np.array(self._beta[: len(self._alpha) - 1]), eigvals_only=True
        )
        return max(float(values[-1]), 0.0)


@torch.no_grad()
def lanczos_values(
    network: Network,
    steps: Mapping[Pair, int],
    generator: torch.Generator,
    progress: Report = no_report,
) -> dict[Pair, float]:
    """√(largest Ritz value) of every pair after its number of steps.

    A is BᵀB for pairs whose smaller side is the output of site i, and BBᵀ for those whose smaller side is the input of
    site j. All pairs of a kind travel in one batch.
    """
    last, most_steps = max(j for j, _ in steps), max(steps.values())
    processes: dict[Pair, _Process] = {}
    on_start, on_end = [], []
    for j, i in Sweep(network, last, only=steps).pairs:
        if network.out_size(i) <= network.in_size(j):
            on_start.append((j, i))
            shape = network.nodes[network.sites[i].output].shape
        else:
            on_end.append((j, i))
            shape = network.nodes[network.sites[j].source].shape
        start = torch.randn(prod(shape), generator=generator, dtype=torch.float64).to(network.device)
        start = start / torch.linalg.vector_norm(start)
        processes[j, i] = _Process(start.reshape(1, *shape), min(steps[j, i], prod(shape)))
    from_start = Sweep(network, last, only=on_start)
    from_end = Sweep(network, last, only=on_end)
    for step in range(most_steps):
        images = from_start.adjoint(from_start.forward(_vectors(processes, from_start.starts)))
        _advance(processes, from_start.starts, images)
        images = from_end.forward(from_end.adjoint(_vectors(processes, from_end.ends)))
        _advance(processes, from_end.ends, images)
        progress((step + 1) / most_steps)
        if all(process.done for process in processes.values()):
            break
    return {pair: sqrt(process.ritz()) for pair, process in processes.items()}


def _vectors(processes: Mapping[Pair, _Process], rows: Mapping[int, Sequence[Pair]]) -> dict[int, Tensor]:
    """By site, one row for each of its pairs: the vector of its process."""
    vectors = {}
    for site, pairs in rows.items():
        vectors[site] = torch.cat([processes[pair].vector for pair in pairs])
    return vectors


def _advance(
    processes: Mapping[Pair, _Process], rows: Mapping[int, Sequence[Pair]], images: Mapping[int, Tensor]
) -> None:
    """Take in the rows of A q; a process that is done ignores its own."""
    for site, pairs in rows.items():
        for row, pair in enumerate(pairs):
            if not processes[pair].done:
                processes[pair].advance(images[site][row])


def upper_bound(ritz: float, epsilon: float, relative_error: float, steps: int) -> float:
    """The norm's upper bound from √θ_k, with an allowance for inexact products.

    With full reorthogonalisation, products that are inexact by a relative error η act like a matrix perturbed by
    √k·η; the Chebyshev polynomial behind the bound has derivative k², so the allowance is k²·√k·η.
    """
    allowance = float(steps**2.5) * relative_error + 1e-12
    if allowance >= 1:
        return inf
    return ritz / sqrt(1 - epsilon) * (1 + allowance)
