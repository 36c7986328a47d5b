"""Hard and soft radii against their formulas, by hand and by property."""

from __future__ import annotations

from functools import partial
from math import exp, log

import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import CONSTANTS, HARD, LABELS, LOGITS, Problem, problems

from lipcert.losses import hard_radius, signed_radius, soft_radius


def test_radii_by_hand() -> None:
    torch.testing.assert_close(hard_radius(LOGITS, LABELS, CONSTANTS).tolist(), HARD)
    soft = [
        -log(exp(-5 * 1.0) + exp(-5 * 3.0)) / 5,
        -log(exp(-5 * 1.0) + exp(-5 * 0.25)) / 5,
        -log(exp(-5 * -0.5) + exp(-5 * 0.125)) / 5,
    ]
    torch.testing.assert_close(
        soft_radius(LOGITS, LABELS, CONSTANTS, 5.0).tolist(), soft
    )


@given(problems(), st.floats(0.01, 10))
def test_radii_by_definition(problem: Problem, t: float) -> None:
    logits, labels, constants = (tensor.tolist() for tensor in problem)
    pairs = [
        [(z[y] - z[i]) / constants[y][i] for i in range(len(z)) if i != y]
        for z, y in zip(logits, labels, strict=True)
    ]
    torch.testing.assert_close(
        hard_radius(*problem).tolist(), [min(radii) for radii in pairs]
    )
    soft = [
        -torch.tensor(radii, dtype=torch.float64).mul(-t).logsumexp(0).item() / t
        for radii in pairs
    ]
    torch.testing.assert_close(soft_radius(*problem, t).tolist(), soft)


@given(problems(), st.floats(0.01, 100))
def test_soft_radius_is_close_below_the_hard_one(problem: Problem, t: float) -> None:
    """proposition: soft certified radius."""
    hard, soft = hard_radius(*problem), soft_radius(*problem, t)
    assert bool((soft <= hard).all())
    gap = log(problem[0].shape[1] - 1) / t
    assert bool((hard <= soft + gap + 1e-9 * (1 + hard.abs() + gap)).all())


@given(problems())
def test_hard_radius_is_positive_only_where_the_label_is_predicted(
    problem: Problem,
) -> None:
    logits, labels, _ = problem
    assert torch.equal(hard_radius(*problem) > 0, logits.argmax(1) == labels)


@given(problems(), st.floats(-50, 50), st.floats(0.01, 100))
def test_invariances_of_radii(problem: Problem, shift: float, scale: float) -> None:
    logits, labels, constants = problem
    for radius in (hard_radius, partial(soft_radius, t=5.0)):
        expected = radius(logits, labels, constants)
        torch.testing.assert_close(radius(logits + shift, labels, constants), expected)
        torch.testing.assert_close(
            radius(scale * logits, labels, scale * constants), expected
        )
    torch.testing.assert_close(
        hard_radius(scale * logits, labels, constants),
        scale * hard_radius(logits, labels, constants),
    )
    signed = signed_radius(logits, labels, constants, t=5.0, r0=0.3).loss
    torch.testing.assert_close(
        signed_radius(scale * logits, labels, scale * constants, t=5.0, r0=0.3).loss,
        signed,
    )


def test_zero_constants_give_the_largest_radius_with_the_sign_of_the_margin() -> None:
    logits = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    labels = torch.zeros(3, dtype=torch.long)
    hard = hard_radius(logits, labels, torch.zeros(2, 2))
    assert hard[0] > 1e17
    assert hard[1] < -1e17
    assert hard[2] == 0
    torch.testing.assert_close(
        soft_radius(logits, labels, torch.zeros(2, 2), 5.0), hard
    )
    mixed = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 1.0], [1.0, 1.0, 0.0]])
    torch.testing.assert_close(
        hard_radius(LOGITS[:1], LABELS[:1], mixed).tolist(), [3.0]
    )
