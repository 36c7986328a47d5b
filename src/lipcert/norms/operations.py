"""Proved upper bounds on the spectral norms of single linear operations, cheap enough for any size of image."""

from __future__ import annotations

from math import inf, sqrt

from torch import Tensor

from lipcert.network.linear import LinearOp
from lipcert.norms.gram import bound_matrix_norm
from lipcert.rounding import UNDERFLOW, round_up

_LARGEST_SIDE = 4096


def operation_norm(op: LinearOp) -> float:
    """An upper bound on ‖A‖₂ from the matrices that an operation names; infinite if it names none."""
    # Every pair of a factor and matrices is a proof of its own: the smallest bound
    # counts.
    best = inf
    for factor, matrices in op.norm_proofs():
        # Groups act on different channels, blocks of one diagonal: the largest of their
        # norms is that of all.
        largest = max(_matrix_norm(matrix, _LARGEST_SIDE) for matrix in matrices)
        best = min(best, round_up(sqrt(factor) * largest, 4))
    return best


def exact_operation_norm(op: LinearOp, limit: int) -> float:
    """The same where the bound is the norm, but for rounding: the factor is 1; infinite elsewhere.

    limit: on the smaller side of matrices.
    """
    best = inf
    for factor, matrices in op.norm_proofs():
        if factor == 1.0:
            best = min(best, max(_matrix_norm(matrix, limit) for matrix in matrices))
    return best


def _matrix_norm(weight: Tensor, limit: int) -> float:
    """A proved bound on the norm of a matrix; infinite if that would take too long."""
    if min(weight.shape) > limit:
        return inf
    return bound_matrix_norm(weight.detach().double().cpu().numpy()) + UNDERFLOW
