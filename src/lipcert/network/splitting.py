"""Long sums in parts: the same function, executed with rounding errors that are proved to be several times smaller.

A sum of n products in any order is off by up to γ(n)·Σ|a||x|. Computed as G sums of n/G
products, which are then added in pairs, pairs of pairs and so on, it is off by
γ(n/G)·Σ|a||x| and one rounding of each partial sum for every level: the partial sums
themselves are far smaller than Σ|a||x|. With 1,024 products in parts of 128 that is an
eighth.
"""

from __future__ import annotations

from collections.abc import Collection
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn

from lipcert.errors import OptionError
from lipcert.network.capture import capture
from lipcert.network.program import Program
from lipcert.network.states import bare

PRODUCTS = 144
"""16 channels of a 3×3 convolution, 128 entries of a dense layer: parts that processors still multiply quickly."""
_aten = torch.ops.aten
# The axis of the input along which each operator sums; that of its weight is 1.
_SUMMED_AXIS: dict[Any, int] = {
    _aten.linear.default: -1,
    _aten.conv1d.default: 1,
    _aten.conv1d.padding: 1,
    _aten.conv2d.default: 1,
    _aten.conv2d.padding: 1,
    _aten.conv3d.default: 1,
    _aten.conv3d.padding: 1,
}
_GROUPS_ARGUMENT = 6


def split_sums(
    program: Program, products: int = PRODUCTS, dense_only: bool = False
) -> Program:
    """The frozen program with its dense layers and convolutions summed in parts of at most so many products.

    In exact arithmetic it computes the same function, through the same nonlinearities
    in the same order, so that bounds of the program are bounds of what is returned.
    Parts have a power of two of channels. Modules with a rule of their own are refused,
    for what is inside them would become visible. If `dense_only`, convolutions stay
    whole, for in parts they take twice the time.
    """
    if not isinstance(products, int) or products < 1:
        raise OptionError(f"longest_sum is {products}, expected 1 or more")
    if program.opaque:
        raise OptionError(
            "longest_sum does not go with rules of your own for modules; "
            "certify without it"
        )
    # Split as a module, then captured anew: rules and rounding analysis see the parts
    # as they see any other layers.
    module = program.frozen().module()
    splitting = {_aten.linear.default} if dense_only else _SUMMED_AXIS.keys()
    _split_module(module, products, splitting)
    return capture(module.eval(), program.input_shape).frozen()


def _split_module(module: nn.Module, products: int, splitting: Collection[Any]) -> None:
    """Split the sums of a captured program, and of those that it calls."""
    assert isinstance(module, fx.GraphModule)
    for inner in module.children():
        _split_module(inner, products, splitting)
    for node in list(module.graph.nodes):
        # A weight that is a tensor of the program; products of two values that are
        # computed are not split.
        if (
            node.target in splitting
            and isinstance(node.args[1], fx.Node)
            and node.args[1].op == "get_attr"
        ):
            _split_node(module, node, products)
    module.graph.eliminate_dead_code()
    module.delete_all_unused_submodules()
    module.recompile()
    bare(module)


def _split_node(module: fx.GraphModule, node: fx.Node, products: int) -> None:
    """Replace an operator by as many of its kind as its sums have parts, and by their sum."""
    weight: Tensor = module.get_buffer(str(node.args[1].target))  # type: ignore[union-attr]
    groups = node.args[_GROUPS_ARGUMENT] if len(node.args) > _GROUPS_ARGUMENT else 1
    channels = weight.shape[1]
    length = _part_length(prod(weight.shape[2:]), products)
    # With groups, a slice of the input would have to be taken from every one of them.
    if groups != 1 or channels <= length:
        return
    x, bias, options = (
        node.args[0],
        (node.args[2] if len(node.args) > 2 else None),
        node.args[3:],
    )
    axis = _SUMMED_AXIS[node.target]
    graph = module.graph
    parts = []
    with graph.inserting_before(node):
        for first in range(0, channels, length):
            last = min(first + length, channels)
            name = f"{node.args[1].target}_{first}"  # type: ignore[union-attr]
            module.register_buffer(
                name, weight[:, first:last].clone(), persistent=False
            )
            # A part of the input meets the same part of the weight: x[16:32] and W[:,
            # 16:32], say.
            piece = graph.call_function(_aten.slice.Tensor, (x, axis, first, last))
            # Once, or it would be added as often as there are parts.
            offset = bias if first == 0 else None
            given = (piece, graph.get_attr(name), offset, *options)
            part = graph.call_function(node.target, given)  # type: ignore[arg-type]
            parts.append(part)
        total = _sum_in_pairs(graph, parts)
    node.replace_all_uses_with(total)
    graph.erase_node(node)


def _part_length(taps: int, products: int) -> int:
    """The largest power of two of channels whose products are few enough, at least one."""
    length = 1
    while 2 * length * taps <= products:
        length *= 2
    return length


def _sum_in_pairs(graph: fx.Graph, terms: list[fx.Node]) -> fx.Node:
    """((a + b) + (c + d)) + e: every term is rounded about log₂ as often as there are terms."""
    while len(terms) > 1:
        sums = []
        for k in range(0, len(terms) - 1, 2):
            sums.append(graph.call_function(_aten.add.Tensor, (terms[k], terms[k + 1])))
        if len(terms) % 2 == 1:
            sums.append(terms[-1])
        terms = sums
    return terms[0]
