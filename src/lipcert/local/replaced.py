"""What is kept of a nonlinearity that is replaced over a ball, and the bounds and lines of elementwise ones.

Executed nonlinearities are off by e, as their `ulps` say: φ̂(z′) = φ(z′) ± e.
Intercepts contain e, and the error of float64 products with rows, γ₆₄·|λ|·|ζ|.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from lipcert.local.grids import Grid, grid
from lipcert.local.prepared import Prepared
from lipcert.local.relaxations import (
    Constants,
    Lines,
    Relaxation,
    widened,
)
from lipcert.network.normal_form import Site
from lipcert.network.slopes import Slope
from lipcert.rounding import UNIT_ROUNDOFF, gamma


@dataclass(frozen=True)
class Replaced:
    """A relaxation with the range of the output, Δ ∈ [−below, above], e, and the grid it was made from, if any.

    allowance: e, and what products with rows are off by.
    inward: η of the node before, if rows reach it by this site alone: then it is part
    of the intercepts, |y|·|λ|·η for a row y.
    """

    relaxation: Relaxation
    below: Tensor
    above: Tensor
    error: Tensor
    allowance: Tensor
    inward: Tensor
    grid: Grid | None = None

    def take(self, index: Tensor) -> Replaced:
        """That of some inputs."""
        graph = None if self.grid is None else self.grid.take(index)
        return Replaced(
            self.relaxation.take(index),
            self.below[index],
            self.above[index],
            self.error[index],
            self.allowance[index],
            self.inward[index],
            graph,
        )

    def intercepts(
        self, low_slope: Tensor, high_slope: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Those of lines of any slopes, (B, R, …) or (B, 1, …), but for sums of their products with rows."""
        assert self.grid is not None
        inward, allowance = self.inward[:, None], self.allowance[:, None]
        low = self.grid.low(low_slope) - allowance - low_slope.abs() * inward
        high = self.grid.high(high_slope) + allowance + high_slope.abs() * inward
        return low, high

    def lines(self, low_slope: Tensor, high_slope: Tensor) -> Lines:
        """Lines of any slopes, (B, R, …) or (B, 1, …)."""
        low, high = self.intercepts(low_slope, high_slope)
        size = torch.maximum(low.abs(), high.abs())
        ends = widened(low, size, -1, first=2), widened(high, size, 1, first=2)
        return Lines(low_slope, high_slope, *ends)


def needs_rows(site: Site, centre: Tensor, below: Tensor, above: Tensor) -> Tensor:
    """For which entries of its input a narrower interval can change the relaxation of a site."""
    slope = site.slope
    assert slope is not None
    if not slope.elementwise or slope.curvature != 0.0:
        return (below + above) > 0
    needed = torch.zeros_like(centre, dtype=torch.bool)
    for kink in slope.kinks:
        place = torch.as_tensor(
            kink() if callable(kink) else kink, dtype=centre.dtype, device=centre.device
        )
        needed |= (centre - below < place) & (place < centre + above)
    return needed


def is_flat(site: Site, centre: Tensor, below: Tensor, above: Tensor) -> Tensor:
    """Where a piecewise linear nonlinearity is constant over an interval that contains no kink."""
    assert site.function is not None
    level = site.function(centre - below) == site.function(centre + above)
    return level & ~needs_rows(site, centre, below, above)


def outwards(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Intercepts of one line each for all rows, (B, 1, …)."""
    size = torch.maximum(low.abs(), high.abs())
    return widened(low, size, -1)[:, None], widened(high, size, 1)[:, None]


def rounding_error(
    slope: Slope,
    outputs: Tensor,
    inputs: Tensor,
    centre: Tensor,
    value: Tensor,
    prepared: Prepared,
) -> Tensor:
    """e: the rounding of the nonlinearity as executed and as the proof computes it, from the largest values."""
    entries = max(prod(centre.shape[1:]), prod(value.shape[1:]))
    lipschitz = float(slope.lipschitz())
    relative = (
        2.01 * slope.roundings(entries) * (prepared.unit + UNIT_ROUNDOFF[torch.float64])
    )
    flushed = (1 + lipschitz) * 2.0**21 * torch.finfo(prepared.network.dtype).tiny
    return relative * (outputs + lipschitz * inputs) + flushed


def bounded_site(
    site: Site,
    centre: Tensor,
    value: Tensor,
    below: Tensor,
    above: Tensor,
    inward: Tensor,
    prepared: Prepared,
) -> Replaced:
    """An elementwise nonlinearity by bounds on its output, with the grid from which lines can be made."""
    slope = site.slope
    assert slope is not None
    graph = grid(site, centre, value, below, above)
    span = torch.maximum(below, above)
    low, high = graph.range()
    outputs = value.abs() + torch.maximum(-low, high)
    error = rounding_error(slope, outputs, centre.abs() + span, centre, value, prepared)
    allowance = error + 4 * gamma(prepared.fan_out + 6) * graph.steepest * span
    bounds = Constants(*outwards(low - error, high + error))
    return Replaced(bounds, error - low, error + high, error, allowance, inward, graph)


def replace_elementwise(
    site: Site,
    centre: Tensor,
    value: Tensor,
    below: Tensor,
    above: Tensor,
    inward: Tensor,
    prepared: Prepared,
) -> Replaced:
    """An elementwise nonlinearity by the lines that are best without knowing the row."""
    bare = bounded_site(site, centre, value, below, above, inward, prepared)
    graph = bare.grid
    assert graph is not None
    lines = bare.lines(graph.steep(-1)[:, None], graph.steep(1)[:, None])
    return replace(bare, relaxation=lines)
