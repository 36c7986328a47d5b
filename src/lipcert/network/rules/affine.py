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
from lipcert.network.rules.arithmetic import product_of_inputs
from lipcert.network.rules.call import Call
from lipcert.network.rules.registry import rule_for
from lipcert.network.rules.values import Constant, Input, Refusal, Result


def _constant(value: Any, what: str = "weight") -> Live:
    if not isinstance(value, Constant):
        raise Refusal(f"its {what} depends on the network's input, so it is not linear")
    return value.read


def _row_shape(value: Any) -> Shape:
    if not isinstance(value, Input):
        raise Refusal("its first argument does not depend on the network's input")
    return value.shape


def _constant_bias(bias: Any) -> None:
    if isinstance(bias, Input):
        raise Refusal("its bias depends on the network's input; add it afterwards")


@rule_for("linear inner")
def linear(call: Call, x: Any, weight: Any, bias: Any = None) -> Result:
    _constant_bias(bias)
    read = _constant(weight)
    shape = _row_shape(x)
    # A single row of weights drops the last axis, which `Dense` does not.
    if read().dim() != 2:
        return call.product(terms=shape[-1])
    return Dense(read, shape, call.out_shape)


@rule_for("matmul mm bmm mv")
def matmul(call: Call, a: Any, b: Any) -> Result:
    if isinstance(a, Input) and isinstance(b, Input):
        return _product_of_matrices(call, a, b)
    shape = call.input.shape
    if isinstance(a, Input):
        # x @ b is y = bᵀx along the last axis.
        if b().dim() == 2:
            return Dense(lambda: b().T, shape, call.out_shape)
        return call.product(terms=shape[-1])
    # With a batch of matrices on the other side, rows stay apart because the batch axis
    # is in front of both.
    if len(shape) < 2:
        raise Refusal(
            "it multiplies a constant matrix by a tensor whose rows are columns; use x @ W"
        )
    return call.product(terms=shape[-2])


def _product_of_matrices(call: Call, a: Input, b: Input) -> Result:
    """Of every row of the batch by itself: both have matrices behind the batch axis, and the same axes before them."""
    if len(a.shape) < 2 or len(b.shape) < 2 or a.shape[:-2] != b.shape[:-2]:
        raise Refusal(
            "it multiplies tensors that depend on the input and differ in their leading axes; expand them"
        )
    return product_of_inputs(call, a, b, terms=a.shape[-1])


@rule_for("addmm")
def addmm(
    call: Call, bias: Any, x: Any, weight: Any, *, beta: float = 1, alpha: float = 1
) -> Result:
    _constant_bias(bias)
    if alpha != 1:
        raise Refusal("alpha must be 1")
    return matmul(call, x, weight)


@rule_for("tensordot")
def tensordot(call: Call, a: Any, b: Any, dims_a: Any, dims_b: Any) -> Result:
    if not isinstance(a, Input) or not isinstance(b, Constant):
        raise Refusal(
            "its first argument must be the network's input, and the second one constant; use einsum"
        )
    return call.product(terms=prod(a.shape[call.axis(dim)] for dim in dims_a))


@rule_for("einsum")
def einsum(call: Call, equation: str, tensors: Any, path: Any = None) -> Result:
    if len(call.inputs) != 1:
        raise Refusal(
            "a product of two tensors that depend on the input is not linear; use a constant"
        )
    # For 'bi,oi->bo' with x first: the operand is 'bi', its batch axis b, and i, which
    # is not in the result, is summed.
    left, arrow, result = equation.replace(" ", "").partition("->")
    operands = left.split(",")
    operand = operands[tensors.index(call.input)]
    in_front = result[:1] == operand[:1] and operand.count(operand[0]) == 1
    if not arrow or "." in equation or not in_front:
        raise Refusal(
            "write its equation with the batch axis in front on both sides, such as 'bi,oi->bo'"
        )
    sizes: dict[str, int] = {}
    for letters, tensor in zip(operands, tensors, strict=True):
        shape = (1, *call.input.shape)
        if isinstance(tensor, Constant):
            shape = tuple(tensor().shape)
        sizes.update(zip(letters, shape, strict=True))
    # What is left are the letters that are summed over: the product of their sizes
    # counts the products of an entry.
    for letter in result:
        del sizes[letter]
    # What is multiplied first may under- or overflow: rounding errors are unknown.
    if len(tensors) > 2:
        return call.linear()
    return call.product(terms=prod(sizes.values()) + len(tensors))


def per_axis(value: Any, axes: int) -> Shape:
    """One number for each axis, from one for each or one for all."""
    if isinstance(value, int):
        return (value,) * axes
    if len(value) == 1:
        return tuple(value) * axes
    return tuple(value)


