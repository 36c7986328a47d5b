"""Tensors and options that the losses refuse."""

from __future__ import annotations

from functools import partial
from math import inf, nan

import pytest
import torch
from problems import CONSTANTS, LABELS, LOGITS, ROBUST_LOSSES
from torch import Tensor

import lipcert
from lipcert.errors import (
    DataError,
    LipcertError,
    NonFiniteError,
    OptionError,
    ShapeError,
)
from lipcert.losses import (
    crm,
    gloro,
    hard_radius,
    lmt,
    signed_radius,
    soft_radius,
    standard,
)


@pytest.mark.parametrize(
    ("logits", "labels", "constants", "error", "message"),
    [
        (
            torch.zeros(3),
            torch.zeros(3).long(),
            torch.ones(3, 3),
            ShapeError,
            r"logits: expected .*float32 \(3,\)",
        ),
        (
            torch.zeros(0, 3),
            torch.zeros(0).long(),
            torch.ones(3, 3),
            ShapeError,
            "logits: .* not empty",
        ),
        (
            torch.zeros(1, 3).long(),
            torch.zeros(1).long(),
            torch.ones(3, 3),
            ShapeError,
            "logits: .*got int64",
        ),
        (
            LOGITS,
            torch.zeros(2).long(),
            CONSTANTS,
            ShapeError,
            r"labels: expected integers of shape \(3,\), got",
        ),
        (
            LOGITS,
            torch.zeros(3),
            CONSTANTS,
            ShapeError,
            "labels: expected integers .*got float32",
        ),
        (
            LOGITS,
            torch.ones(3).bool(),
            CONSTANTS,
            ShapeError,
            "labels: expected integers .*got bool",
        ),
        (
            LOGITS,
            torch.tensor([0, 3, 1]),
            CONSTANTS,
            DataError,
            "labels contain 3, expected 0 to 2",
        ),
        (
            LOGITS,
            torch.tensor([0, -1, 1]),
            CONSTANTS,
            DataError,
            "labels contain -1, expected 0 to 2",
        ),
        (
            LOGITS,
            LABELS,
            torch.tensor(2.0),
            ShapeError,
            r"constants: expected .*\(3, 3\), got .*Estimator.pairwise",
        ),
        (
            LOGITS,
            LABELS,
            torch.ones(3, 3).long(),
            ShapeError,
            "constants: expected floating-point .* got int64",
        ),
        (
            LOGITS,
            LABELS,
            CONSTANTS * nan,
            NonFiniteError,
            "constants contain NaN or infinity",
        ),
        (
            LOGITS,
            LABELS,
            CONSTANTS * inf,
            NonFiniteError,
            "constants contain NaN or infinity",
        ),
        (
            LOGITS,
            LABELS,
            -CONSTANTS,
            OptionError,
            "constants contain a negative number",
        ),
    ],
)
def test_bad_tensors(
    logits: Tensor,
    labels: Tensor,
    constants: Tensor,
    error: type[LipcertError],
    message: str,
) -> None:
    for loss in (*ROBUST_LOSSES.values(), hard_radius, partial(soft_radius, t=1.0)):
        with pytest.raises(error, match=message):
            loss(logits, labels, constants)


def test_standard_checks_labels() -> None:
    with pytest.raises(DataError, match="labels contain 3, expected 0 to 2"):
        standard(LOGITS, torch.tensor([0, 1, 3]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            partial(crm, t=0.0, r0=1.0, weight=1.0),
            "t is 0.0, expected a positive number",
        ),
        (
            partial(crm, t=inf, r0=1.0, weight=1.0),
            "t is inf, expected a positive number",
        ),
        (partial(crm, t=1.0, r0=-1.0, weight=1.0), "r0 is -1.0, expected 0 or more"),
        (partial(crm, t=1.0, r0=nan, weight=1.0), "r0 is nan, expected 0 or more"),
        (
            partial(crm, t=1.0, r0=1.0, weight=-2.0),
            "weight is -2.0, expected 0 or more",
        ),
        (
            partial(crm, t=1.0, r0=1.0, weight=1.0, radius="sft"),
            "radius is 'sft', .* did you mean 'soft'",
        ),
        (
            partial(crm, t=1.0, r0=1.0, weight=1.0, base="margin"),
            "base is 'margin', .* did you mean 'soft-margin'",
        ),
        (
            partial(
                crm, t=1.0, r0=1.0, weight=1.0, base="label-smoothing", smoothing=1.5
            ),
            "smoothing is 1.5, expected a number from 0 to 1",
        ),
        (
            partial(crm, t=1.0, r0=1.0, weight=1.0, base="soft-margin", margin_t=-1.0),
            "margin_t is -1.0, expected",
        ),
        (
            partial(signed_radius, t=-1.0, r0=1.0),
            "t is -1.0, expected a positive number",
        ),
        (partial(signed_radius, t=1.0, r0=inf), "r0 is inf, expected"),
        (partial(gloro, epsilon=-1.0), "epsilon is -1.0, expected 0 or more"),
        (partial(gloro, epsilon=1.0, weight=inf), "weight is inf, expected 0 or more"),
        (partial(lmt, epsilon=nan), "epsilon is nan, expected 0 or more"),
        (partial(soft_radius, t=0.0), "t is 0.0, expected a positive number"),
    ],
)
def test_bad_options(call: partial, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        call(LOGITS, LABELS, CONSTANTS)


def test_a_bound_is_no_tensor_of_constants():
    bound = lipcert.bound(torch.nn.Linear(4, 3).eval(), (4,))
    with pytest.raises(
        ShapeError,
        match=r"constants are Bound, expected a tensor; pass estimator\(\), or bound.pairwise",
    ):
        crm(torch.zeros(2, 3), torch.tensor([0, 1]), bound, t=1.0, r0=1.0, weight=1.0)
    with pytest.raises(ShapeError, match=r"labels are list, expected a tensor"):
        standard(torch.zeros(2, 3), [0, 1])
