"""Better slopes for the lines: some steps of gradient ascent on the bounds of rows.

Every slope gives lines that hold (see `grids`), so nothing of the search for them need be exact: the bounds that are
kept are computed like all others, and the best of all steps counts for every row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lipcert.local.pulling import Pulled, Rows, Walls, pull_back
from lipcert.local.relaxations import Lines
from lipcert.local.replaced import Replaced
from lipcert.local.state import Deviations

_RATE = 0.2
_DECAY = 0.9


@dataclass(frozen=True)
class Effort:
    """Steps of ascent for the rows of the logit differences, and for those of the inputs of nonlinearities.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
        >>> effort = lipcert.Effort(last_steps=20, inner_steps=5)
        >>> lipcert.certify_local(model, torch.rand(2, 4), effort=effort).radius.shape
        torch.Size([2])
    """

    last_steps: int = 10
    inner_steps: int = 0


class _Slopes:
    """Slopes of all lines, (B, R, …) or (B, 1, …), as they are and as far as they may move."""

    def __init__(self, site: Replaced, rows: int) -> None:
        lines, graph = site.relaxation, site.grid
        assert isinstance(lines, Lines)
        assert graph is not None
        self.site = site
        shape = (lines.low_slope.shape[0], rows, *lines.low_slope.shape[2:])
        chord = (graph.values[-1] - graph.values[0]) / (graph.places[-1] - graph.places[0]).clamp(min=1e-300)
        # A chord over the whole interval is the best line on its side, whatever the row.
        close = 1e-9 * graph.steepest
        self.moves_low = ((lines.low_slope[:, 0] - chord).abs() > close)[:, None]
        self.moves_high = ((lines.high_slope[:, 0] - chord).abs() > close)[:, None]
        # In units of the steepest slope, so that steps of one size suit every nonlinearity.
        self.unit = max(graph.steepest, 1e-300)
        self.low = (lines.low_slope / self.unit).expand(shape).clone().requires_grad_()
        self.high = (lines.high_slope / self.unit).expand(shape).clone().requires_grad_()

    def lines(self) -> Lines:
        base = self.site.relaxation
        assert isinstance(base, Lines)
        low = torch.where(self.moves_low, self.low * self.unit, base.low_slope)
        high = torch.where(self.moves_high, self.high * self.unit, base.high_slope)
        return self.site.lines(low, high)

    @torch.no_grad()
    def clamp(self) -> None:
        self.low.clamp_(-1.0, 1.0)
        self.high.clamp_(-1.0, 1.0)


def sharpen(state: Deviations, node: int, rows: Tensor, pulled: Pulled, margins: Tensor, steps: int) -> Pulled:
    """Slopes for every row at a node by itself; rows whose bound exceeds −margin need no better one."""
    constant = torch.zeros_like(pulled.constant)

    def objective(bounds: Tensor) -> Tensor:
        return (bounds + margins).clamp(max=0).sum()

    return _ascend(state, {node: rows}, constant, pulled, objective, steps, rows.shape[1])


def sharpen_inner(state: Deviations, rows: Rows, constant: Tensor, pulled: Pulled, steps: int) -> Pulled:
    """Slopes for every row of the inputs of a site by itself."""
    return _ascend(state, rows, constant, pulled, torch.sum, steps, constant.shape[1])


def _ascend(
    state: Deviations,
    rows: Rows,
    constant: Tensor,
    best: Pulled,
    objective: Callable[[Tensor], Tensor],
    steps: int,
    count: int,
) -> Pulled:
    slopes = {k: _Slopes(site, count) for k, site in state.sites.items() if site.grid is not None}
    parameters = [part for slope in slopes.values() for part in (slope.low, slope.high)]
    if not parameters:
        return best
    optimizer = torch.optim.Adam(parameters, lr=_RATE)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, _DECAY)
    radius = state.ball.radius
    with torch.inference_mode(False), torch.enable_grad():
        for step in range(steps + 1):
            walls = _with_lines(state.walls, slopes)
            pulled = pull_back(state.prepared, walls, state.ball.norm, rows, constant)
            bounds = pulled.at(radius)
            best = _better(best, pulled, radius)
            if step == steps or not bounds.requires_grad:
                break
            optimizer.zero_grad()
            loss = -objective(bounds)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            for slope in slopes.values():
                slope.clamp()
    return best


def _with_lines(walls: Walls, slopes: dict[int, _Slopes]) -> Walls:
    relaxations = dict(walls.relaxations)
    for k, slope in slopes.items():
        relaxations[k] = slope.lines()
    return replace(walls, relaxations=relaxations)


@torch.no_grad()
def _better(best: Pulled, other: Pulled, radius: Tensor) -> Pulled:
    """Of every row, what gives the larger bound over the whole ball."""
    larger = other.at(radius) > best.at(radius)
    constant = torch.where(larger, other.constant.detach(), best.constant)
    return Pulled(constant, torch.where(larger, other.steepness.detach(), best.steepness))
