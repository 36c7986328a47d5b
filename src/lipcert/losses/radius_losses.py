"""Losses of certified radii: CRM, the paper's, and the cross-entropy over signed radii."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import NonNegativeFloat
from torch import Tensor
from torch.nn import functional as F

from lipcert.errors import OptionError, check_choice
from lipcert.losses.accuracy import Base, Share, standard
from lipcert.losses.loss import (
    Epsilon,
    Loss,
    Positive,
    Radius,
    TrainingLoss,
    check_not_negative,
    check_positive,
    checked_with_constants,
    register_loss,
    true_class,
)
from lipcert.losses.radii import pair_radii, soft_minimum

RADII = ("soft", "hard")


@register_loss
class CrmLoss(TrainingLoss):
    """`crm`: (t, r0, λ = weight) of par:crmHyperparams."""

    label: ClassVar[str] = "CRM"

    type: Literal["crm"]
    t: Positive
    r0: Radius
    weight: NonNegativeFloat
    radius: Literal["soft", "hard"] = "soft"
    base: Base = "cross-entropy"
    margin_t: Positive = 1.0
    smoothing: Share = 0.1

    def __call__(self, logits: Tensor, labels: Tensor, constants: Tensor) -> Loss:
        return crm(logits, labels, constants, **self.model_dump(exclude={"type"}))

    def first_term(self, logits: Tensor, labels: Tensor) -> Tensor:
        return standard(logits, labels, base=self.base, margin_t=self.margin_t, smoothing=self.smoothing).loss


def crm(
    logits: Tensor,
    labels: Tensor,
    constants: Tensor,
    *,
    t: float,
    r0: float,
    weight: float,
    radius: str = "soft",
    base: str = "cross-entropy",
    margin_t: float = 1.0,
    smoothing: float = 0.1,
) -> Loss:
    """Certified radius maximisation (eq:regularize added h soft): base + weight · mean_b 1{z_y is the largest}·g.

    With radius "soft", g = −R_t^soft; with "hard", g = (1/t)·exp(−t·R). Both are 0 where the hard radius R exceeds r0
    (par:crmHyperparams). The mean is over the whole batch. `base`, `margin_t` and `smoothing` are those of `standard`.
    """
    check_choice("radius", radius, RADII)
    check_positive(t=t)
    check_not_negative(weight=weight)
    if not r0 >= 0:
        raise OptionError(f"r0 is {r0}, expected 0 or more, inf for no truncation")
    logits, labels, constants = checked_with_constants(logits, labels, constants)
    first = standard(logits, labels, base=base, margin_t=margin_t, smoothing=smoothing).loss
    radii = pair_radii(logits, labels, constants)
    hard = radii.amin(1)
    active = (hard > 0) & (hard <= r0)
    if radius == "soft":
        penalty = -soft_minimum(radii, t)
    else:
        penalty = torch.exp(-t * torch.where(active, hard, 0.0)) / t
    robust = weight * torch.where(active, penalty, 0.0).mean()
    return Loss(first + robust, first, robust)


@register_loss
class SignedRadiusLoss(TrainingLoss):
    """`signed_radius`."""

    label: ClassVar[str] = "signed radii"

    type: Literal["signed-radius"]
    t: Positive
    r0: Epsilon

    def __call__(self, logits: Tensor, labels: Tensor, constants: Tensor) -> Loss:
        return signed_radius(logits, labels, constants, t=self.t, r0=self.r0)


def signed_radius(logits: Tensor, labels: Tensor, constants: Tensor, *, t: float, r0: float) -> Loss:
    """Cross-entropy over the signed radii: mean_b log(1 + Σ_{i≠y} exp(t·(r0 − r_yi))); not in the paper.

    It is free of the scale of the logits. `base` is its value at r0 = 0, the soft version of being classified
    correctly; `robust` is what asking for the radius r0 adds.
    """
    check_positive(t=t)
    check_not_negative(r0=r0)
    logits, labels, constants = checked_with_constants(logits, labels, constants)
    radii = pair_radii(logits, labels, constants)
    true = true_class(logits, labels)
    loss = F.cross_entropy((t * (r0 - radii)).masked_fill(true, 0.0), labels)
    with torch.no_grad():
        base = F.cross_entropy((-t * radii).masked_fill(true, 0.0), labels)
    return Loss(loss, base, loss.detach() - base)
