"""Losses against their formulas, by hand, by finite differences and by property."""

from __future__ import annotations

from functools import partial
from math import exp, inf, log, nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import (
    CONSTANTS,
    HARD,
    LABELS,
    LOGITS,
    ROBUST_LOSSES,
    Problem,
    every_robust_loss,
    problems,
)
from torch import Tensor
from torch.nn import functional as F

from helpers import randn
from lipcert import losses
from lipcert.losses import (
    crm,
    gloro,
    hard_radius,
    lmt,
    signed_radius,
    soft_radius,
    standard,
)


def parts(value: losses.Loss) -> tuple[Tensor, Tensor, Tensor]:
    return value.loss, value.base, value.robust


@pytest.mark.parametrize(
    ("r0", "active"), [(2.2, (0, 1)), (0.5, (1,)), (0.25, (1,)), (0.2, ())]
)
def test_crm_by_hand(r0: float, active: tuple[int, ...]) -> None:
    """Correct and within r0 by the hard radius; the mean is over all three samples."""
    soft = soft_radius(LOGITS, LABELS, CONSTANTS, 5.0)
    value = crm(LOGITS, LABELS, CONSTANTS, t=5.0, r0=r0, weight=30.0)
    cross_entropy = F.cross_entropy(LOGITS, LABELS)
    torch.testing.assert_close(value.base, cross_entropy)
    torch.testing.assert_close(
        value.robust.item(), -30.0 * sum(soft[i].item() for i in active) / 3
    )
    hard = crm(LOGITS, LABELS, CONSTANTS, t=5.0, r0=r0, weight=30.0, radius="hard")
    torch.testing.assert_close(hard.base, cross_entropy)
    torch.testing.assert_close(
        hard.robust.item(), 30.0 * sum(exp(-5 * HARD[i]) / 5 for i in active) / 3
    )


def test_crm_without_truncation() -> None:
    unlimited = crm(LOGITS, LABELS, CONSTANTS, t=5.0, r0=inf, weight=30.0)
    assert (
        unlimited.loss
        == crm(LOGITS, LABELS, CONSTANTS, t=5.0, r0=1e6, weight=30.0).loss
    )


def test_a_tie_counts_as_misclassified() -> None:
    value = crm(
        torch.zeros(1, 3),
        torch.tensor([0]),
        torch.ones(3, 3),
        t=5.0,
        r0=2.0,
        weight=1.0,
    )
    assert value.robust == 0


def test_bases_by_hand() -> None:
    z, y = LOGITS, LABELS
    margin = torch.stack([z[0, 0] - log(exp(2 * 1) + exp(0)) / 2]).mean()
    value = standard(z[:1], y[:1], base="soft-margin", margin_t=2.0)
    torch.testing.assert_close(value.loss, -margin)
    smoothed = 0.8 * F.cross_entropy(z, y) - 0.2 * z.log_softmax(1).mean()
    torch.testing.assert_close(
        standard(z, y, base="label-smoothing", smoothing=0.2).loss, smoothed
    )
    for base in losses.BASES:
        plain, robust = (
            standard(z, y, base=base),
            crm(z, y, CONSTANTS, t=5.0, r0=2.2, weight=1.0, base=base),
        )
        torch.testing.assert_close(plain.base, robust.base)
        assert plain.robust == 0
        assert plain.loss == plain.base


def test_signed_radius_by_hand() -> None:
    value = signed_radius(LOGITS[:2], LABELS[:2], CONSTANTS, t=5.0, r0=0.3)
    first = log(1 + exp(5 * (0.3 - 1.0)) + exp(5 * (0.3 - 3.0)))
    second = log(1 + exp(5 * (0.3 - 1.0)) + exp(5 * (0.3 - 0.25)))
    torch.testing.assert_close(value.loss.item(), (first + second) / 2)
    at_zero = signed_radius(LOGITS[:2], LABELS[:2], CONSTANTS, t=5.0, r0=0.0)
    torch.testing.assert_close(value.base, at_zero.loss)


@given(problems(), st.floats(0, 3))
def test_gloro_is_the_cross_entropy_with_a_bottom_class(
    problem: Problem, epsilon: float
) -> None:
    logits, labels, constants = problem
    bottom = []
    for z in logits:
        j = int(z.argmax())
        bottom.append(
            max(
                float(z[i] + epsilon * constants[j, i]) for i in range(len(z)) if i != j
            )
        )
    extended = torch.cat(
        [logits, torch.tensor(bottom, dtype=torch.float64)[:, None]], 1
    )
    torch.testing.assert_close(
        gloro(logits, labels, constants, epsilon=epsilon).loss,
        F.cross_entropy(extended, labels),
    )
    divergence = F.kl_div(
        extended.log_softmax(1)[:, :-1], logits.softmax(1), reduction="sum"
    ) / len(logits)
    trades = gloro(logits, labels, constants, epsilon=epsilon, weight=2.5)
    torch.testing.assert_close(trades.robust, 2.5 * divergence)


@given(problems(), st.floats(0, 3))
def test_lmt_adds_to_the_other_logits(problem: Problem, epsilon: float) -> None:
    logits, labels, constants = problem
    shifted = logits.clone()
    for b, y in enumerate(labels.tolist()):
        for i in range(logits.shape[1]):
            shifted[b, i] += epsilon * constants[y, i] if i != y else 0.0
    torch.testing.assert_close(
        lmt(logits, labels, constants, epsilon=epsilon).loss,
        F.cross_entropy(shifted, labels),
    )


