"""Teachers: trained first, asked for probabilities, which the loss then expects labels to follow."""

import pytest
import torch
from lightning_fabric import Fabric
from runs import metrics, tiny, weights

import lipcert
from lipcert import data
from lipcert.errors import ConfigError, DataError, ShapeError
from lipcert.losses import signed_radius
from lipcert.training import TrainConfig
from lipcert.training.shared_batches import SharedBatches
from lipcert.training.teacher import Teacher, teacher_config

TEACHER = """
model = "mlp-256"
data = "digits"
epochs = 6
batch_size = 128
[loss]
type = "standard"
[schedule]
lr0 = 5e-3
lrf = 1e-3
"""
SIGNED = ("loss.type=signed-radius", "loss.t=5", "loss.r0=0.5")


@pytest.fixture
def taught(tmp_path):
    path = tmp_path / "teacher.toml"
    path.write_text(TEACHER)
    return tiny("warmup_epochs=0", *SIGNED, f"teacher={path}")


def problem(seed=0):
    torch.manual_seed(seed)
    logits = torch.randn(6, 4, dtype=torch.float64)
    constants = torch.rand(4, 4, dtype=torch.float64) + 0.5
    return logits, torch.tensor([0, 1, 2, 3, 0, 1]), constants


def test_certain_probabilities_are_labels():
    logits, labels, constants = problem()
    certain = torch.eye(4, dtype=torch.float64)[labels]
    by_labels = signed_radius(logits, labels, constants, t=3.0, r0=0.4)
    by_shares = signed_radius(logits, certain, constants, t=3.0, r0=0.4)
    for one, other in zip(
        vars(by_labels).values(), vars(by_shares).values(), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_the_loss_of_probabilities_is_the_mean_over_labels_drawn_from_them():
    logits, _, constants = problem()
    shares = torch.rand(6, 4, dtype=torch.float64)
    shares /= shares.sum(1, keepdim=True)
    expected = 0.0
    for b in range(6):
        for y in range(4):
            one = signed_radius(
                logits[b : b + 1], torch.tensor([y]), constants, t=3.0, r0=0.4
            )
            expected += shares[b, y] * one.loss / 6
    found = signed_radius(logits, shares, constants, t=3.0, r0=0.4)
    torch.testing.assert_close(found.loss, expected)
    assert torch.autograd.gradcheck(
        lambda z, c: signed_radius(z, shares, c, t=3.0, r0=0.4).loss,
        (logits.requires_grad_(), constants.requires_grad_()),
    )


@pytest.mark.parametrize(
    ("shares", "error", "match"),
    [
        (
            torch.full((6, 3), 1 / 3),
            ShapeError,
            r"expected the shape of the logits, \(6, 4\)",
        ),
        (torch.full((6, 4), 0.3), DataError, "sum to 1"),
        (torch.tensor([[1.5, -0.5, 0, 0]]).repeat(6, 1), DataError, "0 or more"),
    ],
)
def test_probabilities_that_are_none_are_refused(shares, error, match):
    logits, _, constants = problem()
    with pytest.raises(error, match=match):
        signed_radius(logits, shares, constants, t=3.0, r0=0.4)


def test_a_teacher_changes_what_is_learned_and_leaves_its_folder(taught, tmp_path):
    result = lipcert.train(taught, tmp_path / "run")
    alone = lipcert.train(taught.with_overrides(["teacher="]), tmp_path / "alone")
    ours, theirs = weights(result.folder), weights(alone.folder)
    assert any(not torch.equal(ours[name], theirs[name]) for name in ours)
    folder = tmp_path / "run" / "teacher"
    assert TrainConfig.from_toml(folder / "config.toml").model == "mlp-256"
    teacher = lipcert.load_model(str(folder)).model
    digits = data.load("digits")
    shares = Teacher(Fabric(accelerator="cpu"), teacher).probabilities(
        digits.train.pixels()
    )
    assert torch.allclose(shares.sum(1), torch.ones(len(shares)))
    assert (shares.argmax(1) == digits.train.labels).float().mean() > 0.9


def test_a_run_that_stops_behind_its_teacher_ends_as_if_it_had_not(
    taught, tmp_path, monkeypatch
):
    whole = lipcert.train(taught, tmp_path / "whole")
    seen = []

    def stop(what, fraction, figures=""):
        seen.append(what)
        if what == "training" and fraction > 0.4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lipcert.train(taught, tmp_path / "cut", progress=stop)
    assert "training the teacher" in seen
    again = lipcert.resume(tmp_path / "cut")
    assert metrics(again.folder) == metrics(whole.folder)
    for name, weight in weights(whole.folder).items():
        assert torch.equal(weight, weights(again.folder)[name])


def share_of(config, teacher=None):
    digits = data.load("digits")
    batches = SharedBatches(
        Fabric(accelerator="cpu"), config, digits, torch.contiguous_format, teacher
    )
    index = torch.arange(200)
    return digits.train, batches.share(index, epoch=1, step=2)


def test_a_teacher_is_asked_about_images_as_the_pupil_sees_them():
    model = lipcert.zoo.build("mlp-64", (1, 8, 8), 10, seed=0)
    teacher = Teacher(Fabric(accelerator="cpu"), model)
    config = tiny("augmentation.flip=true", "augmentation.mix=0.3", *SIGNED)
    train, share = share_of(config, teacher)
    assert not torch.equal(share.x, train.pixels(torch.arange(200)))
    with torch.no_grad():
        torch.testing.assert_close(share.targets, model(share.x).softmax(1))
    assert torch.equal(share.labels, train.labels[:200])


def test_mixed_images_have_the_classes_of_both_by_their_shares():
    config = tiny("augmentation.mix=0.3", *SIGNED)
    train, share = share_of(config)
    images, labels = train.pixels(torch.arange(200)), train.labels[:200]
    found = 0
    for b in range(200):
        own = share.targets[b, labels[b]]
        others = [c for c in range(10) if share.targets[b, c] > 0 and c != labels[b]]
        if not others:
            continue  # mixed with an image of its own class
        (other,) = others
        torch.testing.assert_close(own + share.targets[b, other], torch.tensor(1.0))
        assert 0.7 <= own < 1
        # What is left when the own part is taken away is an image of the other class.
        rest = (share.x[b] - own * images[b]) / (1 - own)
        distances = (images - rest).flatten(1).norm(dim=1)
        assert distances.min() < 1e-3 / (1 - own)
        assert labels[distances.argmin()] == other
        found += 1
    assert found > 100


def test_what_is_no_teacher_is_refused_before_a_folder_is_made(taught, tmp_path):
    with pytest.raises(ConfigError, match="does not take probabilities"):
        tiny("teacher=cifar10-teacher")
    with pytest.raises(
        ConfigError, match=r"augmentation.mix is 0.2.*or no augmentation.mix"
    ):
        tiny("augmentation.mix=0.2")
    with pytest.raises(ConfigError, match="no preset 'nobody'"):
        lipcert.train(taught.with_overrides(["teacher=nobody"]), tmp_path / "run")
    with pytest.raises(ConfigError, match="and no teacher of its own"):
        lipcert.train(taught.with_overrides(["teacher=digits"]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_teacher_has_the_data_and_the_seed_of_its_pupil(taught):
    teacher = teacher_config(taught.with_overrides(["seed=7", "validation=100"]))
    assert (teacher.data, teacher.seed, teacher.validation) == ("digits", 7, 100)
