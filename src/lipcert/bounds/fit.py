"""Fitting the coordinates of the method "rescaled" by gradient descent on the bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lipcert.bounds.estimator import Estimator
from lipcert.bounds.targets import Target, find_target
from lipcert.errors import OptionError
from lipcert.network.normal_form import Network

_TO_THE_END = 40


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
        return _objective(estimator.estimate().value, find_target(estimator.target), options.pair)

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


def _objective(value: Tensor, target: Target, pair: tuple[int, int] | None) -> Tensor:
    if pair is None:
        return target.mean(value)
    if value.dim() != 2:
        raise OptionError(f"pair is {pair}, which needs the target pairwise or last-layer, not {target.name}")
    return value[pair]


def fitted_scales(
    network: Network, target: str, options: FitOptions, progress: Callable[[float], None]
) -> dict[str, Tensor]:
    """Diagonals by the names of their sites, fitted to the present weights of a network."""
    estimator = Estimator.of_network(network, "rescaled", target, per_neuron=options.per_neuron)
    assert estimator.scales is not None
    if options.start is not None:
        estimator.scales.begin_with(options.start)
    fit_scales(estimator, options, progress)
    return estimator.scales.diagonals()
