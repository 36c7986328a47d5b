"""A program in float64 as one in float32 that computes the same function, but for rounding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from lipcert.errors import OptionError
from lipcert.network.build import trace
from lipcert.network.kinds import is_torchs
from lipcert.network.normal_form import Network
from lipcert.network.program import Program


def narrowed(network: Network) -> Network:
    """A network in float64, captured again in float32.

    Raises:
        OptionError: it has numbers that float32 does not have, so that it would be
            another function; or operators that are not torch's own.
    """
    program = network.program.frozen()
    check_numbers(program)
    for node, read in program.tensors.items():
        tensor = read()
        if tensor.is_floating_point() and not _is_exact(tensor):
            name = program.names.get(node, node.name)
            raise _refused(f"{name} has entries")
    module = program.module().to(torch.float32).eval()
    result = trace(module, network.input_shape)
    if result.depth != network.depth:
        raise OptionError(
            "in float32 the model has other nonlinearities than in float64; its code "
            "must not ask for types"
        )
    return result


def check_numbers(program: Program) -> None:
    """Refuse numbers among the arguments of operators that float32 does not have, types, and operators of users."""
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        if node in program.opaque or not is_torchs(node):
            raise OptionError(
                f"{node.target} is not an operator of torch: what it computes in "
                "float32 is not known"
            )
        for value in _arguments(node):
            if isinstance(value, torch.dtype):
                raise OptionError(
                    f"{node.name} asks for the type {value}; a model that computes in "
                    "one type throughout has a narrower copy"
                )
            if isinstance(value, complex) or not _is_exact(value):
                raise _refused(f"{node.name} has the argument {value}")


def _refused(what: str) -> OptionError:
    return OptionError(
        f"{what} that float32 does not have, so that the model would be another one "
        "there: round it first, or fold it into weights (1e-5 of a batch norm, say)"
    )


def _arguments(node: fx.Node) -> Iterator[Any]:
    """Numbers and types among the arguments of a call, defaults included."""
    found: list[Any] = []
    # Also visits what is inside of lists.
    fx.node.map_aggregate((node.args, node.kwargs), found.append)
    schema = getattr(node.target, "_schema", None)
    for place, argument in enumerate(schema.arguments if schema else ()):
        if place >= len(node.args) and argument.name not in node.kwargs:
            found.append(argument.default_value)
    for value in found:
        if isinstance(value, int | float | complex | torch.dtype):
            yield value


def _is_exact(value: Tensor | float) -> bool:
    """Whether float32 has these numbers; normal ones only, for others may be flushed to zero."""
    tensor = torch.as_tensor(value, dtype=torch.float64)
    if isinstance(value, int) and abs(value) > 2**24:
        # Which some operators read as "to the end" of an axis.
        return value in (2**63 - 1, -(2**63))
    size = tensor.abs()
    normal = (size == 0) | (size >= torch.finfo(torch.float32).tiny)
    return bool((normal & (tensor.float().double() == tensor)).all())
