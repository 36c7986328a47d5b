"""Randomised upper bounds on ‖B_ji‖: Lanczos from a fresh random start, all norms of a sweep in one batch.

For a symmetric positive semidefinite A of order n and a start drawn uniformly from the sphere, the largest Ritz value
θ_k after k steps satisfies P[θ_k < (1 − ε)·λ_max] ≤ 1.648·√n·exp(−√ε(2k − 1)) (Kuczyński & Woźniakowski 1992). So
√(θ_k/(1 − ε)) is an upper bound on the norm, except with that probability. The start must be independent of A: it is
drawn anew for every bound, never warm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, exp, inf, log, sqrt

import numpy as np
import torch
from scipy.linalg import eigh_tridiagonal
from torch import Tensor

from lipcert.network.normal_form import Network
from lipcert.network.sweep import Pair, Sweep


def failure_probability(n: int, steps: int, epsilon: float) -> float:
    """The Kuczyński–Woźniakowski bound on P[θ_k < (1 − ε)·λ_max] for order n; zero once the steps exhaust the space."""
    return 0.0 if steps >= n else min(1.0, 1.648 * sqrt(n) * exp(-sqrt(epsilon) * (2 * steps - 1)))


def required_steps(n: int, epsilon: float, probability: float) -> int:
    """The smallest number of steps whose failure probability is at most `probability`."""
    steps = ceil((log(1.648 * sqrt(n) / probability) / sqrt(epsilon) + 1) / 2)
    return max(1, min(n, steps))


def eigenvalue_gap(inflation: float) -> float:
    """ε for eigenvalues such that 1/√(1 − ε) = 1 + inflation for norms."""
    return 1 - (1 + inflation) ** -2


def gap_after(n: int, steps: int, epsilon: float) -> float:
    """ε after this many steps. Steps that exhaust the space leave only what a numerically early end can hide."""
    return min(epsilon, 1e-3) if steps >= n else epsilon


@dataclass
class _Run:
    """The Lanczos process of one pair, on BᵀB (side of site i) or BBᵀ (side of site j), whichever is smaller."""

    pair: Pair
    on_start: bool
    shape: tuple[int, ...]
    basis: Tensor  # (steps, n), orthonormal rows filled one by one
    alpha: list[float]
    beta: list[float]
    done: bool = False

    @property
    def vector(self) -> Tensor:
        """The present Lanczos vector, as one row."""
        return self.basis[len(self.alpha)].reshape(1, *self.shape)

    def advance(self, image: Tensor) -> None:
        """One step: orthogonalise A q against the whole basis, twice, and append the next vector."""
        step = len(self.alpha)
        w = image.reshape(-1)
        known = self.basis[: step + 1]
        self.alpha.append(float(known[step] @ w))
        for _ in range(2):
            w = w - known.T @ (known @ w)
        norm = float(torch.linalg.vector_norm(w))
        scale = max(*self.alpha, *self.beta, 1e-300)
        if step + 1 == len(self.basis) or norm <= 1e-14 * scale:
            self.done = True
            return
        self.beta.append(norm)
        self.basis[step + 1] = w / norm

    def ritz(self) -> float:
        """The largest Ritz value; infinite if the products overflow."""
        if not np.isfinite([*self.alpha, *self.beta]).all():
            return inf
        values = eigh_tridiagonal(np.array(self.alpha), np.array(self.beta[: len(self.alpha) - 1]), eigvals_only=True)
        return max(float(values[-1]), 0.0)


@torch.no_grad()
def lanczos_values(
    network: Network,
    steps: dict[Pair, int],
    generator: torch.Generator,
    progress: Callable[[float], None] = lambda _: None,
) -> dict[Pair, float]:
    """√(largest Ritz value) of every pair after its number of steps; all pairs ride in one batch.

    Pairs on the side of site i need B, then Bᵀ; pairs on the side of site j need Bᵀ, then B. Both travel together,
    half a step apart.
    """
    sweep = Sweep(network, max(j for j, _ in steps), only=steps)
    runs = {pair: _start(network, pair, steps[pair], generator) for pair in sweep.pairs}
    total = max(steps.values())
    pending: dict[Pair, Tensor] = {}  # Bᵀq of the runs on the side of j
    for step in range(total + 1):
        inward = {i: [_row(network, runs[p], pending) for p in pairs] for i, pairs in sweep.starts.items()}
        images = sweep.forward({i: torch.cat(rows) for i, rows in inward.items()})
        for j, pairs in sweep.ends.items():
            for row, pair in enumerate(pairs):
                if not runs[pair].on_start and pair in pending and not runs[pair].done:
                    runs[pair].advance(images[j][row])
        if all(run.done for run in runs.values()):
            break
        outward = {j: _outward(runs, pairs, images[j]) for j, pairs in sweep.ends.items()}
        back = sweep.adjoint(outward)
        for i, pairs in sweep.starts.items():
            for row, pair in enumerate(pairs):
                if runs[pair].on_start and not runs[pair].done:
                    runs[pair].advance(back[i][row])
                elif not runs[pair].on_start:
                    pending[pair] = back[i][row : row + 1]
        progress((step + 1) / total)
    return {pair: sqrt(run.ritz()) for pair, run in runs.items()}


def _start(network: Network, pair: Pair, steps: int, generator: torch.Generator) -> _Run:
    j, i = pair
    on_start = network.out_size(i) <= network.in_size(j)
    node = network.nodes[network.sites[i].output if on_start else network.sites[j].source]
    size = min(network.out_size(i), network.in_size(j))
    basis = torch.zeros(min(steps, size), size, dtype=torch.float64, device=network.device)
    start = torch.randn(size, generator=generator, dtype=torch.float64).to(network.device)
    basis[0] = start / torch.linalg.vector_norm(start)
    return _Run(pair, on_start, node.shape, basis, [], [])


def _row(network: Network, run: _Run, pending: dict[Pair, Tensor]) -> Tensor:
    """What a pair sends forward: its Lanczos vector, or Bᵀq from the adjoint sweep before."""
    if run.on_start and not run.done:
        return run.vector
    shape = network.nodes[network.sites[run.pair[1]].output].shape
    if run.pair in pending and not run.done:
        return pending[run.pair]
    return torch.zeros(1, *shape, dtype=torch.float64, device=network.device)


def _outward(runs: dict[Pair, _Run], pairs: Sequence[Pair], images: Tensor) -> Tensor:
    """What the pairs that end at a site send back: the image of the forward sweep, or their own Lanczos vector."""
    rows = []
    for row, pair in enumerate(pairs):
        run = runs[pair]
        own = not run.on_start and not run.done
        rows.append(run.vector if own else images[row : row + 1])
    return torch.cat(rows)


def basis_bytes(network: Network, pair: Pair, steps: int) -> int:
    """Memory of the Lanczos basis of a pair."""
    return 8 * steps * min(network.out_size(pair[1]), network.in_size(pair[0]))


def upper_bound(ritz: float, epsilon: float, relative_error: float, steps: int) -> float:
    """The norm's upper bound from √θ_k, with an allowance for inexact products.

    With full reorthogonalisation, products that are inexact by a relative error η act like a matrix perturbed by
    √k·η; the Chebyshev polynomial behind the bound has derivative k², so the allowance is k²·√k·η.
    """
    allowance = steps**2.5 * relative_error + 1e-12
    return ritz / sqrt(1 - epsilon) * (1 + allowance) if allowance < 1 else inf
