"""Losses that add ε times the constants to logits: GloRo and Lipschitz-margin training (LMT)."""

from __future__ import annotations

from math import inf
from typing import ClassVar, Literal

import torch
from pydantic import NonNegativeFloat
from torch import Tensor
from torch.nn import functional as F

from lipcert.losses.loss import (
    Epsilon,
    Loss,
    TrainingLoss,
    check_not_negative,
    checked_with_constants,
    register_loss,
    true_class,
)


@register_loss
class GloroLoss(TrainingLoss):
    """`gloro`."""

    label: ClassVar[str] = "GloRo"

    type: Literal["gloro"]
    epsilon: Epsilon
    weight: NonNegativeFloat = 1.0

    def __call__(self, logits: Tensor, labels: Tensor, constants: Tensor) -> Loss:
        return gloro(logits, labels, constants, epsilon=self.epsilon, weight=self.weight)


def gloro(logits: Tensor, labels: Tensor, constants: Tensor, *, epsilon: float, weight: float = 1.0) -> Loss:
    """GloRo (Leino et al. 2021): a class ⊥ with the logit z_⊥ = max_{i≠j} z_i + ε·L_ji is added, j the predicted class.

    Cross-entropy over the K + 1 logits equals CE(z, y) + log(1 + exp(z_⊥ − lse(z))), and the second term equals
    KL(softmax(z) ‖ softmax(z, z_⊥)), the term of their TRADES loss. So weight 1 is their cross-entropy and any
    other weight is their TRADES loss with that λ.
    """
    check_not_negative(epsilon=epsilon, weight=weight)
    logits, labels, constants = checked_with_constants(logits, labels, constants)
    predicted = logits.argmax(1)
    rivals = logits + epsilon * constants[predicted]
    bottom = rivals.masked_fill(true_class(logits, predicted), -inf).amax(1)
    base = F.cross_entropy(logits, labels)
    robust = weight * F.softplus(bottom - logits.logsumexp(1)).mean()
    return Loss(base + robust, base, robust)


@register_loss
class LmtLoss(TrainingLoss):
    """`lmt`."""

    label: ClassVar[str] = "LMT"

    type: Literal["lmt"]
    epsilon: Epsilon

    def __call__(self, logits: Tensor, labels: Tensor, constants: Tensor) -> Loss:
        return lmt(logits, labels, constants, epsilon=self.epsilon)


def lmt(logits: Tensor, labels: Tensor, constants: Tensor, *, epsilon: float) -> Loss:
    """Lipschitz-margin training (Tsuzuku et al. 2018): cross-entropy after adding ε·L_yi to every other logit z_i.

    `base` is the cross-entropy of the logits themselves and `robust` what the addition costs.
    """
    check_not_negative(epsilon=epsilon)
    logits, labels, constants = checked_with_constants(logits, labels, constants)
    added = (epsilon * constants[labels]).masked_fill(true_class(logits, labels), 0.0)
    loss = F.cross_entropy(logits + added, labels)
    with torch.no_grad():
        base = F.cross_entropy(logits, labels)
    return Loss(loss, base, loss.detach() - base)
