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
    ordinary = (norms > limits.tiny**0.4) & (norms < limits.max**0.4)
    if not bool(ordinary.all()):
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
    return torch.where(positive, x / torch.where(positive, norms, torch.ones_like(norms)), fallback)
