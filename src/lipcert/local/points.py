"""Inputs as executed, the rows of their logits, and what bounds of these rows prove."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lipcert.certificate.propagation import LARGEST
from lipcert.local.pulling import Pulled, pull_back
from lipcert.local.state import Deviations
from lipcert.rounding import gamma

_ROUND_DOWN = 1 - 2.0**-45


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


def margin_rows(point: Point) -> Tensor:
    """(B, K−1, K): unit rows of the predicted class minus those of the others."""
    # Of three classes, with the prediction 1: (−1, 1, 0) and (0, 1, −1).
    unit = torch.eye(
        point.logits.shape[1], dtype=torch.float64, device=point.logits.device
    )
    return unit[point.prediction][:, None] - unit[point.others()]


@torch.no_grad()
def pulled_rows(state: Deviations, rows: Tensor) -> Pulled:
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
