"""The same network in other coordinates: every nonlinearity between two positive diagonals.

For positive diagonals D_i, φ_i(z) = D_i φ_i'(D_i⁻¹z) with φ_i'(z') = D_i⁻¹φ_i(D_i z'). An elementwise φ_i' has the
slopes of φ_i, so whatever holds for a network holds for the rescaled one, whose maps between sites are D_j⁻¹B_ji D_i.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from torch import Tensor

from lipcert.network.linear import Live, Scale
from lipcert.network.normal_form import Edge, Network, Node, Site


def free_scales(network: Network, site: int, per_neuron: bool = False) -> int:
    """How many entries of a site's diagonal may be chosen: per channel by default, per neuron for vectors."""
    slope, shape = network.sites[site].slope, network.nodes[network.sites[site].source].shape
    assert slope is not None
    if not slope.elementwise:
        return shape[0] // slope.group if slope.group else 1
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
            inward = Edge(moved[site.source], Scale(_reciprocal(diagonal), shape))
            nodes += [Node(f"{node.name} scaled down", shape, (inward,)), node]
            sites[index] = replace(site, source=len(nodes) - 2, output=len(nodes) - 1)
            edges: tuple[Edge, ...] = (Edge(len(nodes) - 1, Scale(diagonal, node.shape)),)
            nodes.append(Node(f"{node.name} scaled up", node.shape, edges))
        else:
            edges = tuple(replace(edge, source=moved[edge.source]) for edge in node.edges)
            nodes.append(replace(node, edges=edges))
        moved[v] = len(nodes) - 1
    return rebuilt(network, nodes, moved, sites)


def rebuilt(network: Network, nodes: Sequence[Node], moved: Mapping[int, int], changed: Mapping[int, Site]) -> Network:
    """The network with other nodes: `moved` says where the values of the old ones are now, `changed` has new sites."""
    sites = tuple(
        changed.get(index) or replace(site, source=moved.get(site.source, -1), output=moved.get(site.output, -1))
        for index, site in enumerate(network.sites)
    )
    produced = {key: moved[v] for key, v in network.produced.items()}
    return replace(network, nodes=tuple(nodes), sites=sites, produced=produced)


def _reciprocal(diagonal: Live) -> Live:
    return lambda: diagonal().reciprocal()
