"""Attacks as the judge: close to known distances, and merciless with wrong certificates."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import lipcert
from helpers import randn
from lipcert import attacks
from lipcert.errors import CertificateViolation, OptionError, TrainingModeError
from lipcert.models import LoadedModel
from lipcert.progress import no_progress
from lipcert.runs import Task, finish_folder
from models import dense_chain

PIXELS = (-50.0, 50.0)


def linear_classifier(classes):
    """A float32 linear classifier, inputs, predictions and distances to the boundary."""
    model = nn.Linear(20, classes).eval().requires_grad_(False)
    model.weight.copy_(randn(classes, 20))
    x = randn(60, 20, seed=1).float()
    w = model.weight.double()
    logits = x.double() @ w.T + model.bias.double()
    y = logits.argmax(1)
    distances = (logits.gather(1, y[:, None]) - logits) / (
        w[y][:, None] - w[None]
    ).norm(dim=2)
    return model, x, y, distances.scatter(1, y[:, None], torch.inf).amin(1)


@pytest.fixture(scope="module")
def linear():
    return linear_classifier(4)


@pytest.mark.parametrize(("classes", "share"), [(2, 1.0), (4, 0.9)])
def test_ddn_lands_close_to_the_closed_form_distance_and_never_below(classes, share):
    """Of more than two classes it does not always take the nearest."""
    model, x, y, distance = linear_classifier(classes)
    found = attacks.minimum_norm(model, x, y, pixels=PIXELS)
    assert found.success.all()
    assert (found.distance >= distance * (1 - 1e-5)).all()
    assert (found.distance <= 1.05 * distance + 1e-3).double().mean() >= share
    assert (model(found.adversarial).argmax(1) != y).all()
    torch.testing.assert_close(
        found.distance, (found.adversarial.double() - x.double()).norm(dim=1)
    )


class InDoubles(nn.Module):
    """Computes in float64 whatever it is converted to."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x) * torch.ones(1, dtype=torch.float64)


class TooLarge(InDoubles):
    """Logits that float32 does not reach."""

    def forward(self, x):
        return self.model(x) * 1e60


def test_a_float64_model_is_attacked_by_a_float32_copy_and_judged_itself():
    model, x, y, distance = linear_classifier(2)
    seen = []
    double = nn.Sequential(model.double()).eval()
    double.register_forward_hook(lambda module, given, out: seen.append(out.dtype))
    found = attacks.minimum_norm(double, x.double(), y, pixels=PIXELS)
    assert found.adversarial.dtype == torch.float64
    assert seen.count(torch.float32) >= 100
    assert seen[-1] == torch.float64
    assert (found.distance <= 1.05 * distance + 1e-3).all()
    assert (found.distance >= distance * (1 - 1e-5)).all()


@pytest.mark.parametrize("wrapped", [InDoubles, TooLarge])
def test_a_model_that_float32_cannot_follow_is_attacked_as_it_is(wrapped):
    model, x, y, distance = linear_classifier(2)
    found = attacks.minimum_norm(
        wrapped(model.double()).eval(), x.double(), y, pixels=PIXELS
    )
    assert (found.distance <= 1.05 * distance + 1e-3).all()


@pytest.mark.parametrize("k", range(0, 60, 12))
def test_pgd_succeeds_beyond_the_distance_and_fails_within(linear, k):
    model, x, y, distance = linear
    one, label, far = x[k : k + 1], y[k : k + 1], float(distance[k])
    beyond = attacks.pgd(model, one, label, 1.2 * far, pixels=PIXELS)
    assert beyond.success.all()
    assert far * (1 - 1e-5) <= float(beyond.distance) <= 1.2 * far * (1 + 1e-5)
    within = attacks.pgd(model, one, label, 0.8 * far, pixels=PIXELS)
    assert not within.success.any()
    assert torch.equal(within.adversarial, one)
    assert within.distance.tolist() == [torch.inf]


def test_the_step_of_the_paper_reaches_as_far_as_its_steps_add_up(linear):
    model, x, y, distance = linear
    near = distance < 0.08
    assert near.any()
    found = attacks.pgd(model, x, y, 0.2, step="paper", steps=100, pixels=PIXELS)
    assert found.success[near].all()
    assert (
        found.distance[found.success] <= 100 * attacks.PAPER_STEP * (1 + 1e-4)
    ).all()
    assert not found.success[distance > 0.101].any()


def test_inputs_that_are_misclassified_are_successes_at_distance_zero(linear):
    model, x, y, _ = linear
    found = attacks.pgd(model, x, (y + 1) % 4, 0.5, steps=2, restarts=1, pixels=PIXELS)
    assert found.success.all()


def test_refusals(linear):
    model, x, y, _ = linear
    with pytest.raises(
        OptionError,
        match=r"step is 'papers', expected one of relative, paper; did you mean 'paper'",
    ):
        attacks.pgd(model, x, y, 0.5, step="papers")
    for wrong in (
        {"epsilon": 0.0},
        {"epsilon": 1.0, "steps": 0},
        {"epsilon": 1.0, "restarts": 0},
    ):
        with pytest.raises(
            OptionError, match="PGD needs epsilon > 0, steps ≥ 1 and restarts ≥ 1"
        ):
            attacks.pgd(model, x, y, **wrong)
    training = dense_chain(20, 5, 4).float().train()
    for attack in (
        lambda: attacks.pgd(training, x, y, 0.5),
        lambda: attacks.minimum_norm(training, x, y),
    ):
        with pytest.raises(
            TrainingModeError,
            match=r"in training mode; call model.eval\(\) before attacking it",
        ):
            attack()


