"""Diagonal rescaling: coordinates in which the bound of a network is smaller.

‖D_j⁻¹B_ji D_i‖ in place of ‖B_ji‖ is valid for any positive diagonals, because |ψ(a) − ψ(b)| ≤ s|a − b| holds for every
coordinate. The best diagonals are found by gradient descent on their logarithms. Not in the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lipcert.bounds.bound import site_names
from lipcert.errors import OptionError
from lipcert.network.coordinates import free_scales, gather, rescale, spread
from lipcert.network.normal_form import Network

if TYPE_CHECKING:
    from lipcert.bounds.estimator import Estimator

LIMIT = 12.0
"""Of |log D|: keeps products finite."""
_TO_THE_END = 40


class Scales(nn.Module):
    """log D of every site whose coordinates may be scaled apart, as parameters; the identity at first."""

    def __init__(self, network: Network, per_neuron: bool = False) -> None:
        super().__init__()
        self._network = network
        self.per_neuron = per_neuron
        for site in range(1, network.depth + 1):
            if (count := free_scales(network, site, per_neuron)) > 1:
                zeros = torch.zeros(count, dtype=network.dtype, device=network.device)
                self.register_parameter(f"log_{site}", nn.Parameter(zeros))

    def diagonal(self, site: int) -> Tensor:
        """D of a site, in a shape that broadcasts over its inputs and outputs."""
        log = self.get_parameter(f"log_{site}").clamp(-LIMIT, LIMIT)
        return spread(log.exp(), self._network, site)

    def sites(self) -> list[int]:
        return [int(name.removeprefix("log_")) for name, _ in self.named_parameters()]

    def diagonals(self) -> dict[str, Tensor]:
        """D of every site, by its name, in float64."""
        names = site_names(self._network)
        return {names[site]: self.diagonal(site).detach().double().cpu() for site in self.sites()}

    @torch.no_grad()
    def begin_with(self, diagonals: Mapping[str, Tensor]) -> None:
        """Take over diagonals by the names of their sites; sites that are not named keep theirs."""
        names = site_names(self._network)
        for site in self.sites():
            if (diagonal := diagonals.get(names[site])) is not None:
                log = self.get_parameter(f"log_{site}")
                try:
                    log.copy_(gather(diagonal, self._network, site, len(log)).log())
                except RuntimeError as error:
                    shape = self._network.nodes[self._network.sites[site].source].shape
                    raise OptionError(
                        f"the scales of {names[site]} have the shape {tuple(diagonal.shape)}, its inputs have {shape}; "
                        "start with those of a network of the same shape"
                    ) from error

    def rescaled(self) -> Network:
        """The network in these coordinates, which it reads anew whenever it is used."""
        return rescale(self._network, {site: partial(self.diagonal, site) for site in self.sites()})


def fits(scales: Mapping[str, Tensor], network: Network) -> bool:
    """Whether scales by names could be those of sites of this network."""
    shapes = dict(zip(site_names(network), (network.nodes[site.source].shape for site in network.sites), strict=False))
    return all(
        name in shapes and len(diagonal.shape) <= len(shapes[name]) and _broadcasts(diagonal.shape, shapes[name])
        for name, diagonal in scales.items()
    )


def _broadcasts(small: Sequence[int], large: Sequence[int]) -> bool:
    return all(a in (1, b) for a, b in zip(reversed(small), reversed(large), strict=False))


@dataclass(frozen=True)
class FitOptions:
    """How scales are found: steps of Adam with a falling learning rate, `iterations` of the norms in each.

    pair: the two classes whose constant is to be small, instead of the mean. per_neuron: scale every entry of a
    convolutional site on its own, not only every channel. start: the diagonals to begin with instead of the identity,
    such as those of an earlier bound (`bound.scales`) or of an `Estimator` (`estimator.scales.diagonals()`).
    """

    steps: int = 150
    lr: float = 0.05
    iterations: int = 6
    pair: tuple[int, int] | None = None
    per_neuron: bool = False
    start: Mapping[str, Tensor] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.steps < 0 or self.iterations < 1 or not self.lr > 0:
            raise OptionError(f"{self}: expected steps ≥ 0, iterations ≥ 1 and lr > 0")


def fit_scales(
    estimator: Estimator, options: FitOptions | None = None, progress: Callable[[float], None] = lambda _: None
) -> float:
    """Minimise the mean estimate, or that of one pair of classes, over the estimator's scales.

    Starts at the present ones and keeps them if nothing better is found. Returns the value reached, with norms iterated
    to the end.
    """
    options = options or FitOptions()
    scales, usual, estimator.accelerated = estimator.scales, (estimator.power_iterations, estimator.accelerated), True
    if scales is None:
        raise OptionError("the estimator has no scales; use method='rescaled'")

    def value(iterations: int) -> Tensor:
        estimator.power_iterations = iterations
        return _objective(estimator.estimate().value, estimator.target, options.pair)

    parameters = list(scales.parameters())
    start = [p.detach().clone() for p in parameters]
    first = float(value(_TO_THE_END).detach())
    optimizer = torch.optim.Adam(parameters, betas=(0.9, 0.99)) if parameters else None
    steps = options.steps if optimizer and first > 0 else 0
    for step in range(steps):
        assert optimizer is not None
        gradients = torch.autograd.grad(value(options.iterations).log(), parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.param_groups[0]["lr"] = options.lr * (1 - step / steps)
        optimizer.step()
        progress((step + 1) / steps)
    last = float(value(_TO_THE_END).detach()) if steps else first
    estimator.power_iterations, estimator.accelerated = usual
    if not last < first:
        with torch.no_grad():
            for parameter, kept in zip(parameters, start, strict=True):
                parameter.copy_(kept)
    for parameter in parameters:
        parameter.grad = None
    return min(first, last)


def _objective(value: Tensor, target: str, pair: tuple[int, int] | None) -> Tensor:
    if pair is not None:
        if target not in ("pairwise", "last-layer"):
            raise OptionError(f"pair is {pair}, which needs the target pairwise or last-layer, not {target}")
        return value[pair]
    return value.sum() / max(value.shape[0] * (value.shape[0] - 1), 1) if value.dim() == 2 else value.mean()
