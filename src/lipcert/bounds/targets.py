"""What is bounded: the network, each class, each pair of classes; and the norms of rows that this needs."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lipcert.norms.estimate import flat_rows, row_norms

TARGETS = ("network", "per-class", "last-layer", "pairwise")

_CHUNK = 1 << 24  # entries of row differences formed at a time


def class_norms(rows: Tensor, norm: float = 2.0) -> Tensor:
    """‖r_a‖ in the dual norm, for every row a: the Lipschitz constant of x ↦ r_a·x."""
    if norm == 2.0:
        return row_norms(rows)
    return rows.flatten(1).abs().amax(1) if norm == 1.0 else rows.flatten(1).abs().sum(1)


def pair_norms(rows: Tensor, norm: float = 2.0) -> Tensor:
    """‖r_a − r_b‖ in the dual norm, for every pair of rows, as a symmetric matrix with zero diagonal."""
    if norm == 2.0:
        return _PairDistances.apply(flat_rows(rows))  # type: ignore[no-any-return, no-untyped-call]
    return torch.cdist(rows.flatten(1), rows.flatten(1), p=inf if norm == 1.0 else 1.0)


def pairwise_matrix(value: Tensor, target: str, classes: int, norm: float = 2.0) -> Tensor:
    """Constants of the logit differences, (K, K), that follow from the constants of any target.

    L_ab ≤ 2^{1/q}·L for the network (√2·L in l2) and L_ab ≤ L_a + L_b per class; the other targets are pairwise.
    """
    if target in ("pairwise", "last-layer"):
        return value
    off_diagonal = 1 - torch.eye(classes, dtype=value.dtype, device=value.device)
    if target == "network":
        return value * 2 ** (1 - 1 / norm) * off_diagonal
    return (value[:, None] + value[None, :]) * off_diagonal


def weighted_norms(
    rows: Sequence[Tensor | None], weights: Tensor, target: str, norm: float = 2.0
) -> tuple[Tensor, Tensor]:
    """Σ_i w_i·‖rows_i‖ per class or per pair, and each site's mean share of it.

    `rows[i]` are the K rows of B_{n+1,i} and `weights[i]` is s_i m_i.
    """
    norms_of = class_norms if target == "per-class" else pair_norms
    terms = [weight * norms_of(row, norm) for row, weight in zip(rows, weights, strict=True) if row is not None]
    total = torch.stack(terms).sum(0)
    count = total.numel() if target == "per-class" else max(total.numel() - total.shape[0], 1)
    shares = iter(terms)
    contributions = [next(shares).sum() / count if row is not None else total.new_zeros(()) for row in rows]
    return total, torch.stack(contributions)


class _PairDistances(torch.autograd.Function):
    """All distances ‖r_a − r_b‖ from the Gram matrix of the rows; gradient zero where the distance is zero.

    Distances are invariant under centring, which removes what the rows have in common. Where cancellation still would
    cost digits, the difference is formed. The backward pass is one product with a (K, K) matrix.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        centred = rows - rows.mean(0, keepdim=True)
        gram = centred @ centred.T
        squares = gram.diagonal()
        scale = squares[:, None] + squares[None, :]
        distances = (scale - 2 * gram).clamp(min=0)
        tolerance = 1e-2 if rows.dtype == torch.float32 else 1e-6
        first, second = torch.triu(distances <= tolerance * scale, diagonal=1).nonzero(as_tuple=True)
        step = max(1, _CHUNK // max(rows.shape[1], 1))
        for a, b in zip(torch.split(first, step), torch.split(second, step), strict=True):
            exact = (rows[a] - rows[b]).square().sum(1)
            distances[a, b] = exact
            distances[b, a] = exact
        distances = distances.fill_diagonal_(0).sqrt()
        ctx.save_for_backward(centred, distances)
        return distances

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        centred, distances = ctx.saved_tensors
        weights = torch.where(distances > 0, (gradient + gradient.T) / distances, torch.zeros_like(distances))
        return torch.diag(weights.sum(1)).sub(weights) @ centred