def test_certificates_that_hold_pass(linear, tmp_path):
    model, x, y, _ = linear
    found = attacks.minimum_norm(model, x, y, pixels=PIXELS)
    attacks.check_certificates(x, lipcert.certify(model, x), found, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("factor", [1.2, 3.0])
def test_certificates_that_do_not_hold_are_an_error_with_the_input_saved(
    linear, tmp_path, factor
):
    model, x, y, _ = linear
    honest = lipcert.certify(model, x)
    wrong = replace(honest, radius=factor * honest.radius)
    found = attacks.minimum_norm(model, x, y, pixels=PIXELS)
    with pytest.raises(
        CertificateViolation,
        match=r"certificate of input (\d+) does not hold: .* inside the radius",
    ) as e:
        attacks.check_certificates(
            x, wrong, found, tmp_path, torch.arange(100, 100 + len(x))
        )
    k = int(str(e.value).split("input ")[1].split()[0]) - 100
    saved = load_file(tmp_path / "violation.safetensors")
    assert torch.equal(saved["input"], x[k])
    assert model(saved["adversarial"][None]).argmax(1) != saved["prediction"]
    assert (saved["adversarial"].double() - x[k].double()).norm() < saved["radius"]
    assert "violation.safetensors" in str(e.value)


def test_a_bound_that_is_too_small_is_found_out(tmp_path):
    """The constants of a nearly linear network are nearly tight: a tenth less contradicts the attack."""
    model = dense_chain(20, 10, 3, activation=lambda: nn.LeakyReLU(0.98)).float()
    x = randn(40, 20).float()
    bound = lipcert.bound(model, (20,))
    for factor in (1.0, 0.9, 0.3):
        scaled = replace(
            bound, tails=factor * bound.tails, between=factor * bound.between
        )
        certificates = lipcert.certify(model, x, scaled)
        found = attacks.minimum_norm(model, x, certificates.prediction, pixels=PIXELS)
        if factor == 1.0:
            attacks.check_certificates(x, certificates, found, tmp_path)
            continue
        with pytest.raises(CertificateViolation, match="does not hold"):
            attacks.check_certificates(x, certificates, found, tmp_path)


def train_on_mnist(dataset):
    """A small network with large certified radii, in seconds."""
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    estimator = lipcert.Estimator(model, (1, 28, 28), power_iterations=1)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(600):
        index = torch.randint(0, len(dataset.train), (128,), generator=generator)
        logits, labels = model(dataset.train.pixels(index)), dataset.train.labels[index]
        loss = lipcert.losses.crm(
            logits, labels, estimator(), t=5.0, r0=2.2, weight=10.0
        ).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return LoadedModel(model.eval(), (1, 28, 28), "mlp")


@pytest.mark.data
def test_cross_check_on_mnist(tmp_path):
    """Certified ≤ attacked ≤ clean accuracy; the same with half the constants is an error."""
    loaded = train_on_mnist(lipcert.data.load("mnist", download=False))

    task = Task(
        lipcert.data.load("mnist", download=False), [0.5, 1.0], inputs=300, attacked=300
    )

    def certify(folder):
        return finish_folder(loaded, task, folder, no_progress)

    summary = certify(tmp_path / "honest")
    assert summary.clean > 0.8
    for at in summary.at:
        assert 0 < at.certified <= at.attacked <= summary.clean
    bound = lipcert.bound(loaded.model, loaded.input_shape)
    replace(bound, tails=0.5 * bound.tails, between=0.5 * bound.between).save(
        tmp_path / "wrong" / "bound"
    )
    with pytest.raises(CertificateViolation, match="does not hold"):
        certify(tmp_path / "wrong")
    assert (tmp_path / "wrong" / "violation.safetensors").exists()
    assert not (tmp_path / "wrong" / "summary.json").exists()


@pytest.mark.parametrize("factor", [1e-4, 1e4])
def test_attacks_do_not_depend_on_the_scale_of_the_logits(factor):
    """A softmax of large logits has no gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 4)).eval()
    x = torch.rand(60, 20)
    classes = model(x).argmax(1)
    expected = attacks.pgd(model, x, classes, 0.5, steps=20, restarts=1).success
    nearest = attacks.minimum_norm(model, x, classes, steps=40).distance
    with torch.no_grad():
        model[2].weight *= factor
        model[2].bias *= factor
    found = attacks.pgd(model, x, classes, 0.5, steps=20, restarts=1).success
    assert 0 < int(expected.sum()) < 60
    assert int((found != expected).sum()) <= 2
    assert float(
        attacks.minimum_norm(model, x, classes, steps=40).distance.mean()
    ) < 1.05 * float(nearest.mean())
