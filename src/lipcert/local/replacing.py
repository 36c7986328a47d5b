"""The relaxation of every kind of site, from the interval of its input; of elementwise ones, see `replaced`."""

from __future__ import annotations

import torch
from torch import Tensor

from lipcert.local.funnels import dual_norms, flat
from lipcert.local.prepared import Prepared
from lipcert.local.relaxations import Constants, Picks, Plane
from lipcert.local.replaced import (
    Replaced,
    outwards,
    replace_elementwise,
    rounding_error,
)
from lipcert.network.normal_form import Site
from lipcert.network.slopes import Slope
from lipcert.network.tangents import LocalSlope, adjoint_at
from lipcert.rounding import gamma


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
        return replace_elementwise(site, centre, value, below, above, inward, prepared)
    if isinstance(slope, LocalSlope):
        return _plane(site, slope, centre, value, below, above, prepared)
    span = torch.maximum(below, above)
    size = flat(centre.abs() + span).amax(1).reshape(-1, *(1,) * (value.dim() - 1))
    low, high = _range(site, slope, centre, value, below, above)
    error = rounding_error(
        slope, value.abs() + torch.maximum(-low, high), size, centre, value, prepared
    )
    if slope.extremum:
        return _picks(site, slope, centre, value, below, above, error, prepared)
    low, high = low - error, high + error
    return Replaced(Constants(*outwards(low, high)), -low, high, error, error, inward)


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
    relaxation = Plane(function, tangent, centre, *outwards(-slack, slack))
    return Replaced(relaxation, range_, range_, error, slack, torch.zeros_like(centre))


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
    ranks = _ranks(near)
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
    reach_low, reach_high = function(low) - value, function(high) - value
    relaxation = Picks(
        function, ranks, settled, sign, *outwards(line_low - slack, line_high + slack)
    )
    reach = slack - reach_low, slack + reach_high
    return Replaced(relaxation, *reach, error, slack, torch.zeros_like(centre))


def _ranks(values: Tensor) -> Tensor:
    """The place of every entry among all of its input, by size: no two are equal."""
    order = flat(values).argsort(stable=True, dim=1)
    return order.argsort(dim=1).double().reshape(values.shape)
