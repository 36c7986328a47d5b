"""The normal form of a network: a DAG of linear operations between numbered sites.

Site 0 is the input, sites 1..n are the nonlinearities in topological order, site n+1 is the output. For given centres
c_i, replacing every nonlinearity φ_i by c_i·id leaves a linear network; B_ji is its map from the output of site i to
the input of site j.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import torch
from torch import Tensor, fx

from lipcert.errors import OptionError
from lipcert.network.linear import LinearOp, Live, Shape
from lipcert.network.slopes import Slope


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


@dataclass(frozen=True)
class Site:
    """A nonlinearity: node `output` is its value, node `source` its input. The input and the output of the network
    are sites too, without a slope; the input has no source and the output no output node of its own."""

    name: str
    source: int
    output: int
    slope: Slope | None = None


@dataclass(frozen=True)
class Network:
    """A traced network. `nodes` are in topological order, `sites` run from the input (0) to the output (n+1)."""

    nodes: tuple[Node, ...]
    sites: tuple[Site, ...]
    dtype: torch.dtype
    device: torch.device
    graph: fx.GraphModule = field(repr=False)
    produced: Mapping[fx.Node, int] = field(repr=False)
    """The traced graph, for running the model itself, and the node of the normal form that each of its nodes is."""

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
        shape = self.output_shape
        if len(shape) != 1:
            raise OptionError(
                f"the output has shape {shape} per input, expected a vector of logits; use target='network'"
            )
        return shape[0]

    @cached_property
    def site_of_output(self) -> dict[int, int]:
        """Node → the site whose output it is."""
        return {site.output: index for index, site in enumerate(self.sites[:-1])}

    def out_size(self, site: int) -> int:
        """Dimension of the output of a site."""
        return prod(self.nodes[self.sites[site].output].shape)

    def in_size(self, site: int) -> int:
        """Dimension of the input of a site."""
        return prod(self.nodes[self.sites[site].source].shape)

    def sectors(self, norm: float = 2.0) -> list[tuple[float | Tensor, float | Tensor]]:
        """(c_i, s_i) of the loop transformation for sites 0..n; the input has (0, 1)."""
        return [site.slope.sector(norm) if site.slope else (0.0, 1.0) for site in self.sites[:-1]]

    def lipschitz_sectors(self, norm: float = 2.0) -> list[tuple[float | Tensor, float | Tensor]]:
        """(0, Lip(φ_i)) for sites 0..n: the sectors without loop transformation, which give the naive bound."""
        return [(0.0, site.slope.lipschitz(norm) if site.slope else 1.0) for site in self.sites[:-1]]

    def reach(self, passing: Sequence[bool]) -> tuple[list[set[int]], list[set[int]]]:
        """Which nodes lie behind each site's output, and before each site's input, in the linear network.

        `passing[i]` says whether site i lets linear paths through (c_i ≠ 0).
        """
        successors: dict[int, set[int]] = {v: set() for v in range(len(self.nodes))}
        for v, node in enumerate(self.nodes):
            for edge in node.edges:
                successors[edge.source].add(v)
        for index, site in enumerate(self.sites[1:-1], start=1):
            if passing[index]:
                successors[site.source].add(site.output)
        behind: list[set[int]] = [set() for _ in self.nodes]
        for v in reversed(range(len(self.nodes))):
            behind[v] = {v}.union(*(behind[w] for w in successors[v]))
        after = [behind[site.output] for site in self.sites[:-1]]
        before = [{v for v in range(len(self.nodes)) if site.source in behind[v]} for site in self.sites[1:]]
        return after, before

    def pullback(self, seed: Tensor, centres: Sequence[float | Tensor]) -> list[Tensor | None]:
        """B_{n+1,i}ᵀ y for every row y of `seed`, for i = 0..n: one adjoint pass from the output."""
        return self.pull(self.depth + 1, seed, centres)

    def pull(self, site: int, seed: Tensor, centres: Sequence[float | Tensor]) -> list[Tensor | None]:
        """B_{site,i}ᵀ y for every row y of `seed`, for i = 0..n; None where no linear path leads from site i."""
        values: dict[int, Tensor] = {self.sites[site].source: seed}
        pulled: list[Tensor | None] = [None] * (self.depth + 1)
        for v in reversed(range(len(self.nodes))):
            y = values.pop(v, None)
            if y is None:
                continue
            index = self.site_of_output.get(v)
            if index is None:
                for edge in self.nodes[v].edges:
                    _accumulate(values, edge.source, edge.op.adjoint(y))
                continue
            pulled[index] = y
            if index > 0 and not _is_zero(centres[index]):
                _accumulate(values, self.sites[index].source, centres[index] * y)
        return pulled

    def push(self, site: int, x: Tensor, centres: Sequence[float | Tensor]) -> list[Tensor | None]:
        """B_{j,site} x for every row of x, for j = 1..n+1: one forward pass from the output of a site."""
        values: dict[int, Tensor] = {self.sites[site].output: x}
        for v, node in enumerate(self.nodes):
            index = self.site_of_output.get(v)
            if (
                index is not None
                and index > site
                and not _is_zero(centres[index])
                and self.sites[index].source in values
            ):
                values[v] = centres[index] * values[self.sites[index].source]
            for edge in node.edges:
                if edge.source in values:
                    _accumulate(values, v, edge.op.apply(values[edge.source]))
        return [values.get(s.source) for s in self.sites[1:]]


def _accumulate(values: dict[int, Tensor], node: int, value: Tensor) -> None:
    values[node] = values[node] + value if node in values else value


def _is_zero(value: float | Tensor) -> bool:
    return isinstance(value, float) and value == 0.0
