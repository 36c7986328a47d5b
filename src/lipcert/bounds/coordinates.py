"""The network as an estimator sees it: with 1-Lipschitz nonlinearities, in coordinates that can be trained."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from lipcert.bounds.ellipsoids import pairs_apart
from lipcert.bounds.scales import Scales
from lipcert.bounds.targets import find_target
from lipcert.errors import OptionError
from lipcert.network.normal_form import Network
from lipcert.network.rewrites import liplt_lines, loop_transform, naive_lines


@dataclass(frozen=True, eq=False)
class Coordinates:
    """A network for a method of estimating.

    last: the one that rows of logits are pulled back through.
    slack: by how much the U of ellipsoids exceeds the least it can be, as a logarithm.
    """

    network: Network
    last: Network
    scales: Scales | None = None
    slack: nn.Parameter | None = None


def coordinates(
    base: Network, method: str, target: str, per_neuron: bool
) -> Coordinates:
    """The form of a network that a method and a target need; their parameters begin as the identity."""
    find_target(target).check(base)
    transforms_last = find_target(target).transforms_last
    if method == "ellipsoids":
        if not transforms_last:
            raise OptionError(
                f"method='ellipsoids' has no target {target!r}; use 'pairwise'"
            )
        return _for_ellipsoids(base)
    # Rows of targets that stop before the last layer go through the plain network:
    # nothing leads around its nonlinearities.
    plain = network = loop_transform(base, naive_lines(base))
    if method != "naive":
        network = loop_transform(base, liplt_lines(base))
    scales = None
    if method == "rescaled":
        scales = Scales(network, per_neuron)
        network, plain = scales.rescaled(), scales.rescaled(plain)
    return Coordinates(network, network if transforms_last else plain, scales)


def _for_ellipsoids(base: Network) -> Coordinates:
    """Sorted pairs apart, and a diagonal for every site."""
    apart = pairs_apart(base)
    # U = (1 + e⁻¹)·(the least it can be): U − K is inverted, and far from singular.
    start = torch.full((base.depth,), -1.0, dtype=base.dtype, device=base.device)
    return Coordinates(
        apart, apart, Scales(apart, per_neuron=True), nn.Parameter(start)
    )