@every_robust_loss
@given(problem=problems())
def test_parts_sum_up_and_the_diagonal_is_ignored(
    loss: partial, problem: Problem
) -> None:
    logits, labels, constants = problem
    value = loss(logits, labels, constants)
    torch.testing.assert_close(value.base + value.robust, value.loss)
    assert value.loss.shape == value.base.shape == value.robust.shape == ()
    for diagonal in (0.0, -1.0, nan):
        other = loss(logits, labels, constants.clone().fill_diagonal_(diagonal))
        assert parts(other) == parts(value)


@every_robust_loss
def test_permuting_classes_and_samples_changes_nothing(loss: partial) -> None:
    logits, labels, constants = (
        randn(6, 5),
        torch.tensor([0, 1, 2, 3, 4, 0]),
        randn(5, 5, seed=1).abs() + 0.1,
    )
    classes, samples = torch.randperm(5), torch.randperm(6)
    inverse = classes.argsort()
    permuted = loss(
        logits[samples][:, classes],
        inverse[labels[samples]],
        constants[classes][:, classes],
    ).loss
    torch.testing.assert_close(permuted, loss(logits, labels, constants).loss)


@every_robust_loss
@pytest.mark.parametrize("classes", [2, 4])
def test_gradients_by_finite_differences(loss: partial, classes: int) -> None:
    labels = torch.arange(7) % classes
    logits, constants = (
        randn(7, classes).requires_grad_(),
        (randn(classes, classes).abs() + 0.5).requires_grad_(),
    )
    assert torch.autograd.gradcheck(
        lambda z, c: loss(z, labels, c).loss, (logits, constants)
    )


@pytest.mark.parametrize("base", losses.BASES)
def test_gradients_of_standard_losses(base: str) -> None:
    labels = torch.arange(5) % 3
    assert torch.autograd.gradcheck(
        lambda z: standard(z, labels, base=base).loss, randn(5, 3).requires_grad_()
    )


@every_robust_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("small", [0.0, 1e-45, 1e-38, 1e-30, 2e-19, 1e-10])
@pytest.mark.parametrize("scale", [1.0, 1e25])
def test_tiny_constants_never_give_nan(
    loss: partial, dtype: torch.dtype, small: float, scale: float
) -> None:
    """Margins of every sign over constants that are zero, or too small to divide by, alone and among others."""
    logits = (
        torch.tensor([[1.0, 0.0, -1.0], [0.0, 1.0, 2.0], [1.0, 1.0, 1.0]], dtype=dtype)
        * scale
    )
    for constants in (
        torch.full((3, 3), small),
        torch.tensor([[0, small, 1], [small, 0, 1], [1, 1, 0]]),
    ):
        z, c = logits.clone().requires_grad_(), constants.to(dtype).requires_grad_()
        value = loss(z, torch.tensor([0, 1, 2]), c)
        value.loss.backward()
        assert all(bool(part.isfinite()) for part in parts(value))
        assert bool(z.grad.isfinite().all())
        assert bool(c.grad.isfinite().all())


@every_robust_loss
def test_a_single_class_has_nothing_to_fear(loss: partial) -> None:
    z, c = (
        torch.tensor([[2.0], [1.0]], requires_grad=True),
        torch.zeros(1, 1, requires_grad=True),
    )
    value = loss(z, torch.tensor([0, 0]), c)
    value.loss.backward()
    assert value.loss == 0
    assert bool((z.grad == 0).all())
    assert bool((hard_radius(z, torch.tensor([0, 0]), c) > 1e17).all())


@every_robust_loss
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("size", [1e3, 1e10])
def test_large_radii_do_not_overflow(loss: partial, sign: float, size: float) -> None:
    z = torch.tensor([[sign * size, 0.0, 0.0]], requires_grad=True)
    c = torch.full((3, 3), 1.0, requires_grad=True)
    value = loss(z, torch.tensor([0]), c)
    value.loss.backward()
    assert all(
        bool(part.isfinite()) for part in (*parts(value), z.grad.sum(), c.grad.sum())
    )
    torch.testing.assert_close(
        soft_radius(z, torch.tensor([0]), c, 1e6).item(), sign * size
    )


def test_half_precision_logits_are_computed_in_the_dtype_of_the_constants() -> None:
    value = crm(
        LOGITS.bfloat16(), LABELS.int(), CONSTANTS.float(), t=5.0, r0=2.2, weight=30.0
    )
    assert value.loss.dtype == torch.float32
    expected = crm(LOGITS, LABELS, CONSTANTS, t=5.0, r0=2.2, weight=30.0)
    torch.testing.assert_close(value.loss.double(), expected.loss, rtol=1e-5, atol=1e-5)
    assert hard_radius(LOGITS.half(), LABELS, CONSTANTS.half()).dtype == torch.float32


def test_nan_logits_are_not_hidden() -> None:
    for loss in ROBUST_LOSSES.values():
        assert bool(loss(LOGITS * nan, LABELS, CONSTANTS).loss.isnan())
    assert bool(hard_radius(LOGITS * nan, LABELS, CONSTANTS).isnan().all())


def test_training_by_crm_enlarges_the_radius() -> None:
    """A linear classifier of two Gaussians, whose constants are known exactly."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(64) % 2
    inputs = torch.randn(64, 2, generator=generator) + 3.0 * labels[:, None]
    weight = torch.randn(2, 2, generator=generator).mul(0.1).requires_grad_()
    bias = torch.zeros(2, requires_grad=True)
    optimiser = torch.optim.Adam([weight, bias], lr=0.05)
    radii = []
    for _ in range(150):
        logits = inputs @ weight.T + bias
        constants = (weight[:, None] - weight[None]).square().sum(2).add(1e-12).sqrt()
        optimiser.zero_grad()
        crm(logits, labels, constants, t=5.0, r0=4.0, weight=1.0).loss.backward()
        optimiser.step()
        radii.append(hard_radius(logits, labels, constants).mean().item())
    assert radii[-1] > 1.5 > radii[0]
