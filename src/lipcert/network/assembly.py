"""The normal form under construction: what rules return becomes nodes and sites, once it has been tried out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from lipcert.network.convolution import Convolution
from lipcert.network.linear import (
    Dense,
    Function,
    Identity,
    LinearOp,
    Scale,
    number,
)
from lipcert.network.normal_form import Edge, Node, Site
from lipcert.network.program import Live, Shape
from lipcert.network.rule_trials import check_linear, check_passed
from lipcert.network.rules.broadcasting import broadcast
from lipcert.network.rules.call import Call
from lipcert.network.rules.values import Extremum, Input, Refusal, SortedPair, Sum
from lipcert.network.slope_trials import check_site
from lipcert.network.slopes import ABS, Slope
from lipcert.network.tangents import FlatEmbed, FlatPair, LocalSlope, Product
from lipcert.network.user_fact_trials import check_users_facts
from lipcert.network.user_rule_trials import (
    check_users_linear,
    check_users_passed,
    check_users_slope,
    is_users,
)


class Assembly:
    """Nodes and sites; rules are tried out in this type unless `check` is False."""

    def __init__(self, dtype: torch.dtype, check: bool) -> None:
        self.dtype, self.check = dtype, check
        self.nodes: list[Node] = []
        self.sites: list[Site] = []

    def add(
        self,
        name: str,
        shape: Shape,
        *edges: Edge,
        offset: Live | None = None,
        exact: bool = False,
    ) -> Input:
        """Append a node."""
        self.nodes.append(Node(name, shape, edges, offset, exact))
        return Input(len(self.nodes) - 1, shape)

    def append(self, call: Call, result: Any) -> Input:
        """Append what a rule returned."""
        if isinstance(result, Slope):
            return self._nonlinearity(call, result)
        if isinstance(result, Extremum):
            return self._extremum(call, result)
        if isinstance(result, SortedPair):
            return self._sorted_pair(call, result)
        if not isinstance(result, Input):
            return self._linear(call, result)
        if result.shape != call.out_shape:
            raise Refusal(
                f"its rule passes on a tensor of shape {result.shape}, its result "
                f"has {call.out_shape}"
            )
        if self.check:
            check_passed(call, result)
            if is_users(call):
                check_users_passed(call, result)
        return result

    def _linear(self, call: Call, result: Any) -> Input:
        """A sum of chains: the last operations of all chains are edges of one node, the ones before are nodes."""
        if not isinstance(result, Sum):
            result = Sum([(call.inputs[0], result)])
        terms, edges = [], []
        for value, operations in result.terms:
            chain = (
                [operations] if isinstance(operations, LinearOp) else list(operations)
            )
            terms.append((value, chain))
            # x → padding → convolution: the padding is a node of its own, the
            # convolution an edge into the sum.
            *inner, last = chain or [Identity(value.shape)]
            source = value.source
            for op in inner:
                source = self.add(call.name, op.out_shape, Edge(source, op)).source
            edges.append(Edge(source, last))
            if last.out_shape != call.out_shape:
                raise Refusal(
                    f"its rule gives a result of another shape than {call.out_shape}"
                )
        if self.check:
            check_linear(call, terms, self.dtype)
            # What users' rules say about rounding is about one operation; only alone
            # can it be compared with the call.
            if is_users(call) and len(terms) == len(terms[0][1]) == 1:
                check_users_linear(call, terms[0][1][0])
        constants = _offset(call, edges), False, _added(call, edges)
        self.nodes.append(Node(call.name, call.out_shape, tuple(edges), *constants))
        return Input(len(self.nodes) - 1, call.out_shape)

    def _local(self, call: Call, slope: LocalSlope) -> Input:
        """A site that is only bounded over balls; two inputs stand side by side in a node of the analysis."""
        function: Callable[[Tensor], Tensor] = call.rerun
        source = call.inputs[0].source
        if isinstance(slope.tangent, Product):
            # A site has one input, a product two: one vector has a in its entries 0 …
            # |a| − 1, and b in the others.
            pair, (a, b) = slope.tangent.pair, call.inputs
            size = (prod(a.shape) + prod(b.shape),)
            first = Edge(a.source, FlatEmbed(a.shape, size, 0))
            second = Edge(b.source, FlatEmbed(b.shape, size, prod(a.shape)))
            source = self.add(
                f"{call.name} pair", size, first, second, exact=True
            ).source
            function = partial(_run_pair, call, pair)
        # A node without edges is the output of a site; sites come in the order of their
        # output nodes.
        value = self.add(call.name, call.out_shape)
        self.sites.append(Site(call.name, source, value.source, slope, function))
        return value

    def _nonlinearity(self, call: Call, slope: Slope) -> Input:
        if isinstance(slope, LocalSlope):
            return self._local(call, slope)
        source = call.inputs[0]
        if slope.elementwise:
            # A maximum with a constant of larger shape copies its input first, so that
            # both have one shape.
            source = self._copies(call, source)
        if self.check:
            # The built-in rules are tried out, too: what they rest on may change with a
            # version of torch.
            check_site(call, slope, source.shape, self.dtype)
            if is_users(call):
                check_users_slope(call, slope)
                check_users_facts(call, slope)
        value = self.add(call.name, call.out_shape)
        self.sites.append(
            Site(call.name, source.source, value.source, slope, call.rerun)
        )
        return value

    def _extremum(self, call: Call, pair: Extremum) -> Input:
        """(a + b)/2 ± |a − b|/2: a difference, its absolute value, and a sum, none of which the program computes."""
        shape = call.out_shape
        a = self._copies(call, pair.first).source
        b = self._copies(call, pair.second).source
        # The mean of a and b passes linearly; only |a − b| is a nonlinearity, and it
        # has one input.
        difference = (Edge(a, Identity(shape)), Edge(b, Identity(shape, sign=-1)))
        source = self.add(
            f"{call.name} difference", shape, *difference, exact=True
        ).source
        absolute = self.add(call.name, shape).source
        self.sites.append(Site(call.name, source, absolute, ABS, torch.abs))
        # Halves are exact, and the program computes none of this: its maximum copies
        # entries, which rounds nothing.
        edges = []
        for node, factor in ((a, 0.5), (b, 0.5), (absolute, 0.5 * pair.sign)):
            edges.append(Edge(node, Scale(number(factor), shape, terms=1)))
        return self.add(f"{call.name} sum", shape, *edges, exact=True)

    def _sorted_pair(self, call: Call, pair: SortedPair) -> Input:
        """Means and differences of the pairs, the absolute values of the latter, and their sums; see `_extremum`."""
        # Rows (6, 2) sorted along axis 1: differences are (6, 1), and dim = 2 counts
        # the batch axis, too.
        x, dim = call.input, pair.axis + 1
        half = (*x.shape[: pair.axis], 1, *x.shape[pair.axis + 1 :])
        # Ascending: the first entry is the mean less half of |difference|, the second
        # one the mean and that half.
        halves = [0.5, -0.5] if pair.descending else [-0.5, 0.5]
        signs = torch.tensor(halves, dtype=torch.float64)
        signs = signs.reshape(2, *(1,) * (len(x.shape) - pair.axis - 1))

        def difference(t: Tensor) -> Tensor:
            return t.narrow(dim, 0, 1) - t.narrow(dim, 1, 1)

        def total(t: Tensor) -> Tensor:
            return t.sum(dim, keepdim=True)

        def means(t: Tensor) -> Tensor:
            return (0.5 * total(t)).expand(-1, *x.shape)

        def apart(t: Tensor) -> Tensor:
            return t * signs.to(t)

        def sizes(t: Tensor) -> Tensor:
            return t * signs.abs().to(t)

        # |A| of a difference is a sum. Only bounds over balls and multipliers use this
        # form of sorted pairs.
        minus = Function(difference, x.shape, half, terms=2, absolute=total)
        subtract = Edge(x.source, minus)
        source = self.add(f"{call.name} difference", half, subtract, exact=True).source
        absolute = self.add(call.name, half).source
        self.sites.append(Site(call.name, source, absolute, ABS, torch.abs))
        averages = Function(means, x.shape, x.shape, terms=2, nonnegative=True)
        mean = Edge(x.source, averages)
        spread = Edge(absolute, Function(apart, half, x.shape, terms=1, absolute=sizes))
        return self.add(f"{call.name} sum", x.shape, mean, spread, exact=True)

    def _copies(self, call: Call, value: Input) -> Input:
        """A value in the shape of the result."""
        if value.shape == call.out_shape:
            return value
        edge = Edge(value.source, broadcast(value.shape, call.out_shape))
        return self.add(call.name, call.out_shape, edge, exact=True)


def _run_pair(call: Call, pair: FlatPair, both: Tensor) -> Tensor:
    return call.run(pair.split(both))


def _offset(call: Call, edges: list[Edge]) -> Live | None:
    """How to read the magnitude of the constants that an operation adds; None if it only moves entries."""
    # Mean and bias of a batch normalisation may cancel in its value at zero, but are
    # rounded before they do.
    for edge in edges:
        if isinstance(edge.op, Scale) and edge.op.offset is not None:
            return edge.op.offset
    # Entries that are only moved are not rounded, and constants beside them are not
    # added to them.
    if len(edges) == 1 and edges[0].op.terms == 0 and not edges[0].op.adds:
        return None
    return lambda: call.at_zero().abs()


def _added(call: Call, edges: list[Edge]) -> Live | None:
    """How to read the constants themselves, where torch sums nothing but them and the products of one operation."""
    if len(edges) == 1 and isinstance(edges[0].op, Dense | Convolution):
        return None if is_users(call) else call.at_zero
    return None
