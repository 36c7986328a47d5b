"""Proved upper bounds on the spectral norms of single linear operations, cheap enough for any size of image."""

from __future__ import annotations

from itertools import chain, combinations
from math import ceil, gcd, inf, prod, sqrt

import numpy as np
from torch import Tensor

from lipcert.network.convolution import Convolution, TransposedConvolution
from lipcert.network.linear import Dense, LinearOp
from lipcert.norms.gram import bound_spectral_norm
from lipcert.norms.rounding import UNDERFLOW, round_up

_LARGEST_SIDE = 4096


def operation_norm(op: LinearOp) -> float:
    """An upper bound on ‖A‖₂ for a dense layer or a convolution; infinite for operations that it knows nothing of.

    Dense layers are proved by Cholesky factorisation, convolutions as in `_kernel_norm`.
    """
    if isinstance(op, Dense):
        return _matrix_norm(op.weight())
    if isinstance(op, Convolution | TransposedConvolution):
        return _kernel_norm(op)
    return inf


def _kernel_norm(op: Convolution | TransposedConvolution) -> float:
    """The smallest of the bounds that follow from the kernel as a matrix, for every way to divide its axes of taps.

    Let y_o(w) = Σ_{c,t} K[o,c,t]·x_c(ws + td − p), and put the taps t_R of some axes R with the output channel: the
    matrix M has rows (o, t_R) and columns (c, t_S), S being the other axes. Apply M to all patches of x that extend
    along S; each entry of x lies in at most Π_S ⌈k·gcd(s,d)/s⌉ of them. An output is a sum of Π_R k entries of the
    results, none of which is used twice, so by the inequality of Cauchy and Schwarz

        ‖A‖² ≤ ‖M‖²·Π_R k·Π_S ⌈k·gcd(s,d)/s⌉.

    Zeros around the image only remove terms. Groups act on different channels, so the largest of their bounds holds.
    A transposed convolution is part of the transpose of the convolution with the same kernel.
    """
    weight = op.weight()
    axes = range(weight.dim() - 2)
    size = weight.shape[2:]
    repeats = [ceil(k * gcd(s, d) / s) for k, s, d in zip(size, op.stride, op.dilation, strict=True)]
    best = inf
    for rows in chain.from_iterable(combinations(axes, count) for count in range(len(axes) + 1)):
        columns = [axis for axis in axes if axis not in rows]
        order = (0, *(2 + axis for axis in rows), 1, *(2 + axis for axis in columns))
        factor = prod(size[axis] for axis in rows) * prod(repeats[axis] for axis in columns)
        norms = [
            _matrix_norm(kernel.permute(order).reshape(len(kernel) * prod(size[axis] for axis in rows), -1))
            for kernel in weight.chunk(op.groups)
        ]
        best = min(best, round_up(sqrt(factor) * max(norms), 4))
    return best


def _matrix_norm(weight: Tensor) -> float:
    """A proved bound on the norm of a matrix; infinite if that would take too long."""
    if min(weight.shape) > _LARGEST_SIDE:
        return inf
    rows = weight.detach().double().cpu().numpy()
    rows = rows if rows.shape[0] <= rows.shape[1] else rows.T
    return bound_spectral_norm(np.ascontiguousarray(rows)) + UNDERFLOW
