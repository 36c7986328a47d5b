"""The relaxation of every kind of site, from the interval of its input.

Executed nonlinearities are off by e, as their `ulps` say: φ̂(z′) = φ(z′) ± e.
Intercepts contain e, and the error of float64 products with rows, γ₆₄·|λ|·|ζ|.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from lipcert.local.funnels import dual_norms, flat
from lipcert.local.grids import Grid, grid
from lipcert.local.prepared import Prepared
from lipcert.local.relaxations import (
    Constants,
    Lines,
    Picks,
    Plane,
    Relaxation,
    widened,
)
from lipcert.network.normal_form import Site
from lipcert.network.slopes import Slope
from lipcert.network.tangents import LocalSlope, adjoint_at
from lipcert.rounding import UNIT_ROUNDOFF, gamma


@dataclass(frozen=True)
class Replaced:
    """A relaxation with the range of the output, Δ ∈ [−below, above], e, and the grid it was made from, if any.

    allowance: e, and what products with rows are off by. inward: η of the node before,
    if rows reach it by this site alone: then it is part of the intercepts, |y|·|λ|·η
    for a row y.
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


def replace_site(
    site: Site,
    centre: Tensor,
    value: Tensor,
    below: Tensor,
    above: Tensor,
    inward: Tensor,
    prepared: Prepared,
) -> Replaced:
    """The relaxation of a site whose input is in [centre − below, centre + above], and `value` at the centre."""
    slope = site.slope
    assert slope is not None
    if slope.elementwise:
        return _elementwise(site, centre, value, below, above, inward, prepared)
    if isinstance(slope, LocalSlope):
        return _plane(site, slope, centre, value, below, above, prepared)
    span = torch.maximum(below, above)
    size = flat(centre.abs() + span).amax(1).reshape(-1, *(1,) * (value.dim() - 1))
    low, high = _range(site, slope, centre, value, below, above)
    error = _error(
        slope, value.abs() + torch.maximum(-low, high), size, centre, value, prepared
    )
    if slope.extremum:
        return _picks(site, slope, centre, value, below, above, error, prepared)
    low, high = low - error, high + error
    return Replaced(Constants(*_outwards(low, high)), -low, high, error, error, inward)


def _plane(
    site: Site,
    slope: LocalSlope,
    centre: Tensor,
    value: Tensor,
    below: Tensor,
    above: Tensor,
    prepared: Prepared,
) -> Replaced:
    """φ̂(c + ζ) − φ̂(c) = J(c)ζ ± (remainder + rounding at both points); |J(c)ζ| is bounded entry by entry."""
    function, tangent = site.function, slope.tangent
    assert function is not None
    assert tangent is not None
    reach = torch.maximum(below, above)
    steps = tangent.linear(centre, reach)
    error = tangent.error(centre, reach, prepared.network.dtype)
    slack = (
        tangent.remainder(centre, reach)
        + 2 * error
        + tangent.pulling_error(centre, reach)
    )
    # Rows that meet before the site are added to those of other sites: that rounds
    # |J|ᵀ|y| once for each.
    slack = (slack + gamma(prepared.fan_out + 2) * steps) * (1 + gamma(6))
    range_ = (steps + slack) * (1 + gamma(2))
    relaxation = Plane(function, tangent, centre, *_outwards(-slack, slack))
    return Replaced(relaxation, range_, range_, error, slack, torch.zeros_like(centre))


def _outwards(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Intercepts of one line each for all rows, (B, 1, …)."""
    size = torch.maximum(low.abs(), high.abs())
    return widened(low, size, -1)[:, None], widened(high, size, 1)[:, None]


def _error(
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


def _elementwise(
    site: Site,
    centre: Tensor,
    value: Tensor,
    below: Tensor,
    above: Tensor,
    inward: Tensor,
    prepared: Prepared,
) -> Replaced:
    bare = bounded_site(site, centre, value, below, above, inward, prepared)
    graph = bare.grid
    assert graph is not None
    lines = bare.lines(graph.steep(-1)[:, None], graph.steep(1)[:, None])
    return replace(bare, relaxation=lines)


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
    error = _error(slope, outputs, centre.abs() + span, centre, value, prepared)
    allowance = error + 4 * gamma(prepared.fan_out + 6) * graph.steepest * span
    bounds = Constants(*_outwards(low - error, high + error))
    return Replaced(bounds, error - low, error + high, error, allowance, inward, graph)


def _range(
    site: Site,
    slope: Slope,
    centre: Tensor,
    value: Tensor,
    below: Tensor,
    above: Tensor,
) -> tuple[Tensor, Tensor]:
    """Bounds on φ(z′) − φ̂(z): from monotonicity, and from the Lipschitz constant in l2."""
    assert site.function is not None
    span = torch.maximum(below, above)
    length = float(slope.lipschitz()) * dual_norms(flat(span), 2) * (1 + gamma(4))
    length = length.reshape(-1, *(1,) * (value.dim() - 1)).expand_as(value)
    low, high = -length, length
    if slope.monotone:
        outward = gamma(4) * (centre.abs() + span)
        low = torch.maximum(low, site.function(centre - below - outward) - value)
        high = torch.minimum(high, site.function(centre + above + outward) - value)
    slack = gamma(4) * (value.abs() + length)
    return low - slack, high + slack


def _picks(
    site: Site,
    slope: Slope,
    centre: Tensor,
    value: Tensor,
    below: Tensor,
    above: Tensor,
    error: Tensor,
    prepared: Prepared,
) -> Replaced:
    """Largest entries: the picked ones have the largest lower ends, so that they are settled as often as possible."""
    function, sign = site.function, slope.extremum
    assert function is not None
    outward = gamma(4) * (centre.abs() + below + above)
    low, high = centre - below - outward, centre + above + outward
    near, far = (low, high) if sign > 0 else (high, low)
    ranks = (
        flat(near)
        .argsort(stable=True, dim=1)
        .argsort(dim=1)
        .double()
        .reshape(near.shape)
    )  # no two are equal
    chosen = adjoint_at(function, ranks, torch.ones_like(value)) > 0
    picked = function(torch.where(chosen, centre, -sign * torch.inf))
    others = function(torch.where(chosen, -sign * torch.inf, far))
    settled = sign * others <= sign * function(near)
    line = picked - value
    end = torch.where(settled, line, function(far) - value)
    slack = gamma(8) * (value.abs() + picked.abs() + function(far).abs()) + error
    # What is pulled back is at most the largest span of the entries, times a row.
    span = torch.maximum(below, above)
    slack = slack + gamma(prepared.fan_out + 6) * flat(span).amax(1).reshape(
        -1, *(1,) * (value.dim() - 1)
    )
    line_low, line_high = (line, end) if sign > 0 else (end, line)
    reach_low, reach_high = (
        function(low) - value - slack,
        function(high) - value + slack,
    )
    relaxation = Picks(
        function, ranks, settled, sign, *_outwards(line_low - slack, line_high + slack)
    )
    return Replaced(
        relaxation, -reach_low, reach_high, error, slack, torch.zeros_like(centre)
    )
