"""Slopes of lines that a search moves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from lipcert.local.pulling import Pulled, Walls
from lipcert.local.relaxations import Lines
from lipcert.local.replaced import Replaced


class MovingSlopes:
    """The slopes of the lines of one site for some rows, (B, R, …), in units of the steepest slope.

    So steps of one size suit every nonlinearity.
    """

    def __init__(self, site: Replaced, rows: int) -> None:
        lines, graph = site.relaxation, site.grid
        assert isinstance(lines, Lines)
        assert graph is not None
        shape = (lines.low_slope.shape[0], rows, *lines.low_slope.shape[2:])
        self.unit = max(graph.steepest, 1e-300)
        self.low = (lines.low_slope / self.unit).expand(shape).clone().requires_grad_()
        self.high = (
            (lines.high_slope / self.unit).expand(shape).clone().requires_grad_()
        )

    def lines(self, site: Replaced) -> Lines:
        """The lines over the interval of the site as it is now.

        A chord over the whole interval is the best line on its side, whatever the row.
        """
        base, graph = site.relaxation, site.grid
        assert isinstance(base, Lines)
        assert graph is not None
        run = (graph.places[-1] - graph.places[0]).clamp(min=1e-300)
        chord = ((graph.values[-1] - graph.values[0]) / run)[:, None]
        close = 1e-9 * graph.steepest
        low = torch.where(
            (base.low_slope - chord).abs() > close, self.low * self.unit, base.low_slope
        )
        high = torch.where(
            (base.high_slope - chord).abs() > close,
            self.high * self.unit,
            base.high_slope,
        )
        return site.lines(low, high)

    @torch.no_grad()
    def clamp(self) -> None:
        """Back to slopes for which lines are proved."""
        self.low.clamp_(-1.0, 1.0)
        self.high.clamp_(-1.0, 1.0)

    def parts(self) -> list[Tensor]:
        """What a search moves."""
        return [self.low, self.high]


def with_lines(
    walls: Walls, sites: Mapping[int, Replaced], slopes: Mapping[int, MovingSlopes]
) -> Walls:
    """Walls with lines of these slopes at the sites that have some."""
    relaxations = dict(walls.relaxations)
    for k, moving in slopes.items():
        relaxations[k] = moving.lines(sites[k])
    return replace(walls, relaxations=relaxations)


@torch.no_grad()
def better(best: Pulled, other: Pulled, radius: Tensor) -> Pulled:
    """Of every row, what gives the larger bound over the whole ball."""
    larger = other.at(radius) > best.at(radius)
    constant = torch.where(larger, other.constant.detach(), best.constant)
    return Pulled(
        constant, torch.where(larger, other.steepness.detach(), best.steepness)
    )
