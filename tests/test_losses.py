"""Losses against their formulas, by hand, by finite differences and by property."""

from __future__ import annotations

from functools import partial
from math import exp, inf, log, nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from lipcert import losses
from lipcert.errors import DataError, LipcertError, NonFiniteError, OptionError, ShapeError
from lipcert.losses import crm, gloro, hard_radius, lmt, signed_radius, soft_radius, standard

LOGITS = torch.tensor([[3.0, 1.0, 0.0], [0.0, 2.0, 1.0], [1.0, 0.0, 0.5]], dtype=torch.float64)
LABELS = torch.tensor([0, 1, 2])  # the third is misclassified
CONSTANTS = torch.tensor([[9.0, 2.0, 1.0], [2.0, 9.0, 4.0], [1.0, 4.0, 9.0]], dtype=torch.float64)
HARD = [1.0, 0.25, -0.5]

ROBUST_LOSSES = {
    "crm": partial(crm, t=5.0, r0=2.2, weight=30.0),
    "crm-hard": partial(crm, t=5.0, r0=2.2, weight=30.0, radius="hard"),
    "crm-margin": partial(crm, t=5.0, r0=2.2, weight=3.0, base="soft-margin"),
    "crm-smoothing": partial(crm, t=5.0, r0=2.2, weight=3.0, base="label-smoothing"),
    "signed-radius": partial(signed_radius, t=5.0, r0=0.3),
    "gloro": partial(gloro, epsilon=0.3),
    "trades": partial(gloro, epsilon=0.3, weight=4.0),
    "lmt": partial(lmt, epsilon=0.3),
}
every_robust_loss = pytest.mark.parametrize("loss", ROBUST_LOSSES.values(), ids=ROBUST_LOSSES.keys())


