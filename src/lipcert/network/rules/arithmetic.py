"""Rules for sums, and for products with constants."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lipcert.network.linear import Identity, LinearOp, Scale, number
from lipcert.network.program import Live
from lipcert.network.rules.broadcasting import broadcast
from lipcert.network.rules.call import Call
from lipcert.network.rules.registry import rule_for
from lipcert.network.rules.values import (
    BatchSize,
    Constant,
    Input,
    Refusal,
    Result,
    Sum,
)
from lipcert.network.tangents import ONLY_LOCALLY, FlatPair, Product, local_slope


@rule_for("add sub subtract rsub")
def add(call: Call, a: Any, b: Any, alpha: float = 1) -> Result:
    """a + alpha·b, a − alpha·b, or b − alpha·a."""
    factor = float(alpha)
    if call.operator != "add":
        factor = -factor
    if call.operator == "rsub":
        a, b = b, a
    return _sum(call, (a, 1.0), (b, factor))


@rule_for("neg negative")
def negate(call: Call, x: Input) -> Result:
    return Identity(x.shape, sign=-1)


@rule_for("mul multiply")
def multiply(call: Call, a: Any, b: Any) -> Result:
    if not isinstance(a, Input):
        a, b = b, a
    if isinstance(b, Input):
        return product_of_inputs(call, a, b)
    return _scale(call, a, _factor(b))


def product_of_inputs(call: Call, a: Input, b: Input, terms: int = 0) -> Result:
    """A gate, or a product of matrices: bounded over balls only."""
    if not call.local:
        raise Refusal(
            "a product of two tensors that depend on the input is not "
            f"Lipschitz; {ONLY_LOCALLY}"
        )
    return local_slope(Product(FlatPair(a.shape, b.shape), terms))


@rule_for("div true_divide divide")
def divide(call: Call, a: Any, b: Any, *, rounding_mode: str | None = None) -> Result:
    if rounding_mode is not None or not isinstance(a, Input):
        raise Refusal("only division by a constant without rounding is supported")
    # Equal `Input`s are the same node: x/x is 1, but 0/0 at zero.
    if a == b:
        raise Refusal(
            "a quotient of a tensor and itself is not continuous at zero; leave it out"
        )
    if isinstance(b, Input):
        raise Refusal(
            "a quotient of two tensors that depend on the input has no bounded "
            "slope; divide by a constant"
        )
    divisor = _factor(b)
    return _scale(call, a, lambda: 1.0 / divisor())


MODERATE = 16.0
"""Factors up to this, and their inverses, keep products of three numbers from under- and overflowing unnoticed."""


@rule_for("addcmul addcdiv")
def add_product(call: Call, x: Any, a: Any, b: Any, *, value: float = 1) -> Result:
    """x + value·a·b, or x + value·a/b."""
    if not 1 / MODERATE <= abs(value) <= MODERATE:
        raise Refusal(
            f"with value={value:g} products inside it may under- or overflow; "
            "multiply by it beforehand"
        )
    divides = call.operator == "addcdiv"
    if isinstance(b, Input) and (divides or isinstance(a, Input)):
        raise Refusal(
            "a product or quotient of two tensors that depend on the input is not "
            "Lipschitz; use a constant"
        )
    if isinstance(b, Input):
        a, b = b, a
    if not isinstance(a, Input):
        # The product is a constant, which does not matter to slopes.
        return _sum(call, (x, 1.0))
    other = _factor(b)

    def factor() -> Tensor:
        if divides:
            return value / other()
        return value * other()

    return _sum(call, (x, 1.0), (a, factor))


@rule_for("lerp")
def interpolate(call: Call, start: Any, end: Any, weight: Any) -> Result:
    """(1 − weight)·start + weight·end."""
    if isinstance(weight, Input):
        raise Refusal(
            "its weight depends on the network's input, so it is not "
            "Lipschitz; use a constant"
        )
    if not isinstance(weight, Constant | BatchSize):
        rounded = float(torch.tensor(float(weight), dtype=call.recorded.dtype))
        if rounded != weight:  # 1 − weight is then another number, perhaps by far
            raise Refusal(
                f"its weight, {weight}, is rounded to {call.recorded.dtype}; "
                "give it as a tensor"
            )
    share = _factor(weight)
    return _sum(call, (start, lambda: 1 - share()), (end, share))


def _sum(call: Call, *terms: tuple[Any, float | Live]) -> Result:
    """Σ of inputs with factors; constants do not matter to the linear part, broadcasting does."""
    chains: list[tuple[Input, list[LinearOp]]] = []
    for value, factor in terms:
        if isinstance(value, Input):
            chains.append((value, [*_copies(call, value), _times(call, factor)]))
    return Sum(chains)


def _times(call: Call, factor: float | Live) -> LinearOp:
    if callable(factor):
        return Scale(_one_row(call, factor), call.out_shape, terms=4)
    if abs(factor) == 1:  # an addition, which is rounded, not a mere copy
        return Identity(call.out_shape, sign=int(factor))
    return Scale(number(factor), call.out_shape)


def _scale(call: Call, x: Input, factor: Live) -> Result:
    return [*_copies(call, x), Scale(_one_row(call, factor), call.out_shape, terms=3)]


def _copies(call: Call, x: Input) -> list[LinearOp]:
    if x.shape == call.out_shape:
        return []
    return [broadcast(x.shape, call.out_shape)]


def _factor(value: Any) -> Live:
    """Reads a constant or a number as a floating-point tensor."""
    if isinstance(value, BatchSize):
        raise Refusal(
            "it reads the number of rows of the batch, so each row depends "
            "on the whole batch"
        )
    if not isinstance(value, Constant):
        return number(float(value))
    if value().is_floating_point():
        return value.read
    return lambda: value().double()


def _one_row(call: Call, factor: Live) -> Live:
    """A factor without its batch axis."""
    shape = factor().shape
    if len(shape) <= len(call.out_shape):
        return factor
    # Rows would be multiplied by different factors: then a row's result depends on its
    # place in the batch.
    if shape[0] != 1:
        raise Refusal("the constant factor has its own batch axis")
    return lambda: factor().squeeze(0)
