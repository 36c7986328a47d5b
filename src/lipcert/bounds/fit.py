"""Fitting the coordinates of "rescaled", and the multipliers of "ellipsoids", by gradient descent on the bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lipcert.bounds.ellipsoids import Ellipsoids
from lipcert.bounds.estimator import Estimator
from lipcert.bounds.targets import find_target
from lipcert.errors import OptionError
from lipcert.network.normal_form import Network
from lipcert.progress import Report, no_report

_TO_THE_END = 40


@dataclass(frozen=True)
class FitOptions:
    """How scales are found: steps of Adam with a falling learning rate, `iterations` of the norms in each.

    pair: the two classes whose constant is to be small, instead of the mean.
    per_neuron: scale every entry of a convolutional site on its own, not only every
    channel.
    start: the diagonals to begin with instead of the identity, such as those of an
    earlier bound (`bound.scales`) or of an `Estimator` (`estimator.diagonals()`).
    each: steps for the multipliers of every functional alone, after those for all
    together, of method "ellipsoids".

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
        >>> quick = lipcert.bound(model, (4,), "rescaled", fit=lipcert.FitOptions(steps=10))
        >>> longer = lipcert.FitOptions(steps=20, start=quick.scales)
        >>> lipcert.bound(model, (4,), "rescaled", fit=longer).method
        'rescaled'
    """

    steps: int = 150
    lr: float = 0.05
    iterations: int = 6
    pair: tuple[int, int] | None = None
    per_neuron: bool = False
    each: int = 40
    start: Mapping[str, Tensor] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if min(self.steps, self.each) < 0 or self.iterations < 1 or not self.lr > 0:
            raise OptionError(
                f"{self}: expected steps and each ≥ 0, iterations ≥ 1 and lr > 0"
            )
        if self.pair is not None:
            _check_pair(self.pair)
        if self.start is not None:
            _check_start(self.start)

    def check(self, classes: int) -> None:
        """Refuse a pair of classes that the network does not have."""
        if self.pair is not None and max(self.pair) >= classes:
            raise OptionError(
                f"pair is {self.pair}, but the network has {classes} classes, from 0 on"
            )


def _check_pair(pair: Any) -> None:
    is_pair = (
        isinstance(pair, tuple | list)
        and len(pair) == 2
        and all(isinstance(label, int) for label in pair)
    )
    if not is_pair or pair[0] == pair[1] or min(pair) < 0:
        raise OptionError(
            f"pair is {pair!r}, expected two different classes, such as (3, 5)"
        )


def _check_start(start: Any) -> None:
    expected = (
        "expected diagonals by the names of sites, such as bound.scales or "
        "estimator.diagonals()"
    )
    if not isinstance(start, Mapping):
        raise OptionError(f"start is a {type(start).__name__}, {expected}")
    for name, diagonal in start.items():
        if not isinstance(diagonal, Tensor):
            raise OptionError(
                f"start has a {type(diagonal).__name__} for {name!r}, {expected}"
            )
        if not bool((diagonal > 0).all() & torch.isfinite(diagonal).all()):
            raise OptionError(
                f"start has entries for {name!r} that are not positive and "
                f"finite, {expected}"
            )


def fit_scales(
    estimator: Estimator,
    options: FitOptions | None = None,
    progress: Report = no_report,
) -> float:
    """Minimise the mean estimate, or that of one pair of classes, over the estimator's scales.

    Starts at the present ones and keeps them if nothing better is found. Returns the
    value reached, with norms iterated to the end.
    """
    if estimator.scales is None:
        raise OptionError(
            "the estimator has no scales; use method='rescaled' or 'ellipsoids'"
        )
    options = options or FitOptions()
    # Put back at the end: the estimator may be the one of a training under way.
    power_iterations, accelerated = estimator.power_iterations, estimator.accelerated
    # A site whose entries cannot be scaled apart has no parameter; slack of a network
    # without sites is empty.
    parameters = [
        parameter for parameter in estimator.parameters() if parameter.numel()
    ]
    start = [parameter.detach().clone() for parameter in parameters]
    estimator.accelerated = True
    # Both ends are judged by norms that have converged: unconverged ones lie below and
    # would favour either side.
    first = last = float(_objective(estimator, _TO_THE_END, options.pair).detach())
    if parameters and options.steps > 0 and first > 0:
        _descend(estimator, parameters, options, progress)
        last = float(_objective(estimator, _TO_THE_END, options.pair).detach())
    estimator.power_iterations, estimator.accelerated = power_iterations, accelerated
    if not last < first:
        with torch.no_grad():
            for parameter, kept in zip(parameters, start, strict=True):
                parameter.copy_(kept)
    return min(first, last)


def _descend(
    estimator: Estimator,
    parameters: Sequence[nn.Parameter],
    options: FitOptions,
    progress: Report,
) -> None:
    """Steps of Adam on the logarithm of the objective, with a learning rate that falls to zero."""
    optimizer = torch.optim.Adam(parameters, betas=(0.9, 0.99))
    for step in range(options.steps):
        # Of the logarithm: the learning rate then means the same for constants of 10
        # and of 10⁵.
        value = _objective(estimator, options.iterations, options.pair).log()
        # Of these parameters only: backward() would also leave gradients in the weights
        # of the model.
        gradients = torch.autograd.grad(value, parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.param_groups[0]["lr"] = options.lr * (1 - step / options.steps)
        optimizer.step()
        progress((step + 1) / options.steps)
    optimizer.zero_grad()


def _objective(
    estimator: Estimator, iterations: int, pair: tuple[int, int] | None
) -> Tensor:
    """The mean estimate, or that of one pair of classes, after some iterations."""
    estimator.power_iterations = iterations
    value = estimator.estimate().value
    if pair is None:
        return find_target(estimator.target).mean(value)
    if value.dim() != 2:
        raise OptionError(
            f"pair is {pair}, which needs the target pairwise or last-layer, "
            f"not {estimator.target}"
        )
    return value[pair]


def fitted_scales(
    network: Network, target: str, options: FitOptions, progress: Report
) -> dict[str, Tensor]:
    """Diagonals by the names of their sites, fitted to the present weights of a network."""
    return _fitted(network, "rescaled", target, options, progress).diagonals()


def fitted_ellipsoids(
    network: Network, target: str, options: FitOptions, progress: Report
) -> tuple[Ellipsoids, dict[str, Tensor]]:
    """Ellipsoids whose multipliers are fitted to the present weights of a network, and the diagonals behind them."""
    estimator = _fitted(network, "ellipsoids", target, options, progress)
    with torch.no_grad():
        # Only the multipliers are wanted from here on; that they are valid is proved
        # elsewhere.
        return estimator.ellipsoids(), estimator.diagonals()


def _fitted(
    network: Network, method: str, target: str, options: FitOptions, progress: Report
) -> Estimator:
    if target != "network":
        options.check(network.classes)
    estimator = Estimator.of_network(
        network, method, target, per_neuron=options.per_neuron
    )
    if options.start is not None:
        estimator.begin_with(options.start)
    fit_scales(estimator, options, progress)
    return estimator
