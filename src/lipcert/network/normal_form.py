"""The normal form of a network: a DAG of linear operations between numbered sites.

Site 0 is the input, sites 1..n are the nonlinearities in topological order, site n+1 is
the output. B_ji is the linear map from the output of site i to the input of site j: the
sum over all paths that avoid other nonlinearities. As captured, few maps differ from
zero; the loop transformation (see `rewrites`) opens paths around the nonlinearities.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx

from lipcert.errors import OptionError
from lipcert.network.linear import LinearOp
from lipcert.network.program import Live, Program, Shape
from lipcert.network.slopes import Slope

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


NO_NODE = -1
"""In place of the input node of site 0 and of the output node of site n+1, which have none; part of fingerprints."""


@dataclass(frozen=True)
class Edge:
    """A linear operation on the output of node `source`."""

    source: int
    op: LinearOp


@dataclass(frozen=True)
class Node:
    """A value of the network: the sum of its edges, or the output of a site (then `edges` is empty)."""

    name: str
    shape: Shape
    edges: tuple[Edge, ...] = ()
    offset: Live | None = None
    """Magnitude of the constants that the operation adds, for one input; None if there are none."""
    exact: bool = False
    """Whether the node is only a step of the analysis, which the program does not compute."""
    added: Live | None = None
    """The constants themselves, of one dense layer or convolution; None for other operations."""

    @property
    def roundings(self) -> int:
        """How many roundings an entry of the sum can see, at most; 0 if the node passes on what one edge has moved."""
        if self.exact or not self.edges:
            return 0
        products = [edge.op.terms for edge in self.edges]
        # The sums of all edges run one beside the other: the longest one counts, then
        # the additions of the edges, and then that of the bias. 3 edges of up to 100
        # products and a bias make 103.
        count = max(products) + len(products) - 1
        adds = any(products) or any(edge.op.adds for edge in self.edges)
        if self.offset is not None and adds:
            count += 1
        return count


@dataclass(frozen=True)
class Site:
    """A nonlinearity: node `output` is its value, node `source` its input. The input and the output of the network
    are sites too, without a slope; the input has no source and the output no output
    node of its own."""

    name: str
    source: int
    output: int
    slope: Slope | None = None
    function: Callable[[Tensor], Tensor] | None = field(
        default=None, repr=False, compare=False
    )
    """The nonlinearity itself for a batch, in the type of the network; sites of rewritten networks have none."""


@dataclass(frozen=True, eq=False)
class Network:
    """A traced network. `nodes` are in topological order, `sites` run from the input (0) to the output (n+1).

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
        >>> network = lipcert.trace(model, (4,))
        >>> network.depth, network.classes, network.site_names()
        (1, 3, ['input', '1'])
    """

    nodes: tuple[Node, ...]
    sites: tuple[Site, ...]
    dtype: torch.dtype
    device: torch.device
    program: Program = field(repr=False)
    produced: Mapping[fx.Node, int] = field(repr=False)
    """The captured program, and the node of the normal form that each of its values is."""

    def __repr__(self) -> str:
        names = [site.name for site in self.sites[1:-1]]
        listed = f": {', '.join(names[:4])}" if names else ""
        if len(names) > 4:
            listed += f" and {len(names) - 4} more"
        count = "1 nonlinearity" if self.depth == 1 else f"{self.depth} nonlinearities"
        return f"Network({self.input_shape} → {self.output_shape}, {count}{listed})"

    @property
    def depth(self) -> int:
        """n, the number of nonlinearities."""
        return len(self.sites) - 2

    @property
    def input_shape(self) -> Shape:
        return self.nodes[self.sites[0].output].shape

    @property
    def output_shape(self) -> Shape:
        return self.nodes[self.sites[-1].source].shape

    @property
    def classes(self) -> int:
        """K, the number of logits; an error if the output is not a vector."""
        self.check_logits()
        return self.output_shape[0]

    def check_logits(self) -> None:
        """Refuse an output that is not a vector."""
        shape = self.output_shape
        if len(shape) != 1:
            raise OptionError(
                f"the output has shape {shape} per input, expected a vector of "
                "logits; use target='network'"
            )

    @cached_property
    def site_of_output(self) -> dict[int, int]:
        """Node → the site whose output it is."""
        return {site.output: index for index, site in enumerate(self.sites[:-1])}

    def site_names(self) -> list[str]:
        """Distinct names of the sites 0..n."""
        names: list[str] = []
        for site in self.sites[:-1]:
            # A layer that is called twice has two sites: relu, relu#2. Bounds keep
            # constants by these names.
            name, numbered = site.name, f"{site.name}#"
            same = [n for n in names if n == name or n.startswith(numbered)]
            if same:
                name += f"#{len(same) + 1}"
            names.append(name)
        return names

    def out_size(self, site: int) -> int:
        """Dimension of the output of a site."""
        return prod(self.nodes[self.sites[site].output].shape)

    def in_size(self, site: int) -> int:
        """Dimension of the input of a site."""
        return prod(self.nodes[self.sites[site].source].shape)

    def reach(self) -> tuple[list[set[int]], list[set[int]]]:
        """Which nodes linear paths lead to from each site's output, and from which nodes to each site's input.

        The first list begins with site 0, the second with site 1: the input of the
        network has no input of its own.
        """
        # From each node. What v reaches is complete when its sources take it over.
        reached: list[set[int]] = [{v} for v in range(len(self.nodes))]
        for v in reversed(range(len(self.nodes))):
            for edge in self.nodes[v].edges:
                reached[edge.source] |= reached[v]
        after = [reached[site.output] for site in self.sites[:-1]]
        # From here on by sites: node v is before site j if j's input can be reached
        # from v.
        before = []
        for site in self.sites[1:]:
            before.append({v for v, some in enumerate(reached) if site.source in some})
        return after, before

    def pull(self, site: int, seed: Tensor) -> list[Tensor | None]:
        """B_{site,i}ᵀ y for every row y of `seed`, for i = 0..n; None where no linear path leads from site i."""
        pulled: list[Tensor | None] = [None] * (self.depth + 1)
        for i, rows in self.pull_each(site, seed):
            pulled[i] = rows
        return pulled

    def pull_each(self, site: int, seed: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The same, one site after the other from the last one: what is not kept by the caller is free again."""
        # What has arrived at each node so far: y at the site's input, sums of A_eᵀy at
        # the nodes before it.
        values: dict[int, Tensor] = {self.sites[site].source: seed}
        for v in reversed(range(len(self.nodes))):
            # All readers of v come behind it and have added their part; nobody needs y
            # after v has passed it on.
            y = values.pop(v, None)
            if y is None:
                continue
            if v in self.site_of_output:
                yield self.site_of_output[v], y
            for edge in self.nodes[v].edges:
                _accumulate(values, edge.source, edge.op.adjoint(y))

    def push(self, site: int, x: Tensor) -> list[Tensor | None]:
        """B_{j,site} x for every row of x, for j = 1..n+1: one forward pass from the output of a site."""
        # Only linear edges are followed: outputs of sites have none into them, so that
        # rows end at their inputs.
        values: dict[int, Tensor] = {self.sites[site].output: x}
        for v, node in enumerate(self.nodes):
            for edge in node.edges:
                if edge.source in values:
                    _accumulate(values, v, edge.op.apply(values[edge.source]))
        return [values.get(s.source) for s in self.sites[1:]]


def rebuilt(
    network: Network,
    nodes: Sequence[Node],
    moved: Mapping[int, int],
    changed: Mapping[int, Site],
) -> Network:
    """The network with other nodes: `moved` says where the values of the old ones are now, `changed` has new sites."""
    # `function` is not taken over: it belongs to φ, and sites of a rewritten network
    # are ψ, or φ in other coordinates.
    sites = []
    for index, site in enumerate(network.sites):
        source, output = (moved.get(v, NO_NODE) for v in (site.source, site.output))
        kept = Site(site.name, source, output, site.slope)
        sites.append(changed.get(index, kept))
    produced = {key: moved[v] for key, v in network.produced.items()}
    return replace(network, nodes=tuple(nodes), sites=tuple(sites), produced=produced)


def _accumulate(values: dict[int, Tensor], node: int, value: Tensor) -> None:
    if node in values:
        value = values[node] + value
    values[node] = value
