"""Lines that a search chooses from without proving one by one: mixtures of a few proved ones.

A mixture of two lines above a graph is above it, too. So some lines of each side are
proved for every entry, for all rows together, and a row has only a position t ∈ [0, 1]
on them: with J pieces and c_j = min(max(Jt − j, 0), 1),

    λ(t) = λ_0 + Σ_j c_j (λ_{j+1} − λ_j),      μ(t) = μ_0 + Σ_j c_j (μ_{j+1} − μ_j).

The weights c_{j−1} − c_j of the lines are not negative and their sum is 1, as computed:
rounding is monotone. Slopes go from that of the first edge of the convex hull to that of
the last one: others are worse for every row. So t is about where a line touches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lipcert.local.pulling import Pulled, Walls
from lipcert.local.relaxations import Lines, Relaxation, dot, widened
from lipcert.local.replaced import Replaced
from lipcert.rounding import gamma

_PIECES = 4
"""Of the lines on one side of a curve: halfway between two of them, 1/16 of the gap is lost."""


@dataclass(frozen=True)
class Fan:
    """Proved lines of both sides, (B, J + 1, …) each, in the order in which they touch the graph.

    start_low, start_high: (B, 1, …), the positions of the lines that are best without
    knowing the row.
    """

    low_slope: Tensor
    high_slope: Tensor
    low: Tensor
    high: Tensor
    start_low: Tensor
    start_high: Tensor
    site: Replaced

    def start(self, rows: Tensor) -> Tensor:
        """Where a search begins."""
        return torch.where(rows > 0, self.start_low, self.start_high)

    def lines(self, position: Tensor) -> Lines:
        """Lines of the slopes at positions, with intercepts that are proved for each."""
        slopes = []
        for ends in (self.low_slope, self.high_slope):
            first, last = ends[:, :1], ends[:, -1:]
            steepest = torch.maximum(first.abs(), last.abs())
            slope = first + (last - first) * position
            slopes.append(torch.minimum(torch.maximum(slope, -steepest), steepest))
        return self.site.lines(*slopes)

    def pull(self, rows: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Rows at the output and their positions, (B, R, …), become rows at the input and constants, (B, R)."""
        above, below = rows.clamp(min=0), rows.clamp(max=0)
        steps = self.low_slope.diff(dim=1), self.high_slope.diff(dim=1)
        rises = self.low.diff(dim=1), self.high.diff(dim=1)
        pulled = above * self.low_slope[:, :1] + below * self.high_slope[:, :1]
        constant = dot(above, self.low[:, :1]) + dot(below, self.high[:, :1])
        pieces = self.low.shape[1] - 1
        for j in range(pieces):
            share = (pieces * position - j).clamp(0.0, 1.0)
            for part, step, rise in zip((above, below), steps, rises, strict=True):
                mixed = share * part
                pulled = torch.addcmul(pulled, mixed, step[:, j : j + 1])
                constant = constant + dot(mixed, rise[:, j : j + 1])
        return pulled, constant


class Positions:
    """Those of the rows of some node on the fan of one site: what a search moves. The first rows set them."""

    values: Tensor | None = None

    def of(self, fan: Fan, rows: Tensor) -> Tensor:
        """(B, R, …)."""
        if self.values is None:
            self.values = fan.start(rows).detach().clone().requires_grad_()
        return self.values

    @torch.no_grad()
    def clamp(self) -> None:
        """Back to where there are lines."""
        if self.values is not None:
            self.values.clamp_(0.0, 1.0)


class Ascent:
    """Steps of Adam for positions that have been set."""

    def __init__(
        self, positions: Iterable[Positions], rate: float, decay: float
    ) -> None:
        self.positions = list(positions)
        values = [p.values for p in self.positions if p.values is not None]
        # A linear network has none.
        self.moves = bool(values)
        if self.moves:
            adam = self.optimizer = torch.optim.Adam(values, lr=rate)
            self.schedule = torch.optim.lr_scheduler.ExponentialLR(adam, decay)

    def step(self, loss: Tensor) -> None:
        """Against the gradient of a loss."""
        if not self.moves:
            return
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.schedule.step()
        for positions in self.positions:
            positions.clamp()


@dataclass(frozen=True)
class Mixed(Relaxation):
    """A fan with the positions of some rows."""

    fan: Fan
    positions: Positions

    def pull(self, rows: Tensor) -> tuple[Tensor | None, Tensor]:
        """As by any relaxation."""
        return self.fan.pull(rows, self.positions.of(self.fan, rows))

    def _pull(self, rows: Tensor, sizes: Tensor) -> Tensor | None:
        return self.pull(rows)[0]


def fan_of(site: Replaced) -> Fan:
    """The lines of a site whose input is in the interval of its grid.

    Sums round: with S = max|λ_j| a slope by (2J + 4)u·3S, whose product with a deviation
    joins the intercepts; and a constant by γ times at most 2J + 1 of the largest
    intercept for every unit of a row.
    """
    graph = site.grid
    assert graph is not None
    kinked = graph.strays.dim() == 0 and len(graph.places) <= 3
    pieces = 1 if kinked else _PIECES
    share = torch.linspace(
        0, 1, pieces + 1, dtype=torch.float64, device=graph.error.device
    )
    share = share.reshape(1, -1, *(1,) * (graph.error.dim() - 1))
    slopes, starts = [], []
    for sign in (-1, 1):
        first, last = (end[:, None] for end in graph.hull_ends(sign))
        slopes.append(
            (first + (last - first) * share).clamp(-graph.steepest, graph.steepest)
        )
        starts.append(_start(site, sign, first, last))
    low, high = site.intercepts(*slopes)
    span = torch.maximum(-graph.places[0], graph.places[-1])[:, None]
    slack = 3 * gamma(2 * pieces + 8) * graph.steepest * span
    low, high = low - slack, high + slack
    size = torch.maximum(low.abs(), high.abs()).amax(1, keepdim=True) * (2 * pieces + 1)
    low, high = (
        widened(low, size, -1, 2, 4 * pieces + 4),
        widened(high, size, 1, 2, 4 * pieces + 4),
    )
    return Fan(slopes[0], slopes[1], low, high, starts[0], starts[1], site)


@torch.no_grad()
def _start(site: Replaced, sign: int, first: Tensor, last: Tensor) -> Tensor:
    """The position of the line that a site has already; the middle if it has none."""
    lines = site.relaxation
    if not isinstance(lines, Lines):
        return torch.full_like(first, 0.5)
    best = lines.high_slope if sign > 0 else lines.low_slope
    run = last - first
    return ((best - first) / torch.where(run == 0, 1.0, run)).clamp(0.0, 1.0)


def with_fans(
    walls: Walls,
    fans: Mapping[int, Fan],
    positions: Mapping[int, Positions],
    proved: bool = False,
) -> Walls:
    """Walls with lines at these positions at the sites that have some: mixtures, or each proved by itself."""
    relaxations = dict(walls.relaxations)
    for k, moving in positions.items():
        if proved and moving.values is not None:
            relaxations[k] = fans[k].lines(moving.values)
        else:
            relaxations[k] = Mixed(fans[k], moving)
    return replace(walls, relaxations=relaxations)


@torch.no_grad()
def better(best: Pulled, other: Pulled, radius: Tensor) -> Pulled:
    """Of every row, what gives the larger bound over the whole ball."""
    larger = other.at(radius) > best.at(radius)
    constant = torch.where(larger, other.constant.detach(), best.constant)
    return Pulled(
        constant, torch.where(larger, other.steepness.detach(), best.steepness)
    )
