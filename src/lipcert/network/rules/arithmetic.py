"""Rules for sums, products with constants, and what joins several tensors."""

from __future__ import annotations

from typing import Any

import torch

from lipcert.network.linear import Embed, Identity, LinearOp, Scale
from lipcert.network.program import Live
from lipcert.network.rules.registry import (
    BatchSize,
    Call,
    Constant,
    Input,
    Refusal,
    Result,
    Sum,
    broadcast,
    register_rule,
)

aten = torch.ops.aten


@register_rule(aten.add)
def add(call: Call, a: Any, b: Any, *, alpha: float = 1) -> Result:
    return _sum(call, [(a, 1.0), (b, float(alpha))])


@register_rule(aten.sub, aten.subtract)
def subtract(call: Call, a: Any, b: Any, *, alpha: float = 1) -> Result:
    return _sum(call, [(a, 1.0), (b, -float(alpha))])


@register_rule(aten.rsub)
def reverse_subtract(call: Call, a: Any, b: Any, alpha: float = 1) -> Result:
    return _sum(call, [(b, 1.0), (a, -float(alpha))])


@register_rule(aten.neg, aten.negative)
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
            chain.append(broadcast(value.shape, call.out_shape))
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


@register_rule(aten.mul, aten.multiply)
def multiply(call: Call, a: Any, b: Any) -> Result:
    if isinstance(a, Input) and isinstance(b, Input):
        raise Refusal(
            "a product of two tensors that depend on the input is not Lipschitz; use a network without gating"
        )
    value, constant = (a, b) if isinstance(a, Input) else (b, a)
    return _scale(call, value, _as_tensor(constant))


@register_rule(aten.div, aten.true_divide, aten.divide)
def divide(call: Call, a: Any, b: Any, *, rounding_mode: str | None = None) -> Result:
    if rounding_mode is None and isinstance(a, Input) and a == b:
        raise Refusal("a quotient of a tensor and itself is not continuous at zero; leave it out")
    if rounding_mode is None and isinstance(a, Input) and isinstance(b, Input):
        raise Refusal("a quotient of two tensors that depend on the input has no bounded slope; divide by a constant")
    if not isinstance(a, Input) or isinstance(b, Input) or rounding_mode is not None:
        raise Refusal("only division by a constant without rounding is supported")
    read = _as_tensor(b)
    return _scale(call, a, lambda: 1.0 / read())


def _as_tensor(value: Any) -> Live:
    if isinstance(value, BatchSize):
        raise Refusal("it reads the number of rows of the batch, so each row depends on the whole batch")
    if not isinstance(value, Constant):
        return _filled(float(value))
    read = value.read
    return read if read().is_floating_point() else lambda: read().double()


def _one_row(call: Call, constant: Live) -> Live:
    """A factor without its batch axis."""
    shape = constant().shape
    if len(shape) <= len(call.out_shape):
        return constant
    if shape[0] != 1:
        raise Refusal("the constant factor has its own batch axis")
    return lambda: constant().squeeze(0)


def _scale(call: Call, x: Input, constant: Live) -> Result:
    scale = Scale(_one_row(call, constant), call.out_shape, terms=3)
    return scale if x.shape == call.out_shape else [broadcast(x.shape, call.out_shape), scale]


@register_rule(aten.addcmul, aten.addcdiv)
def add_product(call: Call, x: Any, a: Any, b: Any, *, value: float = 1) -> Result:
    """x + value·a·b, or x + value·a/b."""
    divides = "addcdiv" in str(call.node.target)  # type: ignore[union-attr]
    if isinstance(b, Input) and (divides or isinstance(a, Input)):
        raise Refusal("a product or quotient of two tensors that depend on the input is not Lipschitz; use a constant")
    factor, other = (b, a) if isinstance(b, Input) else (a, b)
    if not isinstance(factor, Input):
        return _sum(call, [(x, 1.0)])
    read = _as_tensor(other)
    return _weighted(call, [(x, None), (factor, lambda: value / read() if divides else value * read())])


@register_rule(aten.lerp)
def interpolate(call: Call, start: Any, end: Any, weight: Any) -> Result:
    """(1 − weight)·start + weight·end."""
    if isinstance(weight, Input):
        raise Refusal("its weight depends on the network's input, so it is not Lipschitz; use a constant")
    read = _as_tensor(weight)
    return _weighted(call, [(start, lambda: 1 - read()), (end, read)])


def _weighted(call: Call, terms: list[tuple[Any, Live | None]]) -> Result:
    """Σ of inputs with factors, None for 1; constants do not matter to the linear part."""
    chains: list[tuple[Input, list[LinearOp]]] = []
    for value, factor in terms:
        if isinstance(value, Input):
            chain: list[LinearOp] = [] if value.shape == call.out_shape else [broadcast(value.shape, call.out_shape)]
            if factor is None:
                chain.append(Identity(call.out_shape))
            else:
                chain.append(Scale(_one_row(call, factor), call.out_shape, terms=4))
            chains.append((value, chain))
    return Sum(chains)


