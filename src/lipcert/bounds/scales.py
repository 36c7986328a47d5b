"""Diagonal rescaling: coordinates in which the bound of a network is smaller.

‖D_j⁻¹B_ji D_i‖ in place of ‖B_ji‖ is valid for any positive diagonals, because |ψ(a) −
ψ(b)| ≤ s|a − b| holds for every coordinate. The best diagonals are found by gradient
descent on their logarithms. Not in the paper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from lipcert.errors import OptionError
from lipcert.network.normal_form import Network
from lipcert.network.rewrites import free_scales, gather_scales, rescale, spread_scales

LIMIT = 12.0
"""Of |log D|: keeps products finite."""
SLACK = "slack"
"""The name among those of sites under which the method "ellipsoids" keeps by how much U exceeds the least it can be."""


class Scales(nn.Module):
    """log D of every site whose coordinates may be scaled apart, as parameters; the identity at first."""

    def __init__(self, network: Network, per_neuron: bool = False) -> None:
        super().__init__()
        self._network = network
        self.per_neuron = per_neuron
        for site in range(1, network.depth + 1):
            # A single factor would cancel in the recursion: m_i falls by what ‖B_ji
            # D_i‖ grows.
            if (count := free_scales(network, site, per_neuron)) > 1:
                zeros = torch.zeros(count, dtype=network.dtype, device=network.device)
                self.register_parameter(f"log_{site}", nn.Parameter(zeros))

    def diagonal(self, site: int) -> Tensor:
        """D of a site, in a shape that broadcasts over its inputs and outputs."""
        log = self.get_parameter(f"log_{site}").clamp(-LIMIT, LIMIT)
        return spread_scales(log.exp(), self._network, site)

    def flat_diagonals(self) -> list[Tensor]:
        """D of all sites 1..n as vectors in float64, ones where nothing can be scaled; differentiable."""
        diagonals, free = [], self.sites()
        for site in range(1, self._network.depth + 1):
            if site in free:
                diagonals.append(self.diagonal(site).reshape(-1).double())
            else:
                size, device = self._network.in_size(site), self._network.device
                diagonals.append(torch.ones(size, dtype=torch.float64, device=device))
        return diagonals

    def sites(self) -> list[int]:
        return [int(name.removeprefix("log_")) for name, _ in self.named_parameters()]

    def diagonals(self) -> dict[str, Tensor]:
        """D of every site, by its name, in float64."""
        names = self._network.site_names()
        # By name, not by number: a network traced anew, or with other layers behind,
        # finds its own.
        return {
            names[site]: self.diagonal(site).detach().double().cpu()
            for site in self.sites()
        }

    @torch.no_grad()
    def begin_with(self, diagonals: Mapping[str, Tensor]) -> None:
        """Take over diagonals by the names of their sites; sites that are not named keep theirs."""
        names = self._network.site_names()
        for site in self.sites():
            diagonal = diagonals.get(names[site])
            if diagonal is None:
                continue
            log = self.get_parameter(f"log_{site}")
            try:
                # Diagonals per neuron are averaged where this network has one entry per
                # channel; any choice is valid.
                log.copy_(gather_scales(diagonal, self._network, site, len(log)).log())
            except RuntimeError as error:
                raise OptionError(
                    f"the scales of {names[site]} have the shape "
                    f"{tuple(diagonal.shape)}, its inputs have "
                    f"{_shapes(self._network)[names[site]]}; start with those of a "
                    "network of the same shape"
                ) from error

    def rescaled(self, network: Network | None = None) -> Network:
        """The network, or another one with the same sites, in these coordinates, which are read whenever it is used."""
        # Read at every use: in training, a step of the optimizer changes the
        # coordinates of the next estimate.
        return rescale(
            network or self._network,
            {site: partial(self.diagonal, site) for site in self.sites()},
        )


def fits(scales: Mapping[str, Tensor], network: Network) -> bool:
    """Whether scales by names could be those of sites of this network."""
    shapes = _shapes(network)
    for name, diagonal in scales.items():
        # The slack belongs to no site.
        if name != SLACK and not (
            name in shapes and _broadcasts(diagonal.shape, shapes[name])
        ):
            return False
    return True


def _shapes(network: Network) -> dict[str, Sequence[int]]:
    """The shapes of the inputs of the nonlinearities, sites 1..n, by their names."""
    shapes: dict[str, Sequence[int]] = {}
    for name, site in zip(network.site_names()[1:], network.sites[1:-1], strict=True):
        shapes[name] = network.nodes[site.source].shape
    return shapes


def _broadcasts(small: Sequence[int], large: Sequence[int]) -> bool:
    """Whether one of the shapes can be expanded to the other."""
    if len(small) > len(large):
        return False
    return all(
        a in (1, b) for a, b in zip(reversed(small), reversed(large), strict=False)
    )
