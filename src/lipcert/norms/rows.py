"""Norms of the rows of a batch, whatever the shape of a row."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor


def flat_rows(x: Tensor) -> Tensor:
    """(rows, n): the entries of every row in the order in which they lie in memory, without copying them."""
    if x.is_contiguous():
        return x.reshape(x.shape[0], -1)
    strides, shape = x.stride(), x.shape
    # Channels-last (C, H, W) has strides (1, W·C, C), so that the order of memory is H,
    # W, C.
    axes = sorted(range(1, x.dim()), key=lambda axis: (-strides[axis], -shape[axis]))
    return x.permute(0, *axes).reshape(x.shape[0], -1)


def per_row(values: Tensor, like: Tensor) -> Tensor:
    """One value per row, in a shape that broadcasts over the rows of `like`."""
    return values.reshape(-1, *(1,) * (like.dim() - 1))


def row_norms(x: Tensor, keepdim: bool = False) -> Tensor:
    """The l2 norm of every row, with gradient zero (not NaN) at zero; squares neither overflow nor underflow."""
    flat = flat_rows(x)
    norms: Tensor = torch.linalg.vector_norm(flat, dim=1)
    limits = torch.finfo(x.dtype)
    # Squares vanish below √tiny and overflow beyond √max. The power 0.4 leaves room for
    # entries smaller than the norm.
    ordinary = (norms > limits.tiny**0.4) & (norms < limits.max**0.4)
    if not bool(ordinary.all()):
        # Detached, the scale is a number that cancels, and the derivative is that of
        # the norm.
        largest = torch.linalg.vector_norm(flat.detach(), ord=inf, dim=1, keepdim=True)
        scale = torch.where(largest == 0, torch.ones_like(largest), largest)
        norms = torch.linalg.vector_norm(flat / scale, dim=1) * scale.squeeze(1)
    if keepdim:
        return per_row(norms, x)
    return norms


def unit_rows(x: Tensor, fallback: Tensor) -> Tensor:
    """Every row divided by its norm; rows of zeros are replaced."""
    norms = row_norms(x, keepdim=True)
    positive = norms > 0
    if bool(positive.all()):
        return x / norms
    # 1 in place of a norm of 0: a quotient 0/0 would be NaN in the derivative, even
    # where it is not chosen.
    return torch.where(
        positive, x / torch.where(positive, norms, torch.ones_like(norms)), fallback
    )
