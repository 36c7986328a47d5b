"""What is known of the values of a program over a ball, while it is walked through."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from lipcert.local.prepared import Prepared
from lipcert.local.pulling import Ball, Walls
from lipcert.local.replaced import Replaced
from lipcert.local.zonotopes import Zonotope
from lipcert.rounding import gamma

if TYPE_CHECKING:
    from lipcert.local.allowances import Roundings


@dataclass
class Deviations:
    """The state of the walk through the nodes; all tensors float64, one row for each input.

    centre: v̂ at the inputs.
    reach: D.
    norms: m, (B,).
    noise: what of D does not shrink with the radius, in the linear prefix.
    below, above: Δ ∈ [−below, above].
    largest: of each node, (B,), the largest sum of absolute products.
    roundings: what linear nodes are off by.
    """

    prepared: Prepared
    ball: Ball
    centre: dict[int, Tensor]
    reach: dict[int, Tensor] = field(default_factory=dict)
    norms: dict[int, Tensor] = field(default_factory=dict)
    noise: dict[int, Tensor] = field(default_factory=dict)
    below: dict[int, Tensor] = field(default_factory=dict)
    above: dict[int, Tensor] = field(default_factory=dict)
    walls: Walls = field(default_factory=lambda: Walls({}, {}, set()))
    sites: dict[int, Replaced] = field(default_factory=dict)
    largest: list[Tensor] = field(default_factory=list)
    roundings: dict[int, Roundings] = field(default_factory=dict)
    zonotope: Zonotope | None = None

    def magnitude(self, v: int) -> Tensor:
        """M: what no executed value of a node exceeds."""
        return (self.centre[v].abs() + self.reach[v]) * (1 + gamma(2))

    def take(self, index: Tensor) -> Deviations:
        """What rows at the output need, for some of the inputs."""
        sites = {k: site.take(index) for k, site in self.sites.items()}
        walls = self.walls.take(index)
        largest = [values[index] for values in self.largest]
        return Deviations(
            self.prepared,
            Ball(self.ball.norm, self.ball.radius[index]),
            {},
            walls=walls,
            sites=sites,
            largest=largest,
        )
