"""Of which kind the values of a captured graph are:

dependent   values that depend on the values of the input x,
constant    values that depend on parameters, buffers and numbers only (a weight norm, a
factor, zeros), size        the number of rows of a batch, and what is computed from it.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

_LIKE = {
    "zeros_like",
    "ones_like",
    "full_like",
    "new_zeros",
    "new_ones",
    "new_full",
    "fill",
    "copy",
}
"""Operators that read only the shape and the type of their first argument."""
_AS = {"view_as", "reshape_as", "expand_as", "type_as"}
"""Operators that read only the shape and the type of their second argument."""


def node_kinds(graph: fx.Graph, tensors: Container[fx.Node]) -> dict[fx.Node, str]:
    """ "dependent", "constant" or "size", for every node but the output; `tensors` are constants by themselves."""
    kinds: dict[fx.Node, str] = {}
    # Nodes come after what they read, so that the kinds of all arguments are known.
    for node in graph.nodes:
        if node in tensors:
            kinds[node] = "constant"
        elif node.op == "placeholder":
            kinds[node] = "dependent"
        elif node.op == "call_function":
            kinds[node] = _kind(node, kinds)
    return kinds


def _kind(node: fx.Node, kinds: Mapping[fx.Node, str]) -> str:
    value = node.meta.get("val")
    if isinstance(
        value, int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool
    ):
        return "size"
    arguments: Any = (node.args, node.kwargs)
    # zeros_like(x) is a constant although x is not: its values do not depend on those
    # of x.
    if packet_name(node) in _LIKE:
        arguments = (node.args[1:], node.kwargs)
    if packet_name(node) in _AS:
        arguments = node.args[:1]
    # One dependent argument is enough. Wrongly called a constant, a value would be
    # taken for fixed over the whole ball.
    for source in tree_leaves(arguments):
        if isinstance(source, fx.Node) and kinds[source] == "dependent":
            return "dependent"
    return "constant"


def packet_name(node: fx.Node) -> str:
    """The name of an operator without its overload: "add" for aten.add.Tensor."""
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", packet))


def is_torchs(node: fx.Node) -> bool:
    """Whether an operation is torch's own, and not an operator that others have added."""
    return getattr(node.target, "namespace", "aten") == "aten"


def recorded_shape(node: fx.Node) -> list[Any]:
    """The shape of a node's value as torch.export has recorded it, with a symbol for the number of rows."""
    return list(getattr(node.meta.get("val"), "shape", ()))
