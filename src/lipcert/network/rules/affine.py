"""Rules for affine operations with weights: products with matrices, convolutions, batch normalisation."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipcert.errors import TrainingModeError
from lipcert.network.convolution import Convolution, TransposedConvolution
from lipcert.network.linear import Dense, Function, Scale
from lipcert.network.program import Live, Shape
from lipcert.network.rules.registry import Call, Constant, Input, Refusal, Result, register_rule

aten = torch.ops.aten


def _constant(value: Any, what: str = "weight") -> Live:
    if not isinstance(value, Constant):
        raise Refusal(f"its {what} depends on the network's input, so it is not linear")
    return value.read


def _input(value: Any) -> Input:
    if not isinstance(value, Input):
        raise Refusal("its first argument does not depend on the network's input")
    return value


def _constant_bias(bias: Any) -> None:
    if isinstance(bias, Input):
        raise Refusal("its bias depends on the network's input; add it afterwards")


@register_rule(aten.linear, aten.inner)
def linear(call: Call, x: Any, weight: Any, bias: Any = None) -> Result:
    _constant_bias(bias)
    read = _constant(weight)
    if read().dim() != 2:
        return call.product(terms=_input(x).shape[-1])
    return Dense(read, _input(x).shape, call.out_shape)


@register_rule(aten.matmul, aten.mm, aten.bmm, aten.mv)
def matmul(call: Call, a: Any, b: Any) -> Result:
    if isinstance(a, Input) and isinstance(b, Input):
        raise Refusal("a product of two matrices that depend on the input is not linear; use a constant matrix")
    if isinstance(a, Input) and isinstance(b, Constant) and b().dim() == 2:
        read = b.read
        return Dense(lambda: read().T, a.shape, call.out_shape)
    # With a batch of matrices on the other side, rows stay apart because the batch axis is in front of both.
    shape = call.input.shape
    if isinstance(b, Input) and len(shape) < 2:
        raise Refusal("it multiplies a constant matrix by a tensor whose rows are columns; use x @ W")
    return call.product(terms=shape[-1] if isinstance(a, Input) else shape[-2])


@register_rule(aten.addmm)
def addmm(call: Call, bias: Any, x: Any, weight: Any, *, beta: float = 1, alpha: float = 1) -> Result:
    _constant_bias(bias)
    if alpha != 1:
        raise Refusal("alpha must be 1")
    return matmul(call, x, weight)


@register_rule(aten.addmv, aten.baddbmm, aten.addbmm, aten.addr)
def product_and_sum(call: Call, *args: Any, **kwargs: Any) -> Result:
    raise Refusal("write it as a product and a sum, bias + a @ b")


@register_rule(aten.tensordot)
def tensordot(call: Call, a: Any, b: Any, dims_a: Any, dims_b: Any) -> Result:
    if not isinstance(a, Input) or not isinstance(b, Constant):
        raise Refusal("its first argument must be the network's input, and the second one constant; use einsum")
    return call.product(terms=prod(a.shape[call.axis(dim)] for dim in dims_a))


@register_rule(aten.bilinear)
def bilinear(call: Call, *args: Any, **kwargs: Any) -> Result:
    raise Refusal("a product of two tensors that depend on the input is not Lipschitz; use nn.Linear")


@register_rule(aten.einsum)
def einsum(call: Call, equation: str, tensors: Any, path: Any = None) -> Result:
    places = [place for place, tensor in enumerate(tensors) if isinstance(tensor, Input)]
    if len(places) != 1:
        raise Refusal("a product of two tensors that depend on the input is not linear; use a constant")
    letters = equation.replace(" ", "").split("->")
    operand = letters[0].split(",")[places[0]]
    if len(letters) < 2 or "." in equation or letters[1][:1] != operand[:1] or operand.count(operand[0]) > 1:
        raise Refusal("write its equation with the batch axis in front on both sides, such as 'bi,oi->bo'")
    sizes: dict[str, int] = {}
    for named, tensor in zip(letters[0].split(","), tensors, strict=True):
        shape = (1, *tensor.shape) if isinstance(tensor, Input) else tensor().shape
        sizes |= dict(zip(named, shape, strict=True))
    summed = prod(size for letter, size in sizes.items() if letter not in letters[1])  # by one product, or by several
    return call.product(terms=summed + len(tensors))


@register_rule(aten.conv1d, aten.conv2d, aten.conv3d)
def convolution(
    call: Call,
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Result:
    """A convolution, preceded by an explicit padding where the padding differs between the sides."""
    _constant_bias(bias)
    read, shape = _constant(weight), _input(x).shape
    kernel = read().shape[2:]
    dims = len(kernel)
    if len(shape) != dims + 1:
        raise Refusal("it takes the batch axis for that of the channels; give its input a batch axis")
    stride, dilation = _tuple(stride, dims), _tuple(dilation, dims)
    if padding == "valid":
        before = after = (0,) * dims
    elif padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        before, after = tuple(t // 2 for t in total), tuple(t - t // 2 for t in total)
    else:
        before = after = _tuple(padding, dims)
    if before == after:
        return Convolution(read, shape, call.out_shape, stride, before, dilation, groups)
    pads = [width for pair in reversed(list(zip(before, after, strict=True))) for width in pair]
    padded = (shape[0], *(n + b + a for n, b, a in zip(shape[1:], before, after, strict=True)))
    pad = Function(lambda t: F.pad(t, pads), shape, padded, terms=0, nonnegative=True)
    return [pad, Convolution(read, padded, call.out_shape, stride, (0,) * dims, dilation, groups)]


@register_rule(aten.conv_transpose1d, aten.conv_transpose2d, aten.conv_transpose3d)
def transposed_convolution(
    call: Call,
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Result:
    _constant_bias(bias)
    read, shape = _constant(weight), _input(x).shape
    dims = read().dim() - 2
    if len(shape) != dims + 1:
        raise Refusal("it takes the batch axis for that of the channels; give its input a batch axis")
    strides, pads, extra, gaps = (_tuple(value, dims) for value in (stride, padding, output_padding, dilation))
    return TransposedConvolution(read, shape, call.out_shape, strides, pads, extra, gaps, groups)


@register_rule(aten.batch_norm)
def batch_norm(
    call: Call,
    x: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    variance: Any,
    training: bool,
    momentum: float,
    eps: float,
    *_: Any,
) -> Result:
    if mean is None or variance is None:
        raise Refusal("without running statistics its output depends on the whole batch; set track_running_stats=True")
    if training:
        raise TrainingModeError(
            f"{call.name} (BatchNorm) is in training mode, where it depends on the batch; call model.eval() first"
        )
    return _normalisation(call, _input(x), weight, bias, mean, variance, eps)


@register_rule(aten._native_batch_norm_legit_no_training)
def functional_batch_norm(
    call: Call, x: Any, weight: Any, bias: Any, mean: Any, variance: Any, momentum: float, eps: float
) -> Result:
    return _normalisation(call, _input(x), weight, bias, mean, variance, eps)


@register_rule(aten._native_batch_norm_legit_functional, aten._native_batch_norm_legit)
def training_batch_norm(call: Call, x: Any, weight: Any, bias: Any, mean: Any, variance: Any, *_: Any) -> Result:
    return batch_norm(call, x, weight, bias, mean, variance, True, 0.1, 1e-5)


def _normalisation(call: Call, x: Input, weight: Any, bias: Any, mean: Any, variance: Any, eps: float) -> Result:
    """y = (x − mean)/√(variance + eps)·weight + bias, per channel."""

    def per_channel(values: Tensor) -> Tensor:
        return values.reshape(-1, *(1,) * (len(x.shape) - 1))

    read_mean, read_variance = _constant(mean, "mean"), _constant(variance, "variance")
    if bool((read_variance() + eps < torch.finfo(torch.float32).tiny).any()):  # NaN is refused elsewhere, by its name
        raise Refusal("its running variance is negative, or too small; restore the last good statistics, or raise eps")

    def scale() -> Tensor:
        inverse = (read_variance() + eps).rsqrt()
        return inverse * weight() if weight is not None else inverse

    def offset() -> Tensor:
        added = (read_mean() * scale()).abs()
        return per_channel(added + bias().abs() if bias is not None else added)

    return Scale(lambda: per_channel(scale()), x.shape, terms=6, offset=offset)


def _tuple(value: Any, dims: int) -> Shape:
    return (value,) * dims if isinstance(value, int) else tuple(value) * (dims if len(value) == 1 and dims > 1 else 1)
