"""The LipLT recursion (thm:multiLayerLipschitz), for any DAG: once, for estimates and for bounds.

In a network whose nonlinearities are 1-Lipschitz (see `network.rewrites`), the map from
the input of the network to that of site j has the constant

    m_0 = 1,    m_j = Σ_{i<j} ‖B_ji‖ m_i.

With N_ji = ‖B_ji‖ this is the first column of R = (I − N)⁻¹; the others are constants
from the outputs of other sites.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

import torch
from torch import Tensor

from lipcert.network.sweep import Pair
from lipcert.rounding import up_matmul

Row = Callable[[int, Tensor], Tensor]
"""m_j from j and the constants m_0..m_{j−1}."""


def recursion(
    row: Row, count: int, first: Tensor, at_most: Sequence[float] | None = None
) -> Tensor:
    """m_0 = `first` and m_j = row(j, m_0..m_{j−1}) for j < count, none above what is known already."""
    constants = [first]
    for j in range(1, count):
        # (j,) or, for whole rows of R, (j, n+1).
        constant = row(j, torch.stack(constants))
        # Both are valid, so the smaller one is; later sites gain from it, too.
        if at_most is not None and at_most[j] < inf:
            constant = constant.clamp(max=at_most[j])
        constants.append(constant)
    return torch.stack(constants)


def prefix_constants(norms: Tensor) -> Tensor:
    """m_0..m_n from the matrix N; differentiable."""
    # The diagonal of N and what is above it are zero: sites are in topological order.
    return recursion(lambda j, m: norms[j, :j] @ m, len(norms), norms.new_ones(()))


def bound_prefix(norms: Tensor, at_most: Sequence[float] | None = None) -> Tensor:
    """m_0..m_n from upper bounds N, rounded up."""
    return recursion(
        lambda j, m: up_matmul(norms[j, :j], m), len(norms), norms.new_ones(()), at_most
    )


def bound_between(norms: Tensor) -> Tensor:
    """R = (I − N)⁻¹, rounded up: entry [k, i] bounds the map from the output of site i to the input of site k > i.

    Row j is e_j + Σ_{i<j} N_ji R_i. For two sites its last row is (N_20 + N_21 N_10,
    N_21, 1).
    """
    unit = torch.eye(len(norms), dtype=norms.dtype)
    # R_i has zeros in the columns behind i, so that adding e_j rounds nothing.
    return recursion(
        lambda j, rows: unit[j] + up_matmul(norms[j, :j], rows), len(norms), unit[0]
    )


def norm_matrix(pairs: Sequence[Pair], values: Tensor, count: int) -> Tensor:
    """N with N_ji = values[k] for the k-th pair (j, i), and zeros elsewhere; count × count."""
    matrix = torch.zeros(count, count, dtype=values.dtype, device=values.device)
    if not pairs:
        return matrix
    # Pairs (2, 0) and (2, 1): ends 2 2, starts 0 1. index_put, unlike an assignment, is
    # differentiable in the values.
    ends, starts = (
        torch.tensor(index, device=values.device) for index in zip(*pairs, strict=True)
    )
    return matrix.index_put((ends, starts), values)
