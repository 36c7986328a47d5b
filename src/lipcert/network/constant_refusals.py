"""Refusals of constants that are not the same in every run and for every row of a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lipcert.network.kinds import packet_name, recorded_shape
from lipcert.network.program import Program

_CHANCE = "its result depends on chance; use a parameter or a buffer"
_NUMBER_OF_ROWS = "it depends on the number of rows of the batch"
_UNINITIALISED = {
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
}
_ROWS_ALIKE = (
    "expand expand_as repeat zeros ones full new_zeros new_ones new_full zeros_like "
    "ones_like full_like fill copy to "
    "_to_copy type_as clone view_as reshape_as lift_fresh_copy contiguous detach alias"
)
"""Operators whose result has equal rows if their arguments have."""


def constant_problem(program: Program, node: fx.Node) -> str:
    """Why a constant is not the same in every run and for every row of a batch; empty if it is."""
    name, shape = packet_name(node), recorded_shape(node)
    tags = getattr(node.target, "tags", ())
    is_inactive = "dropout" in name and node.args[-1] is False
    # Memory that nobody has written differs from run to run as chance does.
    if name in _UNINITIALISED and 0 not in shape:
        return _CHANCE
    if torch.Tag.nondeterministic_seeded in tags and not is_inactive:
        return _CHANCE
    if _reads_size(program, node):
        return _NUMBER_OF_ROWS
    # ones(rows, 5) has the axis of the batch in front, and equal rows. Its transpose
    # has that axis elsewhere, and its cumsum has rows that differ.
    symbolic = [
        place for place, size in enumerate(shape) if isinstance(size, torch.SymInt)
    ]
    if not symbolic:
        # ones(rows).sum() has no such axis any more, and counts the rows.
        counts = any(_has_rows(program, argument) for argument in node.all_input_nodes)
        return _NUMBER_OF_ROWS if counts else ""
    in_front = symbolic == [0] and shape[0] == recorded_shape(program.input)[0]
    alike = name in _ROWS_ALIKE.split() or torch.Tag.pointwise in tags
    if in_front and alike:
        return ""
    return _NUMBER_OF_ROWS


def _has_rows(program: Program, node: fx.Node) -> bool:
    """Whether a node is a constant with an axis as long as the batch, or several tensors with one."""
    if program.kinds[node] != "constant":
        return False  # of others, only the type and the device are read
    value = node.meta.get("val")
    tensors = value if isinstance(value, tuple | list) else [value]
    for tensor in tensors:
        shape = getattr(tensor, "shape", ())
        if any(isinstance(size, torch.SymInt) for size in shape):
            return True
    return False


def _reads_size(program: Program, node: fx.Node) -> bool:
    """Whether a constant uses the number of rows as anything but the first axis of a shape."""
    # In zeros([rows, 5]) the number of rows is first and comes straight from a shape.
    # In zeros([5, rows]), zeros([2·rows, 5]) and full([5], rows) it is something else.
    for value in (*node.args, *node.kwargs.values()):
        first: Any = None
        others: list[Any] = [value]
        if isinstance(value, list | tuple):
            first, *others = value or [None]
        if _is_size(program, first) and first.target is not torch.ops.aten.sym_size.int:
            return True
        if any(_is_size(program, other) for other in others):
            return True
    return False


def _is_size(program: Program, value: Any) -> bool:
    return isinstance(value, fx.Node) and program.kinds[value] == "size"
