"""From deviations to radii: how far all differences of logits stay positive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lipcert.certificate.propagation import LARGEST
from lipcert.local.deviations import follow
from lipcert.local.joint_search import search_jointly
from lipcert.local.prepared import Prepared
from lipcert.local.pulling import Ball, Pulled, pull_back
from lipcert.local.sharpening import Effort, sharpen
from lipcert.local.state import Deviations
from lipcert.rounding import gamma

_ROUND_DOWN = 1 - 2.0**-45
_TINY_BALL = 1e-6
_FARTHEST = 1e6
_WITHIN_REACH = 0.5
"""Better slopes for the last rows have rarely gained more than this share of a margin."""
_WITHIN_FULL = 30.0
"""The same for rows where columns did not suffice: on training images, rows lost 27 to 36 times less."""
_WITHIN_SEARCH = 3.0
"""The same for slopes of all rows together."""
Improve = Callable[[Tensor, Pulled, Tensor], Pulled]
"""Better bounds of rows of the logits, from what is known of them and the margins that they should not use up."""


@dataclass(frozen=True)
class Point:
    """Inputs as executed: their values at all nodes, logits in float64 and predictions."""

    values: dict[int, Tensor]
    logits: Tensor
    prediction: Tensor

    def take(self, index: Tensor) -> Point:
        """Some of the inputs."""
        values = {v: value[index] for v, value in self.values.items()}
        return Point(values, self.logits[index], self.prediction[index])

    def margins(self) -> Tensor:
        """(B, K−1): the predicted logit minus each of the others, as computed."""
        chosen = self.logits.gather(1, self.prediction[:, None])
        return chosen - self.logits.gather(1, self.others())

    def others(self) -> Tensor:
        """(B, K−1): the classes that are not predicted."""
        count, classes = self.logits.shape
        every = torch.arange(classes, device=self.logits.device).expand(count, classes)
        # Each input leaves out one class, so that K − 1 are left of every row, in
        # order.
        return every[every != self.prediction[:, None]].reshape(count, classes - 1)


def proved_radius(
    prepared: Prepared, point: Point, ball: Ball, effort: Effort, patient: bool = False
) -> Tensor:
    """(B,): a radius up to that of the ball within which the prediction is proved; that of the ball if all of it is.

    Where columns can be followed, that is tried first, one input at a time; rows for
    all that is not settled then, if they are likely to help. Where columns did not
    suffice, rows take ten times as long: only if `patient`. What has failed is tried
    again with slopes that are searched for together, if asked for.
    """
    if prepared.columned:
        radii = []
        # Columns belong to one input (see `Zonotope`).
        for one, around in _one_by_one(point, ball):
            radius, close, full = _tried(prepared, one, around, effort, every_row=False)
            # Rows cost more, and rarely rescue a proof that has failed by far.
            if close or (patient and full):
                radius = torch.maximum(
                    radius, _tried(prepared, one, around, effort, every_row=True)[0]
                )
            radii.append(radius)
        proved = torch.cat(radii)
    else:
        proved = _tried(prepared, point, ball, effort, every_row=True)[0]
    if effort.inner_steps:
        for i, (one, around) in enumerate(_one_by_one(point, ball)):
            if proved[i] < around.radius[0]:
                proved[i] = torch.maximum(
                    proved[i], _searched(prepared, one, around, effort.inner_steps)[0]
                )
    return proved


def _one_by_one(point: Point, ball: Ball) -> Iterator[tuple[Point, Ball]]:
    for index in torch.split(
        torch.arange(len(point.prediction), device=ball.radius.device), 1
    ):
        yield point.take(index), Ball(ball.norm, ball.radius[index])


def _tried(
    prepared: Prepared, point: Point, ball: Ball, effort: Effort, every_row: bool
) -> tuple[Tensor, bool, bool]:
    """Proved radii; whether the proof of an input has failed narrowly, and whether it has for lack of columns."""
    state = follow(prepared, ball, dict(point.values), every_row)
    rows = margin_rows(point)
    pulled = _pulled(state, rows)
    radius = radius_of(state, point, pulled)
    left = _within_reach(radius, point, pulled, ball, _WITHIN_REACH)
    if effort.last_steps and len(left):
        fewer, some = state.take(left), point.take(left)
        last = prepared.exact.sites[-1].source
        improve = partial(sharpen, fewer, last, steps=effort.last_steps)
        # Lines of any slopes are valid, so that the better one of both radii holds.
        sharper = _improved(improve, fewer, some, rows[left], pulled.take(left))
        radius[left] = torch.maximum(radius[left], radius_of(fewer, some, sharper))
    narrowly = bool((radius[left] < ball.radius[left]).any())
    full = state.zonotope is not None and state.zonotope.full
    if full:
        full = len(_within_reach(radius, point, pulled, ball, _WITHIN_FULL)) > 0
    return radius, narrowly, full


def _searched(prepared: Prepared, point: Point, ball: Ball, steps: int) -> Tensor:
    """(1,): the radius of one input, with slopes for all rows together."""
    state = follow(prepared, ball, dict(point.values))
    rows = margin_rows(point)
    pulled = _pulled(state, rows)
    radius = radius_of(state, point, pulled)
    if len(_within_reach(radius, point, pulled, ball, _WITHIN_SEARCH)):
        better = _improved(
            partial(search_jointly, state, steps=steps), state, point, rows, pulled
        )
        radius = torch.maximum(radius, radius_of(state, point, better))
    return radius


@torch.no_grad()
def _pulled(state: Deviations, rows: Tensor) -> Pulled:
    """Rows of the logits at the input."""
    prepared = state.prepared
    constant = torch.zeros(rows.shape[:2], dtype=torch.float64, device=rows.device)
    return pull_back(
        prepared,
        state.walls,
        state.ball.norm,
        {prepared.exact.sites[-1].source: rows},
        constant,
    )


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
    state = follow(prepared, Ball(norm, tiny), dict(point.values), every_row=False)
    pulled = _pulled(state, margin_rows(point))
    ratios = (point.margins() + pulled.constant) / pulled.steepness.clamp(
        min=torch.finfo(torch.float64).tiny
    )
    return ratios.amin(1).clamp(min=0.0, max=_FARTHEST).nan_to_num(0.0)


def _within_reach(
    radius: Tensor, point: Point, pulled: Pulled, ball: Ball, share: float
) -> Tensor:
    """The inputs for which the proof has failed by less than a share of their margin, so that better slopes may do."""
    margins = point.margins()
    # 1 where nothing is lost, 0 where the margin is just used up, −1 where twice of it
    # is.
    worst = ((margins + pulled.at(ball.radius)) / margins.clamp(min=1e-300)).amin(1)
    close = (worst <= 0) & (worst > -share)
    return ((radius < ball.radius) & close).nonzero().flatten()


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


def margin_rows(point: Point) -> Tensor:
    """(B, K−1, K): unit rows of the predicted class minus those of the others."""
    # Of three classes, with the prediction 1: (−1, 1, 0) and (0, 1, −1).
    unit = torch.eye(
        point.logits.shape[1], dtype=torch.float64, device=point.logits.device
    )
    return unit[point.prediction][:, None] - unit[point.others()]


def radius_of(state: Deviations, point: Point, pulled: Pulled) -> Tensor:
    """The largest ρ with margin + constant − ρ·steepness > 0 for all classes; 0 where values may overflow."""
    margins = point.margins()
    radius = state.ball.radius
    # Margins are rounded differences, and so are their sums with constants.
    slack = margins + pulled.constant
    slack = slack - gamma(4) * (margins.abs() + pulled.constant.abs())
    whole = (margins + pulled.at(radius) - gamma(6) * margins.abs() > 0).all(1)
    # Lines over the ball hold in every smaller one: margin + constant − ρ·steepness
    # stays positive up to this ρ.
    ratios = torch.where(
        slack > 0,
        slack / pulled.steepness.clamp(min=torch.finfo(torch.float64).tiny),
        0.0,
    )
    shorter = torch.minimum(ratios.amin(1) * _ROUND_DOWN, radius)
    proved = torch.where(whole, radius, shorter.clamp(min=0.0))
    # Beyond that, something may overflow on the way, which no bound on rounding covers.
    in_range = (
        torch.stack(state.largest).amax(0) <= LARGEST[state.prepared.network.dtype]
    )
    return torch.where(in_range & torch.isfinite(proved), proved, 0.0)
