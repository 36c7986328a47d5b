"""The loop transformation with a centre of its own for every coordinate.

φ = Cz + Sψ with |ψ(a) − ψ(b)| ≤ |a − b| holds for any diagonal C, if S_k = max(|α − C_k|, |β − C_k|). With one centre
per site, the middle (α+β)/2 is best for every network, not only without residual path: moving it by δ changes ‖B_jl‖ by
at most |δ|‖B_ji‖‖B_il‖, hence the sum over l by |δ|‖B_ji‖m_i, and the radius adds just that. Coordinates may differ:
one that adds little to ‖B_ji S‖ can move freely. Centres and coordinates (see `scales`) are fitted together. Not in the
paper.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from lipcert.bounds.bound import site_names
from lipcert.bounds.estimator import Estimator
from lipcert.bounds.forms import Form, form
from lipcert.bounds.scales import FitOptions, Scales, fit_scales
from lipcert.network.coordinates import rebuilt, rescale, spread
from lipcert.network.linear import Live, Scale
from lipcert.network.normal_form import Edge, Network, Node, Site
from lipcert.network.slopes import Slope
from lipcert.norms.certified import NormOptions, Progress
from lipcert.norms.rounding import gamma


def shift(network: Network, lines: Mapping[int, tuple[Live, Live]]) -> Network:
    """The network with Cz + Sψ(z) in place of each of the given sites, where `lines` has (C, S) and ψ the slopes ±1."""
    nodes: list[Node] = []
    moved: dict[int, int] = {}
    sites: dict[int, Site] = {}
    for v, node in enumerate(network.nodes):
        edges = tuple(replace(edge, source=moved[edge.source]) for edge in node.edges)
        nodes.append(replace(node, edges=edges))
        index = network.site_of_output.get(v)
        if index is not None and index in lines:
            site, (centre, radius) = network.sites[index], lines[index]
            sites[index] = replace(
                site, source=moved[site.source], output=len(nodes) - 1, slope=Slope(-1.0, 1.0, ulps=None)
            )
            across = Edge(moved[site.source], Scale(centre, node.shape))
            edges = (Edge(len(nodes) - 1, Scale(radius, node.shape)), across)
            nodes.append(Node(f"{node.name} shifted", node.shape, edges))
        moved[v] = len(nodes) - 1
    return rebuilt(network, nodes, moved, sites)


class ShiftedScales(Scales):
    """Scales together with the centres C = (α+β)/2 + σ(β−α)/2 of elementwise sites, with σ as parameters."""

    def __init__(self, network: Network, per_neuron: bool = False) -> None:
        super().__init__(network, per_neuron)
        for site in self.sites():
            slope = network.sites[site].slope
            if slope is not None and slope.elementwise:
                zeros = torch.zeros_like(self.get_parameter(f"log_{site}"))
                self.register_parameter(f"shift_{site}", nn.Parameter(zeros))

    def sites(self) -> list[int]:
        return [int(name.removeprefix("log_")) for name, _ in self.named_parameters() if name.startswith("log_")]

    def shifted_sites(self) -> list[int]:
        return [int(name.removeprefix("shift_")) for name, _ in self.named_parameters() if name.startswith("shift_")]

    def centre(self, site: int) -> Tensor:
        """C of a site, in a shape that broadcasts over its inputs."""
        alpha, beta = _interval(self._network, site)
        shifts = spread(self.get_parameter(f"shift_{site}"), self._network, site)
        return (alpha + beta) / 2 + (beta - alpha) / 2 * shifts

    def radius(self, site: int) -> Tensor:
        alpha, beta = _interval(self._network, site)
        shifts = spread(self.get_parameter(f"shift_{site}"), self._network, site)
        return (beta - alpha) / 2 * (1 + shifts.abs())

    def rescaled(self) -> Network:
        lines = {site: (partial(self.centre, site), partial(self.radius, site)) for site in self.shifted_sites()}
        shifted = shift(self._network, lines)
        return rescale(shifted, {site: partial(self.diagonal, site) for site in self.sites()})


class ShiftedEstimator(Estimator):
    """An estimator with the method rescaled whose scales have centres too."""

    coordinates = ShiftedScales


@torch.enable_grad()
def shifted_form(
    model: nn.Module,
    network: Network,
    last: int,
    target: str,
    fit: FitOptions,
    options: NormOptions | None,
    progress: Progress,
) -> Form:
    """Fit centres and coordinates to a copy of the model, and bound the norms of its float64 network with them."""
    copied = copy.deepcopy(model).requires_grad_(False)
    estimator = ShiftedEstimator(copied, network.input_shape, "rescaled", target, per_neuron=fit.per_neuron)
    fit_scales(estimator, fit, lambda fraction: progress("centres and coordinates", fraction))
    assert isinstance(estimator.scales, ShiftedScales)
    names = site_names(estimator.network)
    scales = {names[k]: estimator.scales.diagonal(k).detach().double().cpu() for k in estimator.scales.sites()}
    centres = {k: estimator.scales.centre(k).detach() for k in estimator.scales.shifted_sites()}
    return form("shifted", with_centres(network, centres), last, options, progress, scales)


@torch.no_grad()
def with_centres(network: Network, centres: Mapping[int, Tensor]) -> Network:
    """A float64 network with these centres and the radii that belong to them, rounded up."""
    lines: dict[int, tuple[Live, Live]] = {}
    for site, given in centres.items():
        alpha, beta = (float(bound) for bound in _interval(network, site))
        centre = given.to(network.device, torch.float64)
        radius = torch.maximum((alpha - centre).abs(), (beta - centre).abs()) * (1 + gamma(4))
        lines[site] = partial(_same, centre), partial(_same, radius)
    return shift(network, lines)


def _interval(network: Network, site: int) -> tuple[float | Tensor, float | Tensor]:
    slope = network.sites[site].slope
    assert slope is not None
    return slope.interval()


def _same(value: Tensor) -> Tensor:
    return value
