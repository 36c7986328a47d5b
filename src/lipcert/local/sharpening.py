"""Better slopes for the lines: some steps of gradient ascent on the bounds of rows.

Every slope gives lines that hold (see `grids`), so nothing of the search for them need
be exact: the bounds that are kept are computed like all others, and the best of all
steps counts for every row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lipcert.local.fans import Ascent, Positions, better, fan_of, with_fans
from lipcert.local.pulling import Pulled, pull_back
from lipcert.local.state import Deviations

_RATE = 0.2
_DECAY = 0.9
_TRIED = 4
_RECENT = 2


@dataclass(frozen=True)
class Effort:
    """Steps of ascent for the slopes of lines, on the bounds of the differences of logits.

    last_steps: for the slopes that these rows meet, with the intervals inside as they
    are.
    inner_steps: for the slopes of all rows together (see `joint_search`), where the
    former did not do.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
        >>> effort = lipcert.Effort(last_steps=20, inner_steps=20)
        >>> lipcert.certify_local(model, torch.rand(2, 4), effort=effort).radius.shape
        torch.Size([2])
    """

    last_steps: int = 10
    inner_steps: int = 0


def sharpen(
    state: Deviations,
    node: int,
    rows: Tensor,
    best: Pulled,
    margins: Tensor,
    steps: int,
) -> Pulled:
    """Slopes for every row at a node by itself; rows whose bound exceeds −margin need no better one."""
    constant = torch.zeros_like(best.constant)
    fans = {k: fan_of(site) for k, site in state.sites.items() if site.grid is not None}
    if not fans:
        return best
    positions = {k: Positions() for k in fans}
    walls = with_fans(state.walls, fans, positions)
    radius = state.ball.radius
    ascent: Ascent | None = None
    worst = [(best.at(radius) + margins).amin(1)]
    with torch.inference_mode(False), torch.enable_grad():
        for step in range(steps + 1):
            pulled = pull_back(
                state.prepared, walls, state.ball.norm, {node: rows}, constant
            )
            bounds = pulled.at(radius)
            best = better(best, pulled, radius)
            worst.append((best.at(radius) + margins).amin(1))
            if step == steps or not bounds.requires_grad or _decided(worst, steps):
                break
            ascent = ascent or Ascent(positions.values(), _RATE, _DECAY)
            ascent.step(-(bounds + margins).clamp(max=0).sum())
    return best


def _decided(worst: list[Tensor], steps: int) -> bool:
    """Whether every input is proved, or would not be if all steps gained as much as the last ones: gains shrink."""
    now, left = worst[-1], steps + 2 - len(worst)
    decided = now > 0
    if len(worst) > _TRIED:
        gain = (now - worst[-1 - _RECENT]) / _RECENT
        decided = decided | (now + gain * left < 0)
    return bool(decided.all())
