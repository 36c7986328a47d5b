"""Rewrites of a network that leave the function as it is: the loop transformation, and other coordinates.

Loop transformation: φ(z) = C·z + S·ψ(z) with |ψ(a) − ψ(b)| ≤ |a − b|. The site becomes
ψ, and linear paths lead through C around it. Afterwards every nonlinearity is
1-Lipschitz and all that is left to know are the maps between sites.

Other coordinates: for positive diagonals D_i, φ_i(z) = D_i φ_i'(D_i⁻¹z) with φ_i'(z') =
D_i⁻¹φ_i(D_i z'). If φ_i is elementwise, φ_i' has its slopes. So what holds for a
network holds for the rescaled one, whose maps are D_j⁻¹B_ji D_i.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import prod

import torch
from torch import Tensor

from lipcert.network.linear import Scale, number
from lipcert.network.normal_form import Edge, Network, Node, Site, rebuilt
from lipcert.network.program import Live, Shape
from lipcert.network.slopes import Slope
from lipcert.rounding import gamma

Line = tuple[float | Live, float | Live]
"""(C, S): numbers, or how to read tensors that broadcast over a row."""


def loop_transform(network: Network, lines: Mapping[int, Line]) -> Network:
    """The network with C·z + S·ψ(z) in place of each of the given sites; C = 0 leaves no path around it."""
    nodes: list[Node] = []
    # For the nodes input, z, φ, y with y = Wφ: the new ones are input, z, ψ, S·ψ + C·z,
    # y, and moved is 0, 1, 3, 4. Whoever read φ now reads the sum.
    moved: dict[int, int] = {}
    sites: dict[int, Site] = {}
    for v, node in enumerate(network.nodes):
        nodes.append(replace(node, edges=_moved_edges(node, moved)))
        index = network.site_of_output.get(v, 0)
        if index in lines:
            site, (centre, radius) = network.sites[index], lines[index]
            assert site.slope is not None
            source, output = moved[site.source], len(nodes) - 1
            # S is taken out, so that |ψ(a) − ψ(b)| ≤ |a − b|. What may be scaled apart
            # in φ may be so in ψ.
            unit = Slope(
                -1.0, 1.0, elementwise=site.slope.elementwise, group=site.slope.group
            )
            sites[index] = Site(site.name, source, output, unit)
            edges = [Edge(output, _scale(radius, node.shape))]
            # An edge for C = 0 would be a path around the site, along which the sweeps
            # would carry zeros.
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
    for index, slope in _slopes(network).items():
        centre, radius = slope.sector()
        if isinstance(centre, float) and isinstance(radius, float):
            # Computed C and S are off by some u of themselves. Slopes of φ − C then
            # reach beyond S by as much: a smaller S would be false. With C = 0 nothing
            # is subtracted, and S = β is exact.
            if up and centre:
                radius += gamma(6) * (abs(centre) + radius)
            lines[index] = centre, radius
        else:
            lines[index] = partial(_centre, slope), partial(_radius, slope, up)
    return lines


def naive_lines(network: Network) -> dict[int, Line]:
    """(0, Lip): no loop transformation, which gives the product of norms."""
    lines: dict[int, Line] = {}
    for index, slope in _slopes(network).items():
        constant = slope.lipschitz()
        if isinstance(constant, float):
            lines[index] = 0.0, constant
        else:
            lines[index] = 0.0, partial(_lipschitz, slope)
    return lines


def _slopes(network: Network) -> dict[int, Slope]:
    slopes = {}
    for index, site in enumerate(network.sites):
        if site.slope is not None:
            slopes[index] = site.slope
    return slopes


def _centre(slope: Slope) -> Tensor:
    return torch.as_tensor(slope.sector()[0])


def _radius(slope: Slope, up: bool) -> Tensor:
    centre, radius = (torch.as_tensor(value) for value in slope.sector())
    if up:
        radius = radius + gamma(6) * (centre.abs() + radius)
    return radius


def _lipschitz(slope: Slope) -> Tensor:
    return torch.as_tensor(slope.lipschitz())


def _scale(factor: float | Live, shape: Shape) -> Scale:
    if isinstance(factor, float):
        factor = number(factor)
    return Scale(factor, shape, terms=1)


def free_scales(network: Network, site: int, per_neuron: bool = False) -> int:
    """How many entries of a site's diagonal may be chosen: per channel by default, per neuron for vectors."""
    slope, shape = _site(network, site)
    if slope.elementwise and per_neuron:
        return prod(shape)
    if slope.elementwise:
        return prod(shape[:1])
    # A diagonal (C, 1, 1) has to broadcast over input and output alike, which an output
    # of fewer axes does not allow.
    same_rank = len(network.nodes[network.sites[site].output].shape) == len(shape)
    if slope.group and same_rank:
        return shape[0] // slope.group
    return 1


def _site(network: Network, site: int) -> tuple[Slope, Shape]:
    """The slopes of a nonlinearity, and the shape of its input."""
    slope = network.sites[site].slope
    assert slope is not None
    return slope, network.nodes[network.sites[site].source].shape


def spread_scales(scales: Tensor, network: Network, site: int) -> Tensor:
    """The diagonal of a site from its free entries, in a shape that broadcasts over inputs and outputs of the site."""
    slope, shape = _site(network, site)
    if slope.elementwise and scales.numel() == prod(shape):
        return scales.reshape(shape)
    # GroupSort in pairs of 6 channels has 3 free entries a, b, c: a a b b c c.
    if slope.group > 1 and not slope.elementwise:
        scales = scales.repeat_interleave(slope.group)
    return scales.reshape(-1, *(1,) * (len(shape) - 1))


def gather_scales(diagonal: Tensor, network: Network, site: int, count: int) -> Tensor:
    """The `count` free entries of a site's diagonal; the inverse of `spread_scales`, averaged where they are shared."""
    return (
        diagonal.expand(network.nodes[network.sites[site].source].shape)
        .reshape(count, -1)
        .mean(1)
    )


def rescale(network: Network, diagonals: Mapping[int, Live]) -> Network:
    """The network with D_i⁻¹ before and D_i after each of the given sites."""
    nodes: list[Node] = []
    # For input, z, φ, y: the new nodes are input, z, D⁻¹z, φ′, Dφ′, y, and moved is 0,
    # 1, 4, 5.
    moved: dict[int, int] = {}
    sites: dict[int, Site] = {}
    for v, node in enumerate(network.nodes):
        index = network.site_of_output.get(v)
        if index is not None and index in diagonals:
            site, diagonal = network.sites[index], diagonals[index]
            # Pooling has outputs of another shape than its input; the diagonal
            # broadcasts over both.
            shape = network.nodes[site.source].shape
            inward = Edge(
                moved[site.source], Scale(partial(_reciprocal, diagonal), shape)
            )
            nodes += [Node(f"{node.name} scaled down", shape, (inward,)), node]
            sites[index] = replace(site, source=len(nodes) - 2, output=len(nodes) - 1)
            outward = Edge(len(nodes) - 1, Scale(diagonal, node.shape))
            nodes.append(Node(f"{node.name} scaled up", node.shape, (outward,)))
        else:
            nodes.append(replace(node, edges=_moved_edges(node, moved)))
        moved[v] = len(nodes) - 1
    return rebuilt(network, nodes, moved, sites)


def _reciprocal(diagonal: Live) -> Tensor:
    return diagonal().reciprocal()


def _moved_edges(node: Node, moved: Mapping[int, int]) -> tuple[Edge, ...]:
    return tuple(Edge(moved[edge.source], edge.op) for edge in node.edges)
