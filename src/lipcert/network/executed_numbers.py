"""Numbers that are written in a program, as its operators round them.

torch computes in float32 with numbers rounded to float32, 1.1 say with 1.10000002: that
is the slope of `x * 1.1`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

import torch
from torch import Tensor, fx

from lipcert.network.kinds import is_torchs, packet_name
from lipcert.network.rules.values import Constant

_OTHERWISE = {"lerp"}
"""Operators that compute with numbers before they round them: their rules see what is written."""
_PRODUCTS = {"mul", "multiply", "div", "true_divide", "divide", "addcmul", "addcdiv"}
"""Operators that round integers in tensors; others may take them for indices."""


_EXACT = 2.0**24
"""Integers up to here are numbers of float32."""


def rounded(value: float, dtype: torch.dtype) -> float:
    """A number in the type of what it is multiplied with; as it is where it would overflow."""
    result = float(torch.tensor(float(value), dtype=torch.float64).to(dtype))
    return result if isfinite(result) else value


def as_executed(
    node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an operator of torch in a program of this type, with its scalars rounded."""
    schema = getattr(node.target, "_schema", None)
    # In float64, numbers are what is written.
    if (
        schema is None
        or dtype != torch.float32
        or not is_torchs(node)
        or packet_name(node) in _OTHERWISE
    ):
        return args, dict(kwargs)
    scalars = {
        argument.name for argument in schema.arguments if _is_scalar(str(argument.type))
    }
    # The schema tells which arguments are numbers to compute with: a size or a dim is
    # no number to be rounded.
    names = [argument.name for argument in schema.arguments]
    integers = packet_name(node) in _PRODUCTS

    def read(name: str, value: Any) -> Any:
        return _number(value, dtype, integers) if name in scalars else value

    positional = tuple(
        read(name, value) for name, value in zip(names, args, strict=False)
    )
    named = {name: read(name, value) for name, value in kwargs.items()}
    # Defaults, too: the slope 0.01 of a LeakyReLU is 0.00999999978 in float32.
    for argument in schema.arguments[len(args) :]:
        default = argument.default_value
        if (
            isinstance(default, float)
            and argument.name not in named
            and read(argument.name, default) != default
        ):
            named[argument.name] = read(argument.name, default)
    return positional, named


def _is_scalar(kind: str) -> bool:
    """Whether an argument may be a number that is computed with: sizes and scale factors have other types."""
    return kind in ("number", "Optional[number]", "Tensor", "Optional[Tensor]")


def _number(value: Any, dtype: torch.dtype, integers: bool) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        # Integers stay integers: an operator may have another overload for floats.
        return type(value)(rounded(value, dtype))
    if isinstance(value, Constant) and _is_rounded(value(), integers):
        # Rounded, but what is computed from it, such as 1/c, is not.
        return Constant(lambda: value().to(dtype).double(), value.batched)
    return value


def _is_rounded(value: Any, integers: bool) -> bool:
    """Float64 tensors without axes are rounded as numbers are."""
    if not isinstance(value, Tensor):
        return False
    if value.dtype == torch.float64:
        return value.dim() == 0
    if (
        not integers
        or value.is_floating_point()
        or value.is_complex()
        or value.dtype == torch.bool
    ):
        return False
    return bool((value.double().abs() > _EXACT).any())