@register_rule(aten.cat, aten.concat, aten.concatenate)
def concatenate(call: Call, tensors: Any, dim: int = 0) -> Result:
    position = call.axis(dim, of=call.out_shape)
    terms: list[tuple[Input, list[LinearOp]]] = []
    offset = 0
    for tensor in tensors:
        if isinstance(tensor, Input):
            terms.append((tensor, [Embed(tensor.shape, call.out_shape, position, offset)]))
            offset += tensor.shape[position]
        elif tensor().numel() > 0 or tensor().dim() > 1:  # torch leaves out empty vectors
            offset += tensor().shape[position + 1]
    return Sum(terms)


@register_rule(aten.hstack, aten.dstack, aten.vstack, aten.column_stack)
def concatenate_one_axis(call: Call, tensors: Any) -> Result:
    return call.each()


@register_rule(aten.stack)
def stack(call: Call, tensors: Any, dim: int = 0) -> Result:
    call.axis(dim, of=call.out_shape)
    return call.each()


@register_rule(aten.where)
def where(call: Call, mask: Any, a: Any = None, b: Any = None) -> Result:
    if isinstance(mask, Input) or a is None:
        raise Refusal("its mask depends on the network's input, so it jumps; use a constant mask, or torch.maximum")
    if isinstance(a, float | int) or isinstance(b, float | int):
        return _without_numbers(call)
    return _broadcast_first(call, call.each())


def _without_numbers(call: Call) -> Result:
    """A call that moves entries of the only input and writes numbers beside them."""
    return call.linear(lambda x: call._rerun(x) - call._rerun(torch.zeros_like(x)), terms=0, nonnegative=True)


@register_rule(aten.index_fill)
def index_fill(call: Call, x: Any, dim: int, index: Any, value: Any) -> Result:
    if isinstance(index, Input) or isinstance(value, Input):
        raise Refusal("its positions or its value depend on the network's input; use constants")
    call.axis(dim)
    return _without_numbers(call)


@register_rule(aten.index_put)
def index_put(call: Call, x: Any, indices: Any, values: Any, accumulate: bool = False) -> Result:
    """Writes constants to constant positions, as y[:, [0, 2]] = 0 does."""
    if not isinstance(x, Input) or not isinstance(values, Constant) or any(isinstance(i, Input) for i in indices):
        raise Refusal("it writes what depends on the network's input, or where it says; use slices, cat or where")
    if accumulate:
        raise Refusal("it adds to entries; write the sum out")
    if not indices or indices[0] is not None:
        raise Refusal("it writes into some rows of the batch")
    return _without_numbers(call)


@register_rule(aten.masked_fill)
def masked_fill(call: Call, x: Any, mask: Any, value: Any) -> Result:
    if isinstance(mask, Input) or isinstance(value, Input):
        raise Refusal("its mask or its value depends on the network's input; use a constant mask")
    return call.each() if not isinstance(value, float | int) else _filled_entries(call, mask)


def _filled_entries(call: Call, mask: Constant) -> Result:
    return call.linear(lambda x: torch.masked_fill(x, mask(), 0.0), terms=0, nonnegative=True)


@register_rule(aten.select_scatter, aten.slice_scatter)
def scatter(call: Call, x: Any, source: Any, dim: int = 0, *args: Any) -> Result:
    """Writes into a part of a tensor, as y[:, 0] = z does."""
    is_slice = "slice" in str(call.node.target)  # type: ignore[union-attr]
    if dim % (len(call.out_shape) + 1) == 0 and not (is_slice and _is_everything(args)):
        raise Refusal("it writes into some rows of the batch")
    return call.each()


def _is_everything(args: tuple[Any, ...]) -> bool:
    """Whether start, end and step of a slice leave nothing out."""
    start, end, step = (*args, None, None, None)[:3]
    return start in (None, 0) and (end is None or (isinstance(end, int) and end >= 2**62)) and step in (None, 1)


@register_rule(aten.copy)
def copy(call: Call, x: Any, source: Any, *args: Any) -> Result:
    """The source in the shape of x, whose values are not read."""
    if not isinstance(source, Input):
        raise Refusal("it overwrites a tensor that depends on the input")
    if source.shape == call.out_shape:
        return source
    return Sum([(source, [broadcast(source.shape, call.out_shape)])])


def _broadcast_first(call: Call, total: Sum) -> Sum:
    for value, _ in total.terms:
        if len(value.shape) != len(call.out_shape):
            raise Refusal(
                f"it broadcasts rows of shape {value.shape} to {call.out_shape}; reshape them explicitly first"
            )
    return total
