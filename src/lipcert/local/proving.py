"""From deviations to radii: how far all differences of logits stay positive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lipcert.local.deviations import follow
from lipcert.local.influence import costly_entries
from lipcert.local.joint_search import search_jointly
from lipcert.local.points import Point, margin_rows, pulled_rows, radius_of
from lipcert.local.prepared import Prepared
from lipcert.local.pulling import Ball, Pulled
from lipcert.local.sharpening import Effort, sharpen
from lipcert.local.state import Deviations

_TINY_BALL = 1e-6
_FARTHEST = 1e6
_SHARPENED = 1.5
"""Better slopes for the last rows have rarely proved what had lost more than so many margins."""
_SEARCHED = 4.0
"""The same for slopes of all rows together."""
_SOME_ROWS, _ALL_ROWS = 1.5, 8.0
"""The same for rows after columns: on seven training images and three others, losses fell to 0.45 to 0.67 of what they
were with the rows that count most, and to 0.15 to 0.5 with all."""
_SHARE = 0.8
"""The rows that count most are those of entries that make up this share of what their site costs."""
Improve = Callable[[Tensor, Pulled, Tensor], Pulled]
"""Better bounds of rows of the logits, from what is known of them and the margins that they should not use up."""


@dataclass(frozen=True)
class Trial:
    """What a walk has shown: bounds of the rows of the logits, and the radii that they prove."""

    state: Deviations
    rows: Tensor
    bounds: Pulled
    margins: Tensor
    radius: Tensor

    def lost(self) -> Tensor:
        """(B,): the largest share of a margin that deviations may use up; less than 1 if all of the ball is proved."""
        left = self.margins + self.bounds.at(self.state.ball.radius)
        return ((self.margins - left) / self.margins.clamp(min=1e-300)).amax(1)

    def failed(self, most: float) -> Tensor:
        """The inputs that are not proved because they lose a margin, but less than so many."""
        lost, short = self.lost(), self.radius < self.state.ball.radius
        return (short & (lost >= 1) & (lost < most)).nonzero().flatten()


def proved_radius(
    prepared: Prepared, point: Point, ball: Ball, effort: Effort, patient: bool = False
) -> Tensor:
    """(B,): a radius up to that of the ball within which the prediction is proved; that of the ball if all of it is.

    Where columns can be followed, that is tried first, one input at a time. What has
    failed is tried again with slopes that are searched for together, if asked for.
    """
    if prepared.columned:
        # Columns belong to one input (see `Zonotope`).
        radii = [
            _by_columns(prepared, one, around, effort, patient)
            for one, around in _one_by_one(point, ball)
        ]
        proved = torch.cat(radii)
    else:
        state = follow(prepared, ball, dict(point.values))
        proved = _tried(state, point, effort).radius
    if effort.inner_steps:
        for i, (one, around) in enumerate(_one_by_one(point, ball)):
            if proved[i] < around.radius[0]:
                proved[i] = torch.maximum(
                    proved[i], _searched(prepared, one, around, effort.inner_steps)[0]
                )
    return proved


def _by_columns(
    prepared: Prepared, point: Point, ball: Ball, effort: Effort, patient: bool
) -> Tensor:
    """(1,): columns first, then rows for what costs most, then for all that is not settled, if that is likely to do."""
    state = follow(prepared, ball, dict(point.values), columns_only=True)
    trial = _tried(state, point, effort)
    radius = trial.radius
    for most, share in ((_SOME_ROWS, _SHARE), (_ALL_ROWS, 1.0)):
        if len(trial.failed(most)) and (share < 1 or patient):
            chosen = costly_entries(trial.state, _failing(trial), share)
            state = follow(prepared, ball, dict(point.values), trial.state, chosen)
            trial = _tried(state, point, effort)
            radius = torch.maximum(radius, trial.radius)
    return radius


def _failing(trial: Trial) -> Tensor:
    """(1, R, K): the rows of one input whose bounds are not proved to stay positive."""
    bounds = trial.margins + trial.bounds.at(trial.state.ball.radius)
    return trial.rows[~(bounds > 0)][None]


def _one_by_one(point: Point, ball: Ball) -> Iterator[tuple[Point, Ball]]:
    for index in torch.split(
        torch.arange(len(point.prediction), device=ball.radius.device), 1
    ):
        yield point.take(index), Ball(ball.norm, ball.radius[index])


def _tried(state: Deviations, point: Point, effort: Effort) -> Trial:
    """What a walk proves, with better slopes for the last rows where it fails narrowly."""
    rows = margin_rows(point)
    bounds = pulled_rows(state, rows)
    radius = radius_of(state, point, bounds)
    trial = Trial(state, rows, bounds, point.margins(), radius)
    left = trial.failed(_SHARPENED)
    if effort.last_steps and len(left):
        fewer, some = state.take(left), point.take(left)
        last = state.prepared.exact.sites[-1].source
        improve = partial(sharpen, fewer, last, steps=effort.last_steps)
        # Lines of any slopes are valid, so that the better one of both radii holds.
        sharper = _improved(improve, fewer, some, rows[left], bounds.take(left))
        radius[left] = torch.maximum(radius[left], radius_of(fewer, some, sharper))
    return trial


def _searched(prepared: Prepared, point: Point, ball: Ball, steps: int) -> Tensor:
    """(1,): the radius of one input, with slopes for all rows together."""
    state = follow(prepared, ball, dict(point.values))
    rows = margin_rows(point)
    bounds = pulled_rows(state, rows)
    radius = radius_of(state, point, bounds)
    trial = Trial(state, rows, bounds, point.margins(), radius)
    if len(trial.failed(_SEARCHED)):
        better = _improved(
            partial(search_jointly, state, steps=steps), state, point, rows, bounds
        )
        radius = torch.maximum(radius, radius_of(state, point, better))
    return radius


@torch.no_grad()
def promised_radius(prepared: Prepared, point: Point, norm: float) -> Tensor:
    """(B,): how far the predictions would hold if all lines over a tiny ball went on: a guess."""
    promised = []
    every = torch.arange(len(point.prediction), device=point.logits.device)
    for index in torch.split(every, 1 if prepared.columned else max(1, len(every))):
        promised.append(_promised(prepared, point.take(index), norm))
    return torch.cat(promised)


def _promised(prepared: Prepared, point: Point, norm: float) -> Tensor:
    # Over so small a ball hardly anything is relaxed, and lines are derivatives.
    tiny = torch.full(
        (len(point.prediction),),
        _TINY_BALL,
        dtype=torch.float64,
        device=point.logits.device,
    )
    state = follow(prepared, Ball(norm, tiny), dict(point.values), columns_only=True)
    pulled = pulled_rows(state, margin_rows(point))
    ratios = (point.margins() + pulled.constant) / pulled.steepness.clamp(
        min=torch.finfo(torch.float64).tiny
    )
    return ratios.amin(1).clamp(min=0.0, max=_FARTHEST).nan_to_num(0.0)


def _improved(
    improve: Improve, state: Deviations, point: Point, rows: Tensor, pulled: Pulled
) -> Pulled:
    """Better bounds for the rows that fail, which are few."""
    margins = point.margins()
    bounds = margins + pulled.at(state.ball.radius)
    # As many rows of every input as fail for the worst one, to fit into one tensor:
    # argsort has those that fail first. Not `<=`, for NaN fails, too.
    most = int((~(bounds > 0)).sum(1).max())
    worst = bounds.argsort(dim=1)[:, :most]
    chosen = rows.gather(1, worst[:, :, None].expand(-1, -1, rows.shape[2]))
    some = Pulled(pulled.constant.gather(1, worst), pulled.steepness.gather(1, worst))
    some = improve(chosen, some, margins.gather(1, worst))
    constant = pulled.constant.scatter(1, worst, some.constant)
    return Pulled(constant, pulled.steepness.scatter(1, worst, some.steepness))
