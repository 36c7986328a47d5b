"""Rules for affine operations with weights: dense, convolution, batch normalisation."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipcert.errors import TrainingModeError
from lipcert.network.convolution import Convolution, TransposedConvolution
from lipcert.network.linear import Dense, Function, Live, Scale, Shape
from lipcert.network.rules.registry import Call, Constant, Input, Refusal, Result, register_rule


def _live(value: Any) -> Live:
    if isinstance(value, Constant):
        return value.read
    if isinstance(value, Input):
        raise Refusal("its weight depends on the network's input, so it is not linear")
    return lambda: value


@register_rule(nn.Linear)
def linear_module(call: Call, x: Input) -> Result:
    module = call.module
    assert isinstance(module, nn.Linear)
    return Dense(lambda: module.weight, x.shape, call.out_shape)


@register_rule(F.linear)
def linear_function(call: Call, input: Input, weight: Constant, bias: Any = None) -> Result:
    _constant_bias(bias)
    return Dense(_live(weight), _input(input).shape, call.out_shape)


@register_rule(torch.matmul, operator.matmul, torch.mm, "matmul", "mm", "__matmul__")
def matmul(call: Call, x: Input, weight: Constant) -> Result:
    if not isinstance(x, Input) or (isinstance(weight, Constant) and weight().dim() != 2):
        raise Refusal("only x @ W with a constant matrix W is supported; use torch.nn.functional.linear")
    read = _live(weight)
    return Dense(lambda: read().T, x.shape, call.out_shape)


@register_rule(torch.addmm)
def addmm(call: Call, bias: Any, x: Input, weight: Constant, *, beta: float = 1, alpha: float = 1) -> Result:
    _constant_bias(bias)
    if alpha != 1:
        raise Refusal("alpha must be 1")
    return matmul(call, x, weight)


def _convolution(
    call: Call, x: Input, weight: Live, stride: Any, padding: Any, dilation: Any, groups: int, mode: str = "zeros"
) -> Result:
    """A convolution, preceded by an explicit padding where the padding is not zeros of the same width on both sides."""
    kernel = weight().shape[2:]
    dims = len(kernel)
    stride, dilation = _tuple(stride, dims), _tuple(dilation, dims)
    if padding == "valid":
        before = after = (0,) * dims
    elif padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        before, after = tuple(t // 2 for t in total), tuple(t - t // 2 for t in total)
    else:
        before = after = _tuple(padding, dims)
    if mode == "zeros" and before == after:
        return Convolution(weight, x.shape, call.out_shape, stride, before, dilation, groups)
    pads = [width for pair in reversed(list(zip(before, after, strict=True))) for width in pair]
    pad_mode = "constant" if mode == "zeros" else mode
    padded = (x.shape[0], *(n + b + a for n, b, a in zip(x.shape[1:], before, after, strict=True)))
    pad = Function(lambda t: F.pad(t, pads, mode=pad_mode), x.shape, padded, terms=0, nonnegative=True)
    return [pad, Convolution(weight, padded, call.out_shape, stride, (0,) * dims, dilation, groups)]


@register_rule(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def conv_module(call: Call, x: Input) -> Result:
    module: Any = call.module
    return _convolution(
        call,
        x,
        lambda: module.weight,
        module.stride,
        module.padding,
        module.dilation,
        module.groups,
        module.padding_mode,
    )


@register_rule(F.conv1d, F.conv2d, F.conv3d)
def conv_function(
    call: Call,
    input: Input,
    weight: Constant,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Result:
    return _convolution(call, _input(input), _live(weight), stride, padding, dilation, groups)


def _transposed(
    call: Call, x: Input, weight: Live, stride: Any, padding: Any, output_padding: Any, groups: int, dilation: Any
) -> Result:
    dims = weight().dim() - 2
    return TransposedConvolution(
        weight,
        x.shape,
        call.out_shape,
        _tuple(stride, dims),
        _tuple(padding, dims),
        _tuple(output_padding, dims),
        _tuple(dilation, dims),
        groups,
    )


@register_rule(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
def conv_transpose_module(call: Call, x: Input, output_size: Any = None) -> Result:
    module: Any = call.module
    if output_size is not None:
        raise Refusal("give the transposed convolution an output_padding instead of output_size")
    return _transposed(
        call,
        x,
        lambda: module.weight,
        module.stride,
        module.padding,
        module.output_padding,
        module.groups,
        module.dilation,
    )


@register_rule(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
def conv_transpose_function(
    call: Call,
    input: Input,
    weight: Constant,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Result:
    return _transposed(call, _input(input), _live(weight), stride, padding, output_padding, groups, dilation)


def _normalisation(x: Input, mean: Live, variance: Live, weight: Live | None, bias: Live | None, eps: float) -> Result:
    def per_channel(values: Tensor) -> Tensor:
        return values.reshape(-1, *(1,) * (len(x.shape) - 1))

    def scale() -> Tensor:
        inverse = (variance() + eps).rsqrt()
        return inverse * weight() if weight is not None else inverse

    def offset() -> Tensor:
        added = (mean() * scale()).abs()
        return per_channel(added + bias().abs() if bias is not None else added)

    return Scale(lambda: per_channel(scale()), x.shape, terms=6, offset=offset)


@register_rule(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
def batch_norm_module(call: Call, x: Input) -> Result:
    module: Any = call.module
    if not module.track_running_stats:
        raise Refusal("without running statistics its output depends on the whole batch; set track_running_stats=True")
    if call.training:
        raise TrainingModeError(
            f"{call.name} (BatchNorm) is in training mode, where it depends on the batch; call model.eval() first"
        )
    weight, bias = (lambda: module.weight, lambda: module.bias) if module.affine else (None, None)
    return _normalisation(x, lambda: module.running_mean, lambda: module.running_var, weight, bias, module.eps)


@register_rule(F.batch_norm)
def batch_norm_function(
    call: Call,
    input: Input,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Result:
    if training or running_var is None:
        raise Refusal("it normalises by the batch; pass running statistics and training=False")
    scale, shift = (_live(value) if value is not None else None for value in (weight, bias))
    return _normalisation(_input(input), _live(running_mean), _live(running_var), scale, shift, eps)


def _constant_bias(bias: Any) -> None:
    if isinstance(bias, Input):
        raise Refusal("its bias depends on the network's input; add it afterwards")


def _input(value: Any) -> Input:
    if not isinstance(value, Input):
        raise Refusal("its first argument does not depend on the network's input")
    return value


def _tuple(value: Any, dims: int) -> Shape:
    return (value,) * dims if isinstance(value, int) else tuple(value) * (dims if len(value) == 1 and dims > 1 else 1)
