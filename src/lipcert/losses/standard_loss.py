"""Training for accuracy only."""

from __future__ import annotations

from math import inf
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from lipcert.errors import OptionError, check_choice
from lipcert.losses.loss import (
    Loss,
    TrainingLoss,
    check_positive,
    checked,
    register_loss,
    true_class,
)
from lipcert.option_values import Positive

BASES = ("cross-entropy", "soft-margin", "label-smoothing")
Base = Literal["cross-entropy", "soft-margin", "label-smoothing"]
BASE_OPTIONS = {"base", "margin_t", "smoothing"}
"""The options of `standard`, which losses with a base have, too."""
Share = Annotated[float, Field(ge=0, le=1)]


@register_loss
class StandardLoss(TrainingLoss):
    """`standard`."""

    label: ClassVar[str] = "cross-entropy"
    robust: ClassVar[bool] = False

    type: Literal["standard"]
    base: Base = "cross-entropy"
    margin_t: Positive = 1.0
    smoothing: Share = 0.1

    def __call__(
        self, logits: Tensor, labels: Tensor, constants: Tensor | None = None
    ) -> Loss:
        return standard(logits, labels, **self.model_dump(include=BASE_OPTIONS))

    def first_term(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self(logits, labels).loss


def standard(
    logits: Tensor,
    labels: Tensor,
    *,
    base: str = "cross-entropy",
    margin_t: float = 1.0,
    smoothing: float = 0.1,
) -> Loss:
    """Training for accuracy only: mean of the cross-entropy, of its smoothed form or of the negative soft logit margin.

    "soft-margin" is −γ_t^soft (eq: soft logit margin) with t = `margin_t`;
    "label-smoothing" spreads `smoothing` over all classes.
    """
    logits, labels = checked(logits, labels)
    check_choice("base", base, BASES)
    if base == "cross-entropy":
        value = F.cross_entropy(logits, labels)
    elif base == "label-smoothing":
        if not 0 <= smoothing <= 1:
            raise OptionError(
                f"smoothing is {smoothing}, expected a number from 0 to 1"
            )
        value = F.cross_entropy(logits, labels, label_smoothing=smoothing)
    else:
        check_positive(margin_t=margin_t)
        value = _negative_soft_margin(logits, labels, margin_t)
    return Loss(value, value, torch.zeros_like(value))


def _negative_soft_margin(logits: Tensor, labels: Tensor, t: float) -> Tensor:
    if logits.shape[1] == 1:
        return 0.0 * logits.sum()  # no other class, no margin
    # −γ_t^soft = (1/t)·log Σ_{i≠y} exp(t·z_i) − z_y; exp(−∞) = 0 leaves the true class
    # out.
    others = (t * logits).masked_fill(true_class(logits, labels), -inf)
    true = logits.gather(1, labels[:, None])[:, 0]
    return (others.logsumexp(1) / t - true).mean()
