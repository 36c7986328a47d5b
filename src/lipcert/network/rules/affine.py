"""Rules for affine operations with weights: dense, convolution, batch normalisation, arithmetic with constants."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipcert.errors import TrainingModeError
from lipcert.network.linear import (
    Convolution,
    Dense,
    Embed,
    Function,
    Identity,
    LinearOp,
    Live,
    Scale,
    Shape,
    TransposedConvolution,
)
from lipcert.network.rules.registry import Call, Constant, Input, Refusal, Result, Sum, register_rule


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


@register_rule(torch.add, operator.add, operator.iadd, "add", "add_", "__add__", "__radd__")
def add(call: Call, a: Any, b: Any, *, alpha: float = 1) -> Result:
    return _sum(call, [(a, 1.0), (b, float(alpha))])


@register_rule(torch.sub, torch.subtract, operator.sub, operator.isub, "sub", "sub_", "subtract")
def subtract(call: Call, a: Any, b: Any, *, alpha: float = 1) -> Result:
    return _sum(call, [(a, 1.0), (b, -float(alpha))])


@register_rule(torch.rsub, "rsub")
def reverse_subtract(call: Call, a: Any, b: Any, *, alpha: float = 1) -> Result:
    return _sum(call, [(b, 1.0), (a, -float(alpha))])


@register_rule(torch.neg, torch.negative, operator.neg, "neg", "negative")
def negate(call: Call, x: Input) -> Result:
    return Identity(x.shape, sign=-1)


def _sum(call: Call, terms: list[tuple[Any, float]]) -> Result:
    """Σ of the given inputs and constants; constants do not matter to the linear part, broadcasting does."""
    chains: list[tuple[Input, list[LinearOp]]] = []
    for value, sign in terms:
        if not isinstance(value, Input):
            continue
        chain: list[LinearOp] = []
        if value.shape != call.out_shape:
            chain.append(_broadcast(value.shape, call.out_shape))
        if sign == -1:
            chain.append(Identity(call.out_shape, sign=-1))
        elif sign != 1:
            chain.append(Scale(_filled(sign), call.out_shape))
        chains.append((value, chain))
    return Sum(chains)


def _filled(value: float) -> Live:
    return lambda: torch.tensor(value, dtype=torch.float64)


def _broadcast(shape: Shape, out_shape: Shape) -> Function:
    if len(shape) != len(out_shape):
        raise Refusal(f"it broadcasts rows of shape {shape} to {out_shape}; reshape them explicitly first")
    return Function(lambda x: x.expand(x.shape[0], *out_shape), shape, out_shape, terms=0, nonnegative=True)


@register_rule(torch.mul, torch.multiply, operator.mul, operator.imul, "mul", "mul_", "multiply", "__mul__", "__rmul__")
def multiply(call: Call, a: Any, b: Any) -> Result:
    if isinstance(a, Input) and isinstance(b, Input):
        raise Refusal(
            "a product of two tensors that depend on the input is not Lipschitz; use a network without gating"
        )
    value, constant = (a, b) if isinstance(a, Input) else (b, a)
    return _scale(call, value, _as_tensor(constant))


@register_rule(torch.div, torch.true_divide, operator.truediv, operator.itruediv, "div", "div_", "true_divide")
def divide(call: Call, a: Any, b: Any, *, rounding_mode: str | None = None) -> Result:
    if not isinstance(a, Input) or isinstance(b, Input) or rounding_mode is not None:
        raise Refusal("only division by a constant without rounding is supported")
    read = _as_tensor(b)
    return _scale(call, a, lambda: 1.0 / read())


def _as_tensor(value: Any) -> Live:
    return value.read if isinstance(value, Constant) else _filled(float(value))


def _scale(call: Call, x: Input, constant: Live) -> Result:
    def factor() -> Tensor:
        tensor = constant()
        if tensor.dim() > len(call.out_shape):  # a constant with a batch axis of one
            tensor = tensor.reshape(tensor.shape[1:])
        return tensor

    shape = constant().shape
    if len(shape) > len(call.out_shape) and shape[0] != 1:
        raise Refusal("the constant factor has its own batch axis")
    scale = Scale(factor, call.out_shape, terms=2)
    return scale if x.shape == call.out_shape else [_broadcast(x.shape, call.out_shape), scale]


@register_rule(torch.cat, torch.concat, torch.concatenate)
def concatenate(call: Call, tensors: Any, dim: int = 0, *, axis: int | None = None) -> Result:
    rank = len(call.out_shape)
    position = (dim if axis is None else axis) % (rank + 1) - 1
    if position < 0:
        raise Refusal("it concatenates along the batch axis")
    terms: list[tuple[Input, list[LinearOp]]] = []
    offset = 0
    for tensor in tensors:
        if isinstance(tensor, Input):
            terms.append((tensor, [Embed(tensor.shape, call.out_shape, position, offset)]))
            offset += tensor.shape[position]
        else:
            offset += tensor().shape[position + 1]
    return Sum(terms)


def _constant_bias(bias: Any) -> None:
    if isinstance(bias, Input):
        raise Refusal("its bias depends on the network's input; add it afterwards")


def _input(value: Any) -> Input:
    if not isinstance(value, Input):
        raise Refusal("its first argument does not depend on the network's input")
    return value


def _tuple(value: Any, dims: int) -> Shape:
    return (value,) * dims if isinstance(value, int) else tuple(value) * (dims if len(value) == 1 and dims > 1 else 1)
