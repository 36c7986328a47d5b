"""Norms of the rows of a matrix and distances between them, as estimates and from above."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lipcert.norms.rows import flat_rows, row_norms
from lipcert.rounding import UNDERFLOW, gamma

_CHUNK = 1 << 24  # entries of row differences formed at a time
_BLOCK = 128  # rows of a Gram matrix that are formed at a time


def class_norms(rows: Tensor) -> Tensor:
    """‖r_a‖ for every row a: the Lipschitz constant of x ↦ r_a·x."""
    return row_norms(rows)


def pair_norms(rows: Tensor) -> Tensor:
    """‖r_a − r_b‖ for every pair of rows, as a symmetric matrix with zero diagonal."""
    return _PairDistances.apply(flat_rows(rows))  # type: ignore[no-any-return, no-untyped-call]


def bound_class_norms(rows: Tensor, error: float) -> Tensor:
    """Upper bounds on the norms of rows."""
    return class_norms(rows) * (1 + gamma(rows.shape[1] + 4)) + error + UNDERFLOW


def bound_pair_norms(rows: Tensor, error: float) -> Tensor:
    """Distances of the rows from above: their squares come from a Gram matrix with errors of γ_n·(‖r_a‖² + ‖r_b‖²)."""
    # The same scale as in `_PairDistances`: squares of the centred rows.
    squares = class_norms(rows - rows.mean(0, keepdim=True)).square()
    scale = squares[:, None] + squares[None, :]
    roundoff = gamma(rows.shape[1] + 8)
    distances = pair_norms(rows).square()
    # Distances below 1e-6 of the scale were formed from the difference itself, the
    # others after centring; near that threshold the larger allowance holds for both.
    from_difference = distances <= 0.99e-6 * scale
    allowance = torch.where(from_difference, distances, 4 * scale) * roundoff
    centring = (~from_difference).double() * (8 * gamma(1) * float(rows.mean(0).norm()))
    upper: Tensor = (
        (distances + allowance).sqrt() * (1 + gamma(8))
        + 2 * error
        + centring
        + UNDERFLOW
    )
    return upper.fill_diagonal_(0.0)


def _gram(rows: Tensor) -> Tensor:
    """R Rᵀ. It is symmetric, so of many rows the blocks above the diagonal are copies of those below."""
    if len(rows) < 2 * _BLOCK:
        return rows @ rows.T
    gram = rows.new_empty(len(rows), len(rows))
    for first in range(0, len(rows), _BLOCK):
        end = min(first + _BLOCK, len(rows))
        # For blocks of 2 in 5 rows: rows 0–1 with 0–1, rows 2–3 with 0–3, row 4 with
        # 0–4.
        gram[first:end, :end] = rows[first:end] @ rows[:end].T
        gram[:first, first:end] = gram[first:end, :first].T
    return gram


class _PairDistances(torch.autograd.Function):
    """All distances ‖r_a − r_b‖ from the Gram matrix of the rows; gradient zero where the distance is zero.

    Distances are invariant under centring, which removes what the rows have in common.
    Where cancellation still would cost digits, the difference is formed. The backward
    pass is one product with a (K, K) matrix.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        # Rows may have much in common, which ‖r_a‖² + ‖r_b‖² − 2⟨r_a, r_b⟩ would cancel
        # digit by digit.
        centred = rows - rows.mean(0, keepdim=True)
        # (K, K), from one product.
        gram = _gram(centred)
        squares = gram.diagonal()
        scale = squares[:, None] + squares[None, :]
        distances = (scale - 2 * gram).clamp(min=0)
        tolerance = 1e-2 if rows.dtype == torch.float32 else 1e-6
        # Rows that nearly coincide: what is left of the difference of squares is mostly
        # rounding.
        first, second = torch.triu(distances <= tolerance * scale, diagonal=1).nonzero(
            as_tuple=True
        )
        # K²/2 differences of n entries each need not fit into the memory.
        step = max(1, _CHUNK // max(rows.shape[1], 1))
        for a, b in zip(
            torch.split(first, step), torch.split(second, step), strict=True
        ):
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
        # ∂‖r_a − r_b‖/∂r_a = (r_a − r_b)/‖r_a − r_b‖; with w_ab for the weights, row a
        # is Σ_b w_ab (r_a − r_b).
        weights = torch.where(
            distances > 0,
            (gradient + gradient.T) / distances,
            torch.zeros_like(distances),
        )
        return torch.diag(weights.sum(1)).sub(weights) @ centred
