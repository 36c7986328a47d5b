"""Rules for operations that move, average or sum entries, and for those that change nothing."""

from __future__ import annotations

import operator
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lipcert.errors import TrainingModeError
from lipcert.network.linear import Reshape
from lipcert.network.rules.registry import Call, Input, Refusal, Result, register_rule


@register_rule(
    nn.Flatten, nn.Unflatten, torch.flatten, torch.reshape, torch.squeeze, torch.unsqueeze, torch.unflatten,
    "flatten", "reshape", "view", "squeeze", "unsqueeze", "unflatten", "view_as", "reshape_as",
)  # fmt: skip
def reshape(call: Call, *args: Any, **kwargs: Any) -> Result:
    return Reshape(call.inputs[0].shape, call.out_shape)


@register_rule(
    torch.permute, torch.transpose, torch.swapaxes, torch.movedim, torch.flip, torch.narrow, torch.roll,
    operator.getitem,
    F.pixel_shuffle, F.pixel_unshuffle, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle, F.channel_shuffle,
    nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d,
    nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d, nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d,
    "permute", "transpose", "swapaxes", "movedim", "flip", "narrow", "roll", "__getitem__", "expand", "expand_as",
    "repeat_interleave",
)  # fmt: skip
def move(call: Call, *args: Any, **kwargs: Any) -> Result:
    return call.linear(terms=0, nonnegative=True)


@register_rule(nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d)
def constant_pad_module(call: Call, x: Input) -> Result:
    padding: Any = call.module.padding  # type: ignore[union-attr]
    return call.linear(lambda t: F.pad(t, padding), terms=0, nonnegative=True)


@register_rule(F.pad)
def pad_function(call: Call, input: Input, pad: Any, mode: str = "constant", value: float | None = None) -> Result:
    return call.linear(lambda t: F.pad(t, pad, mode=mode), terms=0, nonnegative=True)


@register_rule(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
def average_pool_module(call: Call, x: Input) -> Result:
    return _average(call, call.module.kernel_size)  # type: ignore[union-attr]


@register_rule(F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
def average_pool_function(call: Call, input: Input, kernel_size: Any, *args: Any, **kwargs: Any) -> Result:
    return _average(call, kernel_size)


def _average(call: Call, kernel_size: Any) -> Result:
    dims = len(call.out_shape) - 1
    window = kernel_size**dims if isinstance(kernel_size, int) else prod(kernel_size)
    return call.linear(terms=window + 1, nonnegative=True)


@register_rule(
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
    F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d,
)  # fmt: skip
def adaptive_average(call: Call, *args: Any, **kwargs: Any) -> Result:
    window = prod(n // m + 2 for n, m in zip(call.input.shape[1:], call.out_shape[1:], strict=True))
    return call.linear(terms=window + 1, nonnegative=True)


@register_rule(torch.mean, torch.sum, "mean", "sum")
def reduce(call: Call, *args: Any, **kwargs: Any) -> Result:
    return call.linear(terms=prod(call.input.shape) // max(prod(call.out_shape), 1) + 1, nonnegative=True)


@register_rule(nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d)
def upsample_module(call: Call, x: Input) -> Result:
    module: Any = call.module
    return _interpolation(call, module.mode, module.scale_factor, module.align_corners)


@register_rule(F.interpolate)
def upsample_function(
    call: Call,
    input: Input,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    **kwargs: Any,
) -> Result:
    return _interpolation(call, mode, scale_factor, align_corners)


def _interpolation(call: Call, mode: str, factor: Any, align_corners: bool | None) -> Result:
    """Weights are exact if every side grows by a power of two; else they come from float positions, errors unknown."""
    if mode in ("nearest", "nearest-exact"):
        return call.linear(terms=0, nonnegative=True)
    if mode in ("linear", "bilinear", "trilinear"):
        grown = {m / n for n, m in zip(call.input.shape[1:], call.out_shape[1:], strict=True)}
        given = set(factor) if isinstance(factor, tuple | list) else grown if factor is None else {float(factor)}
        exact = not align_corners and given == grown and grown <= {1.0, 2.0, 4.0, 8.0, 16.0}
        return call.linear(terms=32 if exact else -1, nonnegative=True)
    raise Refusal(f"interpolation mode {mode!r}: use nearest or (bi/tri)linear")


@register_rule(nn.Identity, "contiguous", "clone", torch.clone, "to", "float", "double", "type_as", "requires_grad_")
def unchanged(call: Call, *args: Any, **kwargs: Any) -> Result:
    return call.inputs[0]


@register_rule(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)
def dropout_function(call: Call, input: Input, p: float = 0.5, training: bool = True, inplace: bool = False) -> Result:
    if training:
        raise Refusal("it is random in eval mode too; pass training=self.training")
    return dropout(call, input)


@register_rule(F.alpha_dropout, F.feature_alpha_dropout)
def alpha_dropout_function(
    call: Call, input: Input, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Result:
    return dropout_function(call, input, p, training)


@register_rule(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
def dropout(call: Call, *args: Any, **kwargs: Any) -> Result:
    if call.training:
        raise TrainingModeError(
            f"{call.name} (dropout) is in training mode, where it is random; call model.eval() first"
        )
    return call.inputs[0]
