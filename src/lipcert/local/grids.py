"""An elementwise nonlinearity over an interval: values on a grid, and how far it strays from them in between.

Let [l, u] be the interval and l = p_0 ≤ … ≤ p_N = u a grid that contains the kinks. On
a cell [a, b] of width h with chord slope σ, the nonlinearity is between its chord and

    chord ± ρ,      ρ = min(κh²/8, h·(β−σ)(σ−α)/(β−α)),

with the Lipschitz constant κ of φ′ (Taylor; 0 where φ is piecewise linear) and its
slopes in [α, β] (φ is below both lines of slope β from a and of slope α from b, which
meet that far above the chord). So for *any* slope λ

    φ(z) ≤ λz + max over cells of (max(φ(a) − λa, φ(b) − λb) + ρ),

and the same from below. Slopes may therefore be chosen in any way; what is proved is
the intercept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lipcert.network.normal_form import Site
from lipcert.network.slopes import Slope
from lipcert.rounding import UNIT_ROUNDOFF, gamma

_CELLS = 32
"""Cells of the grid of a nonlinearity that is curved; they are narrower where activations bend, around zero."""
_RAISES = 5
"""How often a chord is raised; on a grid of 32 cells, that is nearly always enough to make it an edge of the hull."""
_AT_ONCE = 1 << 17
"""Entries of the gaps between a graph and lines that are formed at a time, so that they stay in the cache."""
_ROUND = gamma(12)
"""Of the few operations that make an intercept."""


@dataclass(frozen=True)
class Grid:
    """The graph of φ around a centre z with φ̂ = φ(z) as executed, both subtracted; all tensors of float64.

    places: (N+1, B, …), p_i − z.
    values: (N+1, B, …), φ(p_i) − φ̂.
    error: (B, …), of the values and places together with the rounding of an intercept,
    for slopes of up to `steepest`.
    strays: (N, B, …), ρ of every cell.
    """

    places: Tensor
    values: Tensor
    error: Tensor
    strays: Tensor
    steepest: float

    def take(self, index: Tensor) -> Grid:
        """That of some inputs."""
        strays = self.strays[:, index] if self.strays.dim() else self.strays
        return Grid(
            self.places[:, index],
            self.values[:, index],
            self.error[index],
            strays,
            self.steepest,
        )

    def high(self, slope: Tensor) -> Tensor:
        """The smallest known μ with φ(z + ζ) − φ̂ ≤ λζ + μ for all ζ of the interval; λ and μ are (B, R, …)."""
        return self._top(slope, 1) + self.error[:, None]

    def low(self, slope: Tensor) -> Tensor:
        """The largest known μ with φ(z + ζ) − φ̂ ≥ λζ + μ for all ζ of the interval; λ and μ are (B, R, …)."""
        return -self._top(slope, -1) - self.error[:, None]

    def _top(self, slope: Tensor, sign: int) -> Tensor:
        """The largest sign·(φ − φ̂ − λζ) over all cells, but for the error.

        Over a cell, φ is within ρ of its chord, and a chord minus a line is largest at
        an end. So every point of the grid counts with the larger ρ of its two cells.
        """
        heights = sign * self.values
        if self.strays.dim():
            outside = torch.zeros_like(self.strays[:1])
            left, right = (outside, self.strays), (self.strays, outside)
            heights = heights + torch.maximum(torch.cat(left), torch.cat(right))
        chunk = max(1, _AT_ONCE // max(slope.numel(), 1))
        tops = []
        for first in range(0, len(heights), chunk):
            some = slice(first, first + chunk)
            gaps = heights[some, :, None] - sign * slope * self.places[some, :, None]
            tops.append(gaps.amax(0))
        return torch.stack(tops).amax(0) if len(tops) > 1 else tops[0]

    def range(self) -> tuple[Tensor, Tensor]:
        """Bounds on φ(z + ζ) − φ̂."""
        flat = torch.zeros_like(self.error)[:, None]
        return self.low(flat)[:, 0], self.high(flat)[:, 0]

    def steep(self, sign: int) -> Tensor:
        """The slope of the best line above (sign 1) or below (−1) the graph: the one that is closest at the midpoint.

        It is the slope of the edge of the convex hull over the midpoint. A chord over
        it is raised until it is that edge: the point that is farthest outside of it
        takes the place of the end on the same side.
        """
        places, heights = self.places, sign * self.values
        middle = (places[0] + places[-1]) / 2
        left = torch.stack([places[0], heights[0]])
        right = torch.stack([places[-1], heights[-1]])
        slope = _chord(left, right)
        # Between two ends there are no more points than that to take.
        for _ in range(min(_RAISES, len(places) - 2)):
            which = torch.addcmul(heights, slope, places, value=-1).argmax(0)[None]
            farthest = torch.cat([places.gather(0, which), heights.gather(0, which)])
            before = farthest[0] <= middle
            left = torch.where(before, farthest, left)
            right = torch.where(before, right, farthest)
            slope = _chord(left, right)
        return (sign * slope).clamp(-self.steepest, self.steepest)

    def hull_ends(self, sign: int) -> tuple[Tensor, Tensor]:
        """The slopes of the first and the last edge of the convex hull, on its upper (1) or lower (−1) side."""
        ends = []
        for place, value, side in (
            (self.places[0], self.values[0], 1),
            (self.places[-1], self.values[-1], -1),
        ):
            run = self.places - place
            chords = (self.values - value) / torch.where(run == 0, 1.0, run)
            steepness = torch.where(run == 0, -torch.inf, sign * side * chords).amax(0)
            ends.append(
                torch.where(torch.isinf(steepness), 0.0, sign * side * steepness)
            )
        return ends[0], ends[1]


def _chord(left: Tensor, right: Tensor) -> Tensor:
    """The slope of the line through two points, (2, …) each."""
    return (right[1] - left[1]) / (right[0] - left[0]).clamp(min=1e-300)


def grid(
    site: Site, centre: Tensor, value: Tensor, below: Tensor, above: Tensor
) -> Grid:
    """The graph of a site over [centre − below, centre + above], by its implementation in float64."""
    slope, function = site.slope, site.function
    assert slope is not None
    assert function is not None
    alpha, beta = (float(end) for end in slope.interval())
    steepest = max(abs(alpha), abs(beta))
    points = _points(slope, centre, below, above)
    images = torch.stack([function(point) for point in points])
    places, values = points - centre, images - value
    width = points[1:] - points[:-1]
    strays = _strays(slope, width, values, alpha, beta)
    size = (
        images.abs().amax(0)
        + value.abs()
        + steepest * (points.abs().amax(0) + centre.abs())
    )
    # The values once, and the strays that are computed from the differences of two of
    # them.
    relative = _ROUND + 3 * 2.01 * UNIT_ROUNDOFF[torch.float64] * (slope.ulps or 0.0)
    tiny = 4 * torch.finfo(torch.float64).tiny
    return Grid(places, values, size * relative + tiny, strays, steepest)


def _points(slope: Slope, centre: Tensor, below: Tensor, above: Tensor) -> Tensor:
    """(N+1, B, …): the grid, from an end at most centre − below to one at least centre + above."""
    outward = gamma(4) * (centre.abs() + below + above)
    low, high = centre - below - outward, centre + above + outward
    points = [low, high]
    if slope.curvature != 0.0:
        first, last = torch.asinh(low), torch.asinh(high)
        for step in range(1, _CELLS):
            inner = torch.sinh(first + (last - first) * (step / _CELLS))
            points.append(torch.minimum(torch.maximum(inner, low), high))
    for kink in slope.kinks:
        place = torch.as_tensor(
            kink() if callable(kink) else kink, dtype=centre.dtype, device=centre.device
        )
        points.append(torch.minimum(torch.maximum(place.expand_as(centre), low), high))
    stacked = torch.stack(points)
    if len(points) == 2:
        return stacked
    return stacked.sort(0).values


def _strays(
    slope: Slope, width: Tensor, values: Tensor, alpha: float, beta: float
) -> Tensor:
    """ρ of every cell."""
    if slope.curvature == 0.0:
        return torch.zeros((), dtype=width.dtype, device=width.device)
    # The chord slope is rounded: its error times the width is covered by the relative
    # error of the values.
    chord = ((values[1:] - values[:-1]) / width.clamp(min=1e-300)).clamp(alpha, beta)
    by_slopes = width * (beta - chord) * (chord - alpha) / max(beta - alpha, 1e-300)
    if slope.curvature is None:
        return by_slopes * (1 + gamma(12))
    by_curvature = slope.curvature * width.square() / 8
    return torch.minimum(by_slopes, by_curvature) * (1 + gamma(12))