@st.composite
def problems(draw: st.DrawFn, scale: float = 5.0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, labels and constants of random size, float64; not symmetric, to tell rows from columns."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    size, classes = draw(st.integers(1, 8)), draw(st.integers(2, 12))
    logits = scale * torch.randn(size, classes, generator=generator, dtype=torch.float64)
    labels = torch.randint(classes, (size,), generator=generator)
    constants = torch.rand(classes, classes, generator=generator, dtype=torch.float64) + 0.05
    return logits, labels, constants


def parts(value: losses.Loss) -> tuple[Tensor, Tensor, Tensor]:
    return value.loss, value.base, value.robust


def test_radii_by_hand() -> None:
    torch.testing.assert_close(hard_radius(LOGITS, LABELS, CONSTANTS).tolist(), HARD)
    soft = [
        -log(exp(-5 * 1.0) + exp(-5 * 3.0)) / 5,
        -log(exp(-5 * 1.0) + exp(-5 * 0.25)) / 5,
        -log(exp(-5 * -0.5) + exp(-5 * 0.125)) / 5,
    ]
    torch.testing.assert_close(soft_radius(LOGITS, LABELS, CONSTANTS, 5.0).tolist(), soft)


@pytest.mark.parametrize(("r0", "active"), [(2.2, (0, 1)), (0.5, (1,)), (0.25, (1,)), (0.2, ())])
def test_crm_by_hand(r0: float, active: tuple[int, ...]) -> None:
    """Correct and within r0 by the hard radius; the mean is over all three samples."""
    soft = soft_radius(LOGITS, LABELS, CONSTANTS, 5.0)
    value = crm(LOGITS, LABELS, CONSTANTS, t=5.0, r0=r0, weight=30.0)
    cross_entropy = F.cross_entropy(LOGITS, LABELS)
    torch.testing.assert_close(value.base, cross_entropy)
    torch.testing.assert_close(value.robust.item(), -30.0 * sum(soft[i].item() for i in active) / 3)
    hard = crm(LOGITS, LABELS, CONSTANTS, t=5.0, r0=r0, weight=30.0, radius="hard")
    torch.testing.assert_close(hard.base, cross_entropy)
    torch.testing.assert_close(hard.robust.item(), 30.0 * sum(exp(-5 * HARD[i]) / 5 for i in active) / 3)


def test_a_tie_counts_as_misclassified() -> None:
    value = crm(torch.zeros(1, 3), torch.tensor([0]), torch.ones(3, 3), t=5.0, r0=2.0, weight=1.0)
    assert value.robust == 0


def test_bases_by_hand() -> None:
    z, y = LOGITS, LABELS
    margin = torch.stack([z[0, 0] - log(exp(2 * 1) + exp(0)) / 2]).mean()
    value = standard(z[:1], y[:1], base="soft-margin", margin_t=2.0)
    torch.testing.assert_close(value.loss, -margin)
    smoothed = 0.8 * F.cross_entropy(z, y) - 0.2 * z.log_softmax(1).mean()
    torch.testing.assert_close(standard(z, y, base="label-smoothing", smoothing=0.2).loss, smoothed)
    for base in losses.BASES:
        plain, robust = standard(z, y, base=base), crm(z, y, CONSTANTS, t=5.0, r0=2.2, weight=1.0, base=base)
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
def test_gloro_is_the_cross_entropy_with_a_bottom_class(problem: tuple[Tensor, Tensor, Tensor], epsilon: float) -> None:
    logits, labels, constants = problem
    bottom = []
    for z in logits:
        j = int(z.argmax())
        bottom.append(max(float(z[i] + epsilon * constants[j, i]) for i in range(len(z)) if i != j))
    extended = torch.cat([logits, torch.tensor(bottom, dtype=torch.float64)[:, None]], 1)
    torch.testing.assert_close(
        gloro(logits, labels, constants, epsilon=epsilon).loss, F.cross_entropy(extended, labels)
    )
    divergence = F.kl_div(extended.log_softmax(1)[:, :-1], logits.softmax(1), reduction="sum") / len(logits)
    trades = gloro(logits, labels, constants, epsilon=epsilon, weight=2.5)
    torch.testing.assert_close(trades.robust, 2.5 * divergence)


@given(problems(), st.floats(0, 3))
def test_lmt_adds_to_the_other_logits(problem: tuple[Tensor, Tensor, Tensor], epsilon: float) -> None:
    logits, labels, constants = problem
    shifted = logits.clone()
    for b, y in enumerate(labels.tolist()):
        for i in range(logits.shape[1]):
            shifted[b, i] += epsilon * constants[y, i] if i != y else 0.0
    torch.testing.assert_close(lmt(logits, labels, constants, epsilon=epsilon).loss, F.cross_entropy(shifted, labels))


@every_robust_loss
@given(problem=problems())
def test_parts_sum_up_and_the_diagonal_is_ignored(loss: partial, problem: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, labels, constants = problem
    value = loss(logits, labels, constants)
    torch.testing.assert_close(value.base + value.robust, value.loss)
    assert value.loss.shape == value.base.shape == value.robust.shape == ()
    for diagonal in (0.0, -1.0, nan):
        other = loss(logits, labels, constants.clone().fill_diagonal_(diagonal))
        assert parts(other) == parts(value)


@given(problems(), st.floats(0.01, 10))
def test_radii_by_definition(problem: tuple[Tensor, Tensor, Tensor], t: float) -> None:
    logits, labels, constants = (tensor.tolist() for tensor in problem)
    pairs = [
        [(z[y] - z[i]) / constants[y][i] for i in range(len(z)) if i != y] for z, y in zip(logits, labels, strict=True)
    ]
    torch.testing.assert_close(hard_radius(*problem).tolist(), [min(radii) for radii in pairs])
    soft = [-torch.tensor(radii, dtype=torch.float64).mul(-t).logsumexp(0).item() / t for radii in pairs]
    torch.testing.assert_close(soft_radius(*problem, t).tolist(), soft)


@given(problems(), st.floats(0.01, 100))
def test_soft_radius_is_close_below_the_hard_one(problem: tuple[Tensor, Tensor, Tensor], t: float) -> None:
    """proposition: soft certified radius."""
    hard, soft = hard_radius(*problem), soft_radius(*problem, t)
    assert bool((soft <= hard).all())
    gap = log(problem[0].shape[1] - 1) / t
    assert bool((hard <= soft + gap + 1e-9 * (1 + hard.abs() + gap)).all())


@given(problems())
def test_hard_radius_is_positive_only_where_the_label_is_predicted(problem: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, labels, _ = problem
    assert torch.equal(hard_radius(*problem) > 0, logits.argmax(1) == labels)


@given(problems(), st.floats(-50, 50), st.floats(0.01, 100))
def test_invariances_of_radii(problem: tuple[Tensor, Tensor, Tensor], shift: float, scale: float) -> None:
    logits, labels, constants = problem
    for radius in (hard_radius, partial(soft_radius, t=5.0)):
        expected = radius(logits, labels, constants)
        torch.testing.assert_close(radius(logits + shift, labels, constants), expected)
        torch.testing.assert_close(radius(scale * logits, labels, scale * constants), expected)
    torch.testing.assert_close(
        hard_radius(scale * logits, labels, constants), scale * hard_radius(logits, labels, constants)
    )
    signed = signed_radius(logits, labels, constants, t=5.0, r0=0.3).loss
    torch.testing.assert_close(signed_radius(scale * logits, labels, scale * constants, t=5.0, r0=0.3).loss, signed)


@every_robust_loss
def test_permuting_classes_and_samples_changes_nothing(loss: partial) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, classes = (
        torch.randn(6, 5, generator=generator, dtype=torch.float64),
        torch.randperm(5, generator=generator),
    )
    labels = torch.tensor([0, 1, 2, 3, 4, 0])
    constants = torch.rand(5, 5, generator=generator, dtype=torch.float64) + 0.1
    expected = loss(logits, labels, constants).loss
    inverse = classes.argsort()
    samples = torch.randperm(6, generator=generator)
    permuted = loss(logits[samples][:, classes], inverse[labels[samples]], constants[classes][:, classes]).loss
    torch.testing.assert_close(permuted, expected)


@every_robust_loss
@pytest.mark.parametrize("classes", [2, 4])
def test_gradients_by_finite_differences(loss: partial, classes: int) -> None:
    generator = torch.Generator().manual_seed(classes)
    logits = torch.randn(7, classes, generator=generator, dtype=torch.float64).requires_grad_()
    labels = torch.arange(7) % classes
    constants = (torch.rand(classes, classes, generator=generator, dtype=torch.float64) + 0.5).requires_grad_()
    assert torch.autograd.gradcheck(lambda z, c: loss(z, labels, c).loss, (logits, constants))


@pytest.mark.parametrize("base", losses.BASES)
def test_gradients_of_standard_losses(base: str) -> None:
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    labels = torch.arange(5) % 3
    assert torch.autograd.gradcheck(lambda z: standard(z, labels, base=base).loss, logits)


@every_robust_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("small", [0.0, 1e-45, 1e-38, 1e-30, 2e-19, 1e-10])
@pytest.mark.parametrize("scale", [1.0, 1e25])
def test_tiny_constants_never_give_nan(loss: partial, dtype: torch.dtype, small: float, scale: float) -> None:
    """Margins of every sign over constants that are zero, or too small to divide by, alone and among others."""
    logits = torch.tensor([[1.0, 0.0, -1.0], [0.0, 1.0, 2.0], [1.0, 1.0, 1.0]], dtype=dtype) * scale
    for constants in (torch.full((3, 3), small), torch.tensor([[0, small, 1], [small, 0, 1], [1, 1, 0]])):
        z, c = logits.clone().requires_grad_(), constants.to(dtype).requires_grad_()
        value = loss(z, torch.tensor([0, 1, 2]), c)
        value.loss.backward()
        assert all(bool(part.isfinite()) for part in parts(value))
        assert bool(z.grad.isfinite().all())
        assert bool(c.grad.isfinite().all())


def test_zero_constants_give_the_largest_radius_with_the_sign_of_the_margin() -> None:
    logits = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    labels = torch.zeros(3, dtype=torch.long)
    hard = hard_radius(logits, labels, torch.zeros(2, 2))
    assert hard[0] > 1e17
    assert hard[1] < -1e17
    assert hard[2] == 0
    torch.testing.assert_close(soft_radius(logits, labels, torch.zeros(2, 2), 5.0), hard)
    mixed = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 1.0], [1.0, 1.0, 0.0]])
    torch.testing.assert_close(hard_radius(LOGITS[:1], LABELS[:1], mixed).tolist(), [3.0])


