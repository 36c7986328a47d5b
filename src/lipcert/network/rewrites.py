"""Rewrites of a network that leave the function as it is: the loop transformation, and other coordinates.

Loop transformation: φ(z) = C·z + S·ψ(z) with |ψ(a) − ψ(b)| ≤ |a − b|. The site becomes ψ, and linear paths lead through
C around it. Afterwards every nonlinearity is 1-Lipschitz and all that is left to know are the maps between sites.

Other coordinates: for positive diagonals D_i, φ_i(z) = D_i φ_i'(D_i⁻¹z) with φ_i'(z') = D_i⁻¹φ_i(D_i z'). If φ_i is
elementwise, φ_i' has its slopes. So what holds for a network holds for the rescaled one, whose maps are D_j⁻¹B_ji D_i.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from lipcert.network.linear import Scale
from lipcert.network.normal_form import Edge, Network, Node, Site, rebuilt
from lipcert.network.program import Live, Shape
from lipcert.network.slopes import Slope
from lipcert.rounding import gamma

UNIT = Slope(-1.0, 1.0)
Line = tuple[float | Live, float | Live]
"""(C, S): numbers, or how to read tensors that broadcast over a row."""


def loop_transform(network: Network, lines: Mapping[int, Line]) -> Network:
    """The network with C·z + S·ψ(z) in place of each of the given sites; C = 0 leaves no path around it."""
    nodes: list[Node] = []
    moved: dict[int, int] = {}
    sites: dict[int, Site] = {}
    for v, node in enumerate(network.nodes):
        nodes.append(replace(node, edges=_moved_edges(node, moved)))
        index = network.site_of_output.get(v)
        if index in lines:
            assert index is not None
            site, (centre, radius) = network.sites[index], lines[index]
            source, output = moved[site.source], len(nodes) - 1
            sites[index] = Site(site.name, source, output, _unit(site))
            edges = [Edge(output, _scale(radius, node.shape))]
            if centre != 0.0:
                edges.append(Edge(source, _scale(centre, node.shape)))
            nodes.append(Node(f"{node.name} transformed", node.shape, tuple(edges)))
        moved[v] = len(nodes) - 1
    return rebuilt(network, nodes, moved, sites)


def liplt_lines(network: Network, up: bool = False) -> dict[int, Line]:
    """(C, S) of thm:multiLayerLipschitz: the centre and the radius of the slopes of every nonlinearity.

    With `up`, S is enlarged by what the rounding of C and S can cost.
    """
    lines: dict[int, Line] = {}
    for index, site in enumerate(network.sites[1:-1], start=1):
        slope = site.slope
        assert slope is not None
        if isinstance(slope.alpha, float) and isinstance(slope.beta, float):
            lines[index] = _rounded(slope, up)
        else:
            lines[index] = _Centre(slope), _Radius(slope, up)
    return lines


def naive_lines(network: Network, up: bool = False) -> dict[int, Line]:
    """(0, Lip): no loop transformation, which gives the product of norms."""
    lines: dict[int, Line] = {}
    for index, site in enumerate(network.sites[1:-1], start=1):
        assert site.slope is not None
        constant = site.slope.lipschitz()
        lines[index] = 0.0, (constant if isinstance(constant, float) else _Lipschitz(site.slope))
    return lines


def _rounded(slope: Slope, up: bool) -> tuple[float, float]:
    centre, radius = slope.sector()
    assert isinstance(centre, float)
    assert isinstance(radius, float)
    return centre, radius + gamma(6) * (abs(centre) + radius) if up and centre else radius


class _Centre:
    """Reads the centre of learned slopes."""

    def __init__(self, slope: Slope) -> None:
        self.slope = slope

    def __call__(self) -> Tensor:
        return torch.as_tensor(self.slope.sector()[0])


class _Radius(_Centre):
    """Reads the radius of learned slopes, enlarged for rounding if so wished."""

    def __init__(self, slope: Slope, up: bool) -> None:
        super().__init__(slope)
        self.up = up

    def __call__(self) -> Tensor:
        centre, radius = (torch.as_tensor(value) for value in self.slope.sector())
        return radius + gamma(6) * (centre.abs() + radius) if self.up else radius


class _Lipschitz(_Centre):
    """Reads the constant of learned slopes."""

    def __call__(self) -> Tensor:
        return torch.as_tensor(self.slope.lipschitz())


def _unit(site: Site) -> Slope:
    """The slopes of ψ, in [−1, 1]."""
    assert site.slope is not None
    return replace(UNIT, elementwise=site.slope.elementwise, group=site.slope.group)


def _scale(factor: float | Live, shape: Shape) -> Scale:
    if isinstance(factor, float):
        number = torch.tensor(factor, dtype=torch.float64)
        return Scale(lambda: number, shape, terms=1)
    return Scale(factor, shape, terms=1)


def free_scales(network: Network, site: int, per_neuron: bool = False) -> int:
    """How many entries of a site's diagonal may be chosen: per channel by default, per neuron for vectors."""
    slope, shape = network.sites[site].slope, network.nodes[network.sites[site].source].shape
    assert slope is not None
    if not slope.elementwise:
        same_rank = len(network.nodes[network.sites[site].output].shape) == len(shape)
        return shape[0] // slope.group if slope.group and same_rank else 1
    return prod(shape) if per_neuron else prod(shape[:1])


def spread(scales: Tensor, network: Network, site: int) -> Tensor:
    """The diagonal of a site from its free entries, in a shape that broadcasts over inputs and outputs of the site."""
    slope, shape = network.sites[site].slope, network.nodes[network.sites[site].source].shape
    assert slope is not None
    if slope.elementwise and scales.numel() == prod(shape):
        return scales.reshape(shape)
    if slope.group > 1:
        scales = scales.repeat_interleave(slope.group)
    return scales.reshape(-1, *(1,) * (len(shape) - 1))


def gather(diagonal: Tensor, network: Network, site: int, count: int) -> Tensor:
    """The `count` free entries of a site's diagonal; the inverse of `spread`. Entries that share one are averaged."""
    return diagonal.expand(network.nodes[network.sites[site].source].shape).reshape(count, -1).mean(1)


def rescale(network: Network, diagonals: Mapping[int, Live]) -> Network:
    """The network with D_i⁻¹ before and D_i after each of the given sites."""
    nodes: list[Node] = []
    moved: dict[int, int] = {}
    sites: dict[int, Site] = {}
    for v, node in enumerate(network.nodes):
        index = network.site_of_output.get(v)
        if index is not None and index in diagonals:
            site, diagonal = network.sites[index], diagonals[index]
            shape = network.nodes[site.source].shape
            inward = Edge(moved[site.source], Scale(_Reciprocal(diagonal), shape))
            nodes += [Node(f"{node.name} scaled down", shape, (inward,)), node]
            sites[index] = replace(site, source=len(nodes) - 2, output=len(nodes) - 1)
            outward = Edge(len(nodes) - 1, Scale(diagonal, node.shape))
            nodes.append(Node(f"{node.name} scaled up", node.shape, (outward,)))
        else:
            nodes.append(replace(node, edges=_moved_edges(node, moved)))
        moved[v] = len(nodes) - 1
    return rebuilt(network, nodes, moved, sites)


class _Reciprocal:
    """Reads D⁻¹."""

    def __init__(self, diagonal: Live) -> None:
        self.diagonal = diagonal

    def __call__(self) -> Tensor:
        return self.diagonal().reciprocal()


def _moved_edges(node: Node, moved: Mapping[int, int]) -> tuple[Edge, ...]:
    return tuple(Edge(moved[edge.source], edge.op) for edge in node.edges)
