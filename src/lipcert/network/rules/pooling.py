"""Rules for pooling and upsampling: which entries meet where is read off the executed operators."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipcert.network import slopes
from lipcert.network.linear import Gather
from lipcert.network.program import Shape
from lipcert.network.rules.registry import Call, Refusal, Result, register_rule

aten = torch.ops.aten


def _rank(call: Call) -> int:
    """The number of spatial axes, which the name of the operator says."""
    name = str(call.node.target)  # type: ignore[union-attr]
    return next(int(character) for character in name if character.isdigit())


def _sizes(value: Any, rank: int) -> Shape:
    values = (value,) * rank if isinstance(value, int) else tuple(value)
    return values * rank if len(values) == 1 else values


@register_rule(
    aten.max_pool1d, aten.max_pool2d, aten.max_pool3d,
    aten.max_pool1d_with_indices, aten.max_pool2d_with_indices, aten.max_pool3d_with_indices,
)  # fmt: skip
def max_pool(
    call: Call,
    x: Any,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> Result:
    """Its l2 constant is √(largest number of windows that contain one entry)."""
    _values_only(call)
    rank = _rank(call)
    kernel = _sizes(kernel, rank)
    options = [kernel, _sizes(stride, rank) if stride else kernel, _sizes(padding, rank), _sizes(dilation, rank)]
    overlap = 1
    for n, k, s, p, d in zip(call.input.shape[-rank:], *options, strict=True):
        entries = torch.eye(n, dtype=torch.float64)[:, None]
        windows: Tensor = F.max_pool1d(entries, k, s, p, d, ceil_mode) > 0
        overlap *= int(windows.sum((1, 2)).max())
    return slopes.pooling(overlap, per_channel=len(call.input.shape) > rank)


@register_rule(aten.adaptive_max_pool1d, aten.adaptive_max_pool2d, aten.adaptive_max_pool3d)
def adaptive_max_pool(call: Call, x: Any, size: Any) -> Result:
    _values_only(call)
    rank = _rank(call)
    overlap = 1
    for n, m in zip(call.input.shape[-rank:], call.out_shape[-rank:], strict=True):
        windows: Tensor = F.adaptive_max_pool1d(torch.eye(n, dtype=torch.float64)[:, None], m) > 0
        overlap *= int(windows.sum((1, 2)).max())
    return slopes.pooling(overlap, per_channel=len(call.input.shape) > rank)


def _values_only(call: Call) -> None:
    if call.index not in (None, 0):
        raise Refusal("the positions of entries are not continuous; use the values only")


@register_rule(aten.avg_pool1d, aten.avg_pool2d, aten.avg_pool3d)
def average_pool(call: Call, x: Any, kernel: Any, *args: Any, **kwargs: Any) -> Result:
    divisor = args[4] if len(args) > 4 else kwargs.get("divisor_override")
    if divisor is not None and divisor < 0:
        raise Refusal("divisor_override is negative; use a positive one and change the sign afterwards")
    return call.linear(terms=prod(_sizes(kernel, _rank(call))) + 1, nonnegative=True)


@register_rule(aten.adaptive_avg_pool1d, aten.adaptive_avg_pool2d, aten.adaptive_avg_pool3d)
def adaptive_average(call: Call, x: Any, size: Any) -> Result:
    rank = _rank(call)
    sides = zip(call.input.shape[-rank:], call.out_shape[-rank:], strict=True)
    return call.linear(terms=prod(n // m + 2 for n, m in sides) + 1, nonnegative=True)


@register_rule(
    aten.upsample_nearest1d, aten.upsample_nearest2d, aten.upsample_nearest3d,
    aten._upsample_nearest_exact1d, aten._upsample_nearest_exact2d, aten._upsample_nearest_exact3d,
)  # fmt: skip
def upsample_nearest(call: Call, x: Any, *args: Any) -> Result:
    """Copies of pixels. Which ones depends on the type in which positions are computed: that of the model."""
    shape, dtype = call.input.shape, call.executed
    numbers = torch.arange(prod(shape)).reshape(1, *shape)
    chosen = sum(factor * call._rerun((numbers // factor % 2048).to(dtype)).long() for factor in (1, 1 << 11, 1 << 22))
    assert isinstance(chosen, Tensor)
    return Gather(chosen.reshape(-1), shape, call.out_shape)


@register_rule(aten.upsample_linear1d, aten.upsample_bilinear2d, aten.upsample_trilinear3d)
def upsample_linear(call: Call, x: Any, size: Any, align_corners: bool, factors: Any = None) -> Result:
    """Weights are exact if every side grows by a power of two; else they come from float positions, errors unknown."""
    rank = _rank(call)
    grown = {m / n for n, m in zip(call.input.shape[-rank:], call.out_shape[-rank:], strict=True)}
    given = set(factors) if factors else grown
    exact = not align_corners and given == grown and grown <= {1.0, 2.0, 4.0, 8.0, 16.0}
    return call.linear(terms=32 if exact else -1, nonnegative=True)


@register_rule(aten.upsample_bicubic2d)
def upsample_bicubic(call: Call, *args: Any) -> Result:
    raise Refusal("interpolation mode 'bicubic': use nearest or (bi/tri)linear")