@every_robust_loss
def test_a_single_class_has_nothing_to_fear(loss: partial) -> None:
    z, c = torch.tensor([[2.0], [1.0]], requires_grad=True), torch.zeros(1, 1, requires_grad=True)
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
    assert all(bool(part.isfinite()) for part in (*parts(value), z.grad.sum(), c.grad.sum()))
    torch.testing.assert_close(soft_radius(z, torch.tensor([0]), c, 1e6).item(), sign * size)


def test_half_precision_logits_are_computed_in_the_dtype_of_the_constants() -> None:
    value = crm(LOGITS.bfloat16(), LABELS.int(), CONSTANTS.float(), t=5.0, r0=2.2, weight=30.0)
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


@pytest.mark.parametrize(
    ("logits", "labels", "constants", "error", "message"),
    [
        (torch.zeros(3), torch.zeros(3).long(), torch.ones(3, 3), ShapeError, r"logits: expected .*float32 \(3,\)"),
        (torch.zeros(0, 3), torch.zeros(0).long(), torch.ones(3, 3), ShapeError, "logits: .* not empty"),
        (torch.zeros(1, 3).long(), torch.zeros(1).long(), torch.ones(3, 3), ShapeError, "logits: .*got int64"),
        (LOGITS, torch.zeros(2).long(), CONSTANTS, ShapeError, r"labels: expected integers of shape \(3,\), got"),
        (LOGITS, torch.zeros(3), CONSTANTS, ShapeError, "labels: expected integers .*got float32"),
        (LOGITS, torch.ones(3).bool(), CONSTANTS, ShapeError, "labels: expected integers .*got bool"),
        (LOGITS, torch.tensor([0, 3, 1]), CONSTANTS, DataError, "labels contain 3, expected 0 to 2"),
        (LOGITS, torch.tensor([0, -1, 1]), CONSTANTS, DataError, "labels contain -1, expected 0 to 2"),
        (LOGITS, LABELS, torch.tensor(2.0), ShapeError, r"constants: expected .*\(3, 3\), got .*Estimator.pairwise"),
        (LOGITS, LABELS, torch.ones(3, 3).long(), ShapeError, "constants: expected floating-point .* got int64"),
        (LOGITS, LABELS, CONSTANTS * nan, NonFiniteError, "constants contain NaN or infinity"),
        (LOGITS, LABELS, CONSTANTS * inf, NonFiniteError, "constants contain NaN or infinity"),
        (LOGITS, LABELS, -CONSTANTS, OptionError, "constants contain a negative number"),
    ],
)
def test_bad_tensors(
    logits: Tensor, labels: Tensor, constants: Tensor, error: type[LipcertError], message: str
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
        (partial(crm, t=0.0, r0=1.0, weight=1.0), "t is 0.0, expected a positive number"),
        (partial(crm, t=inf, r0=1.0, weight=1.0), "t is inf, expected a positive number"),
        (partial(crm, t=1.0, r0=-1.0, weight=1.0), "r0 is -1.0, expected 0 or more"),
        (partial(crm, t=1.0, r0=nan, weight=1.0), "r0 is nan, expected 0 or more"),
        (partial(crm, t=1.0, r0=1.0, weight=-2.0), "weight is -2.0, expected 0 or more"),
        (partial(crm, t=1.0, r0=1.0, weight=1.0, radius="sft"), "radius is 'sft', .* did you mean 'soft'"),
        (partial(crm, t=1.0, r0=1.0, weight=1.0, base="margin"), "base is 'margin', .* did you mean 'soft-margin'"),
        (
            partial(crm, t=1.0, r0=1.0, weight=1.0, base="label-smoothing", smoothing=1.5),
            "smoothing is 1.5, expected a number from 0 to 1",
        ),
        (partial(crm, t=1.0, r0=1.0, weight=1.0, base="soft-margin", margin_t=-1.0), "margin_t is -1.0, expected"),
        (partial(signed_radius, t=-1.0, r0=1.0), "t is -1.0, expected a positive number"),
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


def test_crm_without_truncation() -> None:
    unlimited = crm(LOGITS, LABELS, CONSTANTS, t=5.0, r0=inf, weight=30.0)
    assert unlimited.loss == crm(LOGITS, LABELS, CONSTANTS, t=5.0, r0=1e6, weight=30.0).loss
