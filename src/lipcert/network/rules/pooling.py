"""Rules for pooling and upsampling: which entries meet where is read off the executed operators."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipcert.network import slopes
from lipcert.network.linear import LinearOp
from lipcert.network.program import Shape
from lipcert.network.rules.affine import per_axis
from lipcert.network.rules.call import Call
from lipcert.network.rules.order import check_values
from lipcert.network.rules.registry import rule_for
from lipcert.network.rules.values import Refusal, Result


@dataclass(frozen=True, eq=False)
class Gather(LinearOp):
    """y_k = x_{source_k}: every entry of the result is a copy of an entry, found by its number."""

    source: Tensor
    in_shape: Shape
    out_shape: Shape
    terms = 0

    def _apply(self, x: Tensor) -> Tensor:
        # For nearest upsampling of (a, b) to four entries, source is 0 0 1 1.
        chosen = x.reshape(x.shape[0], -1).index_select(1, self.source.to(x.device))
        return chosen.reshape(x.shape[0], *self.out_shape)

    def _adjoint(self, y: Tensor) -> Tensor:
        x = y.new_zeros(y.shape[0], prod(self.in_shape))
        # Copies of an entry come back as their sum.
        x = x.index_add(1, self.source.to(y.device), y.reshape(y.shape[0], -1))
        return x.reshape(y.shape[0], *self.in_shape)

    def _magnitude(self, x: Tensor) -> Tensor:
        return self._apply(x)


def _rank(call: Call) -> int:
    """The number of spatial axes, which the name of the operator says."""
    return next(int(character) for character in call.operator if character.isdigit())


def _sides(call: Call) -> list[tuple[int, int]]:
    """The lengths of each spatial axis, of the input and of the result."""
    rank = _rank(call)
    return list(zip(call.input.shape[-rank:], call.out_shape[-rank:], strict=True))


@rule_for(
    "max_pool1d max_pool2d max_pool3d max_pool1d_with_indices "
    "max_pool2d_with_indices max_pool3d_with_indices"
)
def max_pool(call: Call, x: Any, kernel: Any, *args: Any, **kwargs: Any) -> Result:
    """Its l2 constant is √(largest number of windows that contain one entry)."""
    check_values(call)
    rank = _rank(call)
    stride = call.argument("stride") or kernel
    padding, dilation, ceil_mode = (
        call.argument(name) for name in ("padding", "dilation", "ceil_mode")
    )
    options = [per_axis(option, rank) for option in (kernel, stride, padding, dilation)]
    # Windows are products of sets along the axes, so that the numbers of windows around
    # an entry multiply.
    overlap = 1
    for (side, _), k, s, p, d in zip(_sides(call), *options, strict=True):
        overlap *= _most_windows(F.max_pool1d(_entries(side), k, s, p, d, ceil_mode))
    return slopes.pooling(overlap, per_channel=len(call.input.shape) > rank)


@rule_for("adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d")
def adaptive_max_pool(call: Call, x: Any, size: Any) -> Result:
    check_values(call)
    overlap = 1
    for side, pooled in _sides(call):
        overlap *= _most_windows(F.adaptive_max_pool1d(_entries(side), pooled))
    return slopes.pooling(overlap, per_channel=len(call.input.shape) > _rank(call))


def _entries(side: int) -> Tensor:
    """Every unit vector, as a batch of one channel."""
    # Entry k of row k is 1: the windows whose maximum is 1 are those that contain it.
    # (side, 1, side).
    return torch.eye(side, dtype=torch.float64)[:, None]


def _most_windows(pooled: Tensor) -> int:
    """In how many windows one entry is at most, from the pooled unit vectors."""
    return int((pooled > 0).sum((1, 2)).max())


@rule_for("avg_pool1d avg_pool2d avg_pool3d")
def average_pool(call: Call, x: Any, kernel: Any, *args: Any, **kwargs: Any) -> Result:
    divisor = call.argument("divisor_override")
    if divisor is not None and divisor < 0:
        raise Refusal(
            "divisor_override is negative; use a positive one and change "
            "the sign afterwards"
        )
    return call.linear(terms=prod(per_axis(kernel, _rank(call))) + 1, nonnegative=True)


@rule_for("adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d")
def adaptive_average(call: Call, x: Any, size: Any) -> Result:
    # From ⌊i·n/m⌋ to ⌈(i + 1)·n/m⌉: no window is longer than ⌊n/m⌋ + 2.
    window = prod(side // pooled + 2 for side, pooled in _sides(call))
    return call.linear(terms=window + 1, nonnegative=True)


@rule_for(
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d "
    "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d"
)
def upsample_nearest(call: Call, *args: Any) -> Result:
    """Copies of pixels. Which ones depends on the type in which positions are computed: that of the model."""
    shape = call.input.shape
    # Every pixel is its own number; what arrives in the result are the numbers of its
    # sources.
    numbers = torch.arange(prod(shape)).reshape(1, *shape)
    source = torch.zeros(1, *call.out_shape, dtype=torch.long)
    for factor in (
        1,
        1 << 11,
        1 << 22,
    ):  # digits to the base 2048, which every type holds exactly
        digits = (numbers // factor % 2048).to(call.recorded.dtype)
        source += factor * call.rerun(digits).long()
    return Gather(source.reshape(-1), shape, call.out_shape)


@rule_for("upsample_linear1d upsample_bilinear2d upsample_trilinear3d")
def upsample_linear(
    call: Call, x: Any, size: Any, align_corners: bool, factors: Any = None
) -> Result:
    """Weights are exact if every side grows by a power of two; else they come from float positions, errors unknown."""
    grown = {enlarged / side for side, enlarged in _sides(call)}
    given = set(factors or grown)
    terms = -1
    if not align_corners and given == grown and grown <= {1.0, 2.0, 4.0, 8.0, 16.0}:
        terms = 32
    return call.linear(terms=terms, nonnegative=True)