def _kernel(x: Any, weight: Any, bias: Any) -> tuple[Live, Shape, int]:
    """How to read the kernel, the shape of a row, and the number of spatial axes."""
    _constant_bias(bias)
    read, shape = _constant(weight), _row_shape(x)
    axes = read().dim() - 2
    if len(shape) != axes + 1:
        raise Refusal(
            "it takes the batch axis for that of the channels; give its input a batch axis"
        )
    return read, shape, axes


@rule_for("conv1d conv2d conv3d")
def convolution(
    call: Call, x: Any, weight: Any, bias: Any = None, *args: Any, **kwargs: Any
) -> Result:
    """A convolution, preceded by an explicit padding where the padding differs between the sides."""
    read, shape, axes = _kernel(x, weight, bias)
    stride = per_axis(call.argument("stride"), axes)
    dilation = per_axis(call.argument("dilation"), axes)
    groups, result = call.argument("groups"), call.out_shape
    padding = call.argument("padding")
    if padding == "valid":
        padding = 0
    if padding != "same":
        around = per_axis(padding, axes)
        return Convolution(read, shape, result, stride, around, dilation, groups)
    # "same" adds d(k − 1) zeros along each axis; if that is odd, one more on the right
    # than on the left.
    added = [d * (k - 1) for d, k in zip(dilation, read().shape[2:], strict=True)]
    if all(total % 2 == 0 for total in added):
        around = tuple(total // 2 for total in added)
        return Convolution(read, shape, result, stride, around, dilation, groups)
    pad, around = _padding(shape, added), (0,) * axes
    inner = pad.out_shape
    return [pad, Convolution(read, inner, result, stride, around, dilation, groups)]


def _padding(shape: Shape, added: list[int]) -> Function:
    """Zeros around the spatial axes of a row, so many along each; the odd one is on the right."""
    widths: list[int] = []
    # F.pad starts with the last axis.
    for total in reversed(added):
        widths += [total // 2, total - total // 2]
    sides = [side + total for side, total in zip(shape[1:], added, strict=True)]
    padded = (shape[0], *sides)
    return Function(
        lambda t: F.pad(t, widths), shape, padded, terms=0, nonnegative=True
    )


@rule_for("conv_transpose1d conv_transpose2d conv_transpose3d")
def transposed_convolution(
    call: Call, x: Any, weight: Any, bias: Any = None, *args: Any, **kwargs: Any
) -> Result:
    read, shape, axes = _kernel(x, weight, bias)
    names, shapes = ("stride", "padding", "dilation"), (shape, call.out_shape)
    stride, padding, dilation = (per_axis(call.argument(name), axes) for name in names)
    groups = call.argument("groups")
    return TransposedConvolution(read, *shapes, stride, padding, dilation, groups)


@rule_for(
    "batch_norm _native_batch_norm_legit_no_training _native_batch_norm_legit_functional _native_batch_norm_legit"
)
def batch_norm(call: Call, x: Any, weight: Any, bias: Any, *args: Any) -> Result:
    """y = (x − mean)/√(variance + eps)·weight + bias, per channel."""
    mean, variance = call.argument("running_mean"), call.argument("running_var")
    eps: float = call.argument("eps")
    if mean is None or variance is None:
        raise Refusal(
            "without running statistics its output depends on the whole batch; set track_running_stats=True"
        )
    if call.argument("training"):
        raise TrainingModeError(
            f"{call.name} (BatchNorm) is in training mode, where it depends on the batch; call model.eval() first"
        )
    shape = _row_shape(x)
    read_mean, read_variance = _constant(mean, "mean"), _constant(variance, "variance")
    _check_variance(read_variance(), eps)

    def per_channel(values: Tensor) -> Tensor:
        return values.reshape(-1, *(1,) * (len(shape) - 1))

    def scale() -> Tensor:
        factor = (read_variance() + eps).rsqrt()
        if weight is not None:
            factor = factor * weight()
        return factor

    # |mean·scale| and |bias| apart: they may cancel, and what is rounded is what they
    # were before.
    def offset() -> Tensor:
        added = (read_mean() * scale()).abs()
        if bias is not None:
            added = added + bias().abs()
        return per_channel(added)

    return Scale(lambda: per_channel(scale()), shape, terms=6, offset=offset)


def _check_variance(variance: Tensor, eps: float) -> None:
    # A sum below the smallest normal number may be taken for zero, whose inverse root
    # is infinite. NaN is refused by its name.
    too_small = variance + eps < torch.finfo(torch.float32).tiny
    if bool(((variance < 0) | too_small).any()):
        raise Refusal(
            "its running variance is negative, or too small; restore the last good statistics, or raise eps"
        )
