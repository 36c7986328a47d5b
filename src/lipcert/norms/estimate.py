"""Estimates of ‖B_ji‖ by warm-started power iteration: they approach the norms from below."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from lipcert.network.sweep import Sweep

Vectors = dict[int, Tensor]
"""For each start site, one row per pair that begins there."""


def random_vectors(sweep: Sweep, seed: int) -> Vectors:
    """Unit vectors in random directions, reproducible from the seed."""
    network = sweep.network
    generator = torch.Generator().manual_seed(seed)
    vectors = {}
    for i, pairs in sweep.starts.items():
        shape = network.nodes[network.sites[i].output].shape
        x = torch.randn(len(pairs), *shape, generator=generator).to(network.device, network.dtype)
        vectors[i] = x / row_norms(x, keepdim=True)
    return vectors


@torch.no_grad()
def power_iterate(sweep: Sweep, vectors: Vectors, centres: Sequence[float | Tensor], iterations: int) -> Vectors:
    """x ← BᵀBx / ‖BᵀBx‖ for all pairs at once; a row that B maps to zero stays as it is."""
    for _ in range(iterations):
        pulled = sweep.adjoint(sweep.forward(vectors, centres), centres)
        vectors = {i: _normalised(pulled[i], vectors[i]) for i in vectors}
    return vectors


class Rotation:
    """Takes turns with far pairs, so that the cost of an iteration grows with the depth of a network, not its square.

    Pairs that span at most four sites take part in every iteration, those up to eight in every second, farther ones in
    every fourth: there are many of them, they change slowly, and every site halves their share of the bound (for ReLU).
    """

    PERIOD = 4

    def __init__(self, sweep: Sweep, passing: Sequence[bool]) -> None:
        strides = {(j, i): 1 if j - i <= 4 else 2 if j - i <= 8 else self.PERIOD for j, i in sweep.pairs}
        period = max(strides.values(), default=1)
        last = max((j for j, _ in sweep.pairs), default=0)
        turns = [{p for p, stride in strides.items() if (turn + sum(p)) % stride == 0} for turn in range(period)]
        self._phases = [sweep] if period == 1 else [Sweep(sweep.network, passing, last, only=turn) for turn in turns]
        self._rows = [
            {i: torch.tensor([sweep.starts[i].index(pair) for pair in pairs]) for i, pairs in phase.starts.items()}
            for phase in self._phases
        ]

    @property
    def period(self) -> int:
        """How many iterations until every pair has had its turn."""
        return len(self._phases)

    @torch.no_grad()
    def iterate(self, vectors: Vectors, centres: Sequence[float | Tensor], iterations: int, turn: int) -> Vectors:
        """Power iterations from the given turn on; the vectors of pairs that wait stay as they are."""
        if self.period == 1:
            return power_iterate(self._phases[0], vectors, centres, iterations)
        vectors = {i: x.clone() for i, x in vectors.items()}
        for k in range(turn, turn + iterations):
            phase, rows = self._phases[k % self.period], self._rows[k % self.period]
            chosen = {i: vectors[i][index.to(vectors[i].device)] for i, index in rows.items()}
            for i, x in power_iterate(phase, chosen, centres, 1).items():
                vectors[i][rows[i].to(x.device)] = x
        return vectors


def estimate_norms(sweep: Sweep, vectors: Vectors, centres: Sequence[float | Tensor]) -> Tensor:
    """‖B_ji x_ji‖ for all pairs, in the order of `sweep.pairs`.

    Differentiable in the weights: at a top right singular vector v with left singular vector u, the derivative of
    ‖Bv‖ for fixed v is uᵀ(dB)v, which is the derivative of the norm.
    """
    ends = sweep.forward(vectors, centres)
    return torch.cat([row_norms(ends[j]) for j in sorted(ends)])


def flat_rows(x: Tensor) -> Tensor:
    """(rows, n): the entries of every row in the order in which they lie in memory, without copying them."""
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        x = x.permute(0, 2, 3, 1)
    return x.reshape(x.shape[0], -1)


def row_norms(x: Tensor, keepdim: bool = False) -> Tensor:
    """The l2 norm of every row, with gradient zero (not NaN) at zero; squares neither overflow nor underflow."""
    flat = flat_rows(x)
    norms: Tensor = torch.linalg.vector_norm(flat, dim=1)
    limits = torch.finfo(x.dtype)
    if not bool(((norms > limits.tiny**0.4) & (norms < limits.max**0.4)).all()):
        largest = torch.linalg.vector_norm(flat.detach(), ord=inf, dim=1, keepdim=True)
        scale = torch.where(largest == 0, torch.ones_like(largest), largest)
        norms = torch.linalg.vector_norm(flat / scale, dim=1) * scale.squeeze(1)
    return norms.reshape(-1, *(1,) * (x.dim() - 1)) if keepdim else norms


def _normalised(x: Tensor, fallback: Tensor) -> Tensor:
    scale = row_norms(x, keepdim=True)
    if bool((scale > 0).all()):
        return x / scale
    return torch.where(scale > 0, x / torch.where(scale > 0, scale, torch.ones_like(scale)), fallback)
