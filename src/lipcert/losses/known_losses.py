"""The robust losses: CRM, signed radii, GloRo and Lipschitz-margin training (LMT)."""

from __future__ import annotations

from math import inf
from typing import ClassVar, Literal

import torch
from pydantic import NonNegativeFloat
from torch import Tensor
from torch.nn import functional as F

from lipcert.errors import OptionError, check_choice
from lipcert.losses.loss import (
    Loss,
    TrainingLoss,
    check_not_negative,
    check_positive,
    check_probabilities,
    checked_with_constants,
    register_loss,
    true_class,
)
from lipcert.losses.radii import pair_radii, soft_minimum
from lipcert.losses.standard_loss import BASE_OPTIONS, Base, Share, standard
from lipcert.option_values import Epsilon, Positive, Radius

RADII = ("soft", "hard")


@register_loss
class CrmLoss(TrainingLoss):
    """`crm`: (t, r0, λ = weight) of par:crmHyperparams."""

    label: ClassVar[str] = "CRM"
    lengths: ClassVar[tuple[str, ...]] = ("r0",)
    rates: ClassVar[tuple[str, ...]] = ("t", "weight")

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
        options = self.model_dump(include=BASE_OPTIONS)
        return standard(logits, labels, **options).loss


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

    With radius "soft", g = −R_t^soft; with "hard", g = (1/t)·exp(−t·R). Both are 0
    where the hard radius R exceeds r0 (par:crmHyperparams). The mean is over the whole
    batch. `base`, `margin_t` and `smoothing` are those of `standard`.
    """
    check_choice("radius", radius, RADII)
    check_positive(t=t)
    check_not_negative(weight=weight)
    if not r0 >= 0:
        raise OptionError(f"r0 is {r0}, expected 0 or more, inf for no truncation")
    logits, labels, constants = checked_with_constants(logits, labels, constants)
    plain = standard(logits, labels, base=base, margin_t=margin_t, smoothing=smoothing)
    radii = pair_radii(logits, labels, constants)
    hard = radii.amin(1)
    # 1{z_y is the largest} is hard > 0: radii of wrong predictions are negative, and
    # left to the first term.
    active = (hard > 0) & (hard <= r0)
    if radius == "soft":
        penalty = -soft_minimum(radii, t)
    else:
        # `where` before exp: what overflows has a NaN gradient even if its value is not
        # used afterwards.
        penalty = torch.exp(-t * torch.where(active, hard, 0.0)) / t
    robust = weight * torch.where(active, penalty, 0.0).mean()
    return Loss(plain.loss + robust, plain.loss, robust)


@register_loss
class SignedRadiusLoss(TrainingLoss):
    """`signed_radius`."""

    label: ClassVar[str] = "signed radii"
    probable: ClassVar[bool] = True
    lengths: ClassVar[tuple[str, ...]] = ("r0",)
    rates: ClassVar[tuple[str, ...]] = ("t",)

    type: Literal["signed-radius"]
    t: Positive
    r0: Epsilon

    def __call__(self, logits: Tensor, labels: Tensor, constants: Tensor) -> Loss:
        return signed_radius(logits, labels, constants, t=self.t, r0=self.r0)


def signed_radius(
    logits: Tensor, labels: Tensor, constants: Tensor, *, t: float, r0: float
) -> Loss:
    """Cross-entropy over the signed radii: mean_b log(1 + Σ_{i≠y} exp(t·(r0 − r_yi))); not in the paper.

    It is free of the scale of the logits. `base` is its value at r0 = 0, the soft
    version of being classified correctly; `robust` is what asking for the radius r0
    adds. Labels may be probabilities (B, K), of a teacher say: the loss is what is expected
    of labels that are drawn from them.
    """
    check_positive(t=t)
    check_not_negative(r0=r0)
    if labels.ndim == 2:
        return _expected_signed_radius(logits, labels, constants, t, r0)
    logits, labels, constants = checked_with_constants(logits, labels, constants)
    loss, base = _signed_cross_entropy(logits, labels, constants, t, r0)
    return Loss(loss.mean(), base.mean(), loss.mean().detach() - base.mean())


def _expected_signed_radius(
    logits: Tensor, probabilities: Tensor, constants: Tensor, t: float, r0: float
) -> Loss:
    """mean_b Σ_y p_by·(the loss of input b with the label y)."""
    check_probabilities(probabilities, logits)
    loss = base = torch.zeros((), dtype=torch.float32, device=logits.device)
    for y in range(logits.shape[1]):
        labels = torch.full((len(logits),), y, device=logits.device)
        checked_ones = checked_with_constants(logits, labels, constants)
        of_label, base_of_label = _signed_cross_entropy(*checked_ones, t, r0)
        loss = loss + (probabilities[:, y] * of_label).mean()
        base = base + (probabilities[:, y] * base_of_label).mean()
    return Loss(loss, base, loss.detach() - base)


def _signed_cross_entropy(
    logits: Tensor, labels: Tensor, constants: Tensor, t: float, r0: float
) -> tuple[Tensor, Tensor]:
    """log(1 + Σ_{i≠y} exp(t·(r0 − r_yi))) of every input, and the same at r0 = 0 without a gradient; (B,) each."""
    radii = pair_radii(logits, labels, constants)
    true = true_class(logits, labels)
    # With logits t·(r0 − r_yi) and 0 for y, cross-entropy is log(1 + Σ_{i≠y} exp(t·(r0
    # − r_yi))).
    asked = (t * (r0 - radii)).masked_fill(true, 0.0)
    loss = F.cross_entropy(asked, labels, reduction="none")
    with torch.no_grad():
        unasked = (-t * radii).masked_fill(true, 0.0)
        base = F.cross_entropy(unasked, labels, reduction="none")
    return loss, base


@register_loss
class GloroLoss(TrainingLoss):
    """`gloro`."""

    label: ClassVar[str] = "GloRo"
    lengths: ClassVar[tuple[str, ...]] = ("epsilon",)

    type: Literal["gloro"]
    epsilon: Epsilon
    weight: NonNegativeFloat = 1.0

    def __call__(self, logits: Tensor, labels: Tensor, constants: Tensor) -> Loss:
        return gloro(
            logits, labels, constants, epsilon=self.epsilon, weight=self.weight
        )


def gloro(
    logits: Tensor,
    labels: Tensor,
    constants: Tensor,
    *,
    epsilon: float,
    weight: float = 1.0,
) -> Loss:
    """GloRo (Leino et al. 2021): a class ⊥ with the logit z_⊥ = max_{i≠j} z_i + ε·L_ji is added, j the predicted class.

    Cross-entropy over the K + 1 logits equals CE(z, y) + log(1 + exp(z_⊥ − lse(z))),
    and the second term equals KL(softmax(z) ‖ softmax(z, z_⊥)), the term of their
    TRADES loss. So weight 1 is their cross-entropy and any other weight is their TRADES
    loss with that λ.
    """
    check_not_negative(epsilon=epsilon, weight=weight)
    logits, labels, constants = checked_with_constants(logits, labels, constants)
    predicted = logits.argmax(1)
    rivals = logits + epsilon * constants[predicted]
    bottom = rivals.masked_fill(true_class(logits, predicted), -inf).amax(1)
    base = F.cross_entropy(logits, labels)
    # log(1 + exp(z_⊥ − lse(z))) without overflow; z_⊥ = −∞ if there is no other class
    # gives 0.
    robust = weight * F.softplus(bottom - logits.logsumexp(1)).mean()
    return Loss(base + robust, base, robust)


@register_loss
class LmtLoss(TrainingLoss):
    """`lmt`."""

    label: ClassVar[str] = "LMT"
    lengths: ClassVar[tuple[str, ...]] = ("epsilon",)

    type: Literal["lmt"]
    epsilon: Epsilon

    def __call__(self, logits: Tensor, labels: Tensor, constants: Tensor) -> Loss:
        return lmt(logits, labels, constants, epsilon=self.epsilon)


def lmt(logits: Tensor, labels: Tensor, constants: Tensor, *, epsilon: float) -> Loss:
    """Lipschitz-margin training (Tsuzuku et al. 2018): cross-entropy after adding ε·L_yi to every other logit z_i.

    `base` is the cross-entropy of the logits themselves and `robust` what the addition
    costs.
    """
    check_not_negative(epsilon=epsilon)
    logits, labels, constants = checked_with_constants(logits, labels, constants)
    added = (epsilon * constants[labels]).masked_fill(true_class(logits, labels), 0.0)
    loss = F.cross_entropy(logits + added, labels)
    with torch.no_grad():
        base = F.cross_entropy(logits, labels)
    return Loss(loss, base, loss.detach() - base)
