"""Rules for sums, products with constants, and concatenation."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from lipcert.network.linear import Embed, Function, Identity, LinearOp, Live, Scale, Shape
from lipcert.network.rules.registry import Call, Constant, Input, Refusal, Result, Sum, register_rule


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
        elif chain:  # an addition, which is rounded, not a mere copy
            chain.append(Identity(call.out_shape))
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
