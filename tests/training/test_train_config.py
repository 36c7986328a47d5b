"""Configurations: presets, files, overrides, and errors that name the key and the nearest valid one."""

from types import SimpleNamespace

import pytest
import torch
from runs import tiny
from torch import nn

from lipcert.data import load
from lipcert.errors import ConfigError
from lipcert.models import zoo
from lipcert.training import TrainConfig, presets
from lipcert.training.objective import Prepared, build_estimators, build_model

PAPER = {
    # preset: (t, r0, λ), (lr_0, lr_f, lr_decay), batch size, epochs, power iterations, warm-up, (d, t), ε, target
    "mnist-4c3f": (
        (5, 2.2, 30),
        (1e-3, 1e-8, 200),
        512,
        500,
        10,
        1,
        (0, 0),
        1.58,
        "pairwise",
    ),
    "cifar10-6c2f": (
        (5, 0.2, 15),
        (1e-3, 1e-6, 200),
        512,
        400,
        5,
        10,
        (5, 0.1),
        36 / 255,
        "pairwise",
    ),
    "tiny-imagenet-8c2f": (
        (12, 0.2, 150),
        (1e-4, 1e-6, 100),
        256,
        300,
        5,
        10,
        (20, 0.2),
        36 / 255,
        "last-layer",
    ),
}


@pytest.mark.parametrize("name", PAPER)
def test_presets_have_the_values_of_the_paper(name):
    config = TrainConfig.preset(name)
    loss, schedule, moved = config.loss, config.schedule, config.augmentation
    found = (
        (loss.t, loss.r0, loss.weight), (schedule.lr0, schedule.lrf, schedule.decay_epoch), config.batch_size,
        config.epochs, config.estimator.power_iterations, config.warmup_epochs, (moved.degrees, moved.translate),
        config.epsilons[0], config.estimator.target,
    )  # fmt: skip
    assert found == PAPER[name]
    assert (config.optimizer.beta1, config.optimizer.beta2, config.optimizer.eps) == (
        0.9,
        0.999,
        1e-7,
    )
    assert not moved.flip


def test_the_authors_units_are_twice_the_pixels():
    """Scaling inputs by 2 doubles radii: (t, r0, λ, ε) become (2t, r0/2, 2λ, ε/2) in pixels for the same loss."""
    pixels, authors = (
        TrainConfig.preset("cifar10-6c2f"),
        TrainConfig.preset("cifar10-6c2f-authors-units"),
    )
    assert authors.input_range == (-1, 1)
    assert authors.epsilons[0] == pytest.approx(pixels.epsilons[0] / 2)
    assert (authors.loss.t, authors.loss.r0, authors.loss.weight) == (
        2 * pixels.loss.t, pixels.loss.r0 / 2, 2 * pixels.loss.weight,
    )  # fmt: skip
    assert "18/255 in pixels" in authors.note


@pytest.mark.parametrize("name", presets())
def test_every_preset_builds_its_model_and_estimators_and_survives_a_file(
    name, tmp_path
):
    config = TrainConfig.preset(name)
    assert config.name == name
    architecture = zoo.ZOO[config.model]
    dataset = SimpleNamespace(
        input_shape=architecture.input_shape, classes=architecture.classes
    )
    assert set(build_estimators(config, Prepared.of(config, dataset))) == {
        "estimator",
        "naive",
        "liplt",
    }
    (tmp_path / "config.toml").write_text(config.to_toml(), encoding="utf-8")
    assert TrainConfig.from_toml(tmp_path / "config.toml") == config


def test_overrides():
    config = tiny(
        "epochs=5",
        "loss.t=4",
        "epsilons=['36/255', 1]",
        "augmentation.flip=true",
        "model=mlp-256",
    )
    assert (config.epochs, config.loss.t, config.augmentation.flip, config.model) == (
        5,
        4.0,
        True,
        "mlp-256",
    )
    assert config.epsilons == (36 / 255, 1.0)
    other = config.with_overrides(["loss.epsilon=1/2", "loss.type=gloro"])
    assert (other.loss.type, other.loss.epsilon, other.loss.weight) == (
        "gloro",
        0.5,
        1.0,
    )
    assert config.with_overrides([]) == config
    assert tiny("loss.r0=inf").with_overrides(["seed=1"]).loss.r0 == float("inf")


def test_a_single_override_needs_no_list():
    assert tiny().with_overrides("epochs=7").epochs == 7


@pytest.mark.parametrize(
    ("text", "epsilons"),
    [
        ("0.5", (0.5,)),
        ("36/255", (36 / 255,)),
        ("0.5, 1/4", (0.5, 0.25)),
        ("[0.5, 0.25, 0.5]", (0.5, 0.25)),
    ],
)
def test_epsilons_may_be_a_single_number_and_repeats_are_dropped(text, epsilons):
    assert tiny(f"epsilons={text}").epsilons == epsilons


def test_the_note_is_left_out_with_other_data_or_another_model():
    digits = TrainConfig.preset("digits")
    assert digits.with_overrides(["model=2C2F", "seed=1"]).note == digits.note != ""
    assert digits.with_overrides(["data=mnist"]).note == ""
    assert digits.with_overrides(["model=mlp-64"]).note == ""
    assert digits.with_overrides(["model=mlp-64", "note=mine"]).note == "mine"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "epoch=5",
            r"override: unknown key 'epoch'; did you mean 'epochs'\? Valid keys: name, note, model",
        ),
        (
            "loss.wieght=4",
            r"unknown key 'loss.wieght'; did you mean 'weight'\? Valid keys of loss: type, t, r0",
        ),
        ("schedule.lr=1", r"unknown key 'schedule.lr'; did you mean 'lr.'\?"),
        ("lss.t=4", r"unknown key 'lss'; did you mean 'loss'\?"),
        (
            "loss.type=crn",
            r"loss.type is 'crn', expected one of standard, crm, .*; did you mean 'crm'\?",
        ),
        ("loss.type=lmt", r"the key 'loss.epsilon' is missing"),
        (
            "loss.radius=sft",
            r"loss.radius is 'sft', expected 'soft' or 'hard'; did you mean 'soft'\?",
        ),
        ("model=4C3G", r"model is '4C3G', expected one of .*; did you mean '4C3F'\?"),
        (
            "estimator.method=lipl",
            r"estimator.method is 'lipl', expected one of .*; did you mean 'liplt'\?",
        ),
        ("epochs=many", r"epochs is 'many', expected a valid integer"),
        ("epochs=0", r"epochs is 0, expected greater than 0"),
        ("epochs=1", r"schedule.decay_epoch is 1, expected less than epochs, 1"),
        ("warmup_epochs=3", r"warmup_epochs is 3, expected less than epochs, 3"),
        ("loss.t=nan", r"loss.t is nan, expected"),
        ("epsilons=[0.1, -2]", r"epsilons.1 is -2, expected greater than 0"),
        ("epsilons=['1/0']", r"epsilons.0 is '1/0', expected a number or a fraction"),
        (
            "input_range=[1, 0]",
            r"input_range is \[1.0, 0.0\], expected a smaller and a larger number",
        ),
        ("epochs.x=2", r"epochs.x does not exist, because epochs is a single value"),
        ("epochs", r"override 'epochs': expected key=value, such as loss.t=4"),
        ("name=a/b", r"name is 'a/b', expected"),
    ],
)
def test_errors_of_overrides(override, message):
    with pytest.raises(ConfigError, match=message):
        tiny(override)


def test_errors_of_presets_and_files(tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"no preset 'mnist-4c3', expected one of .*; did you mean 'mnist-4c3f'\?",
    ):
        TrainConfig.preset("mnist-4c3")
    with pytest.raises(ConfigError, match=r"absent.toml cannot be read"):
        TrainConfig.from_toml(tmp_path / "absent.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("epochs = = 5")
    with pytest.raises(ConfigError, match=r"broken.toml is not valid TOML"):
        TrainConfig.from_toml(broken)
    broken.write_text("epochs = 5")
    with pytest.raises(
        ConfigError,
        match=r"broken.toml: the key 'model' is missing; the key 'data' is missing",
    ):
        TrainConfig.from_toml(broken)


def test_initial_weights_depend_on_the_seed_only():
    first, second, other = (
        Prepared.of(
            tiny("model=2C2F", f"seed={seed}"), load("digits")
        ).model.state_dict()
        for seed in (1, 1, 2)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["0.weight"], other["0.weight"])
    assert first["2.weight"].is_contiguous(memory_format=torch.channels_last)


def test_orthogonal_initialisation():
    model = build_model(tiny("init=orthogonal"), (1, 8, 8), 10)
    for layer in (m for m in model.modules() if isinstance(m, nn.Linear)):
        values = torch.linalg.svdvals(layer.weight)
        assert torch.allclose(values, torch.ones_like(values), atol=1e-5)
        assert not layer.bias.any()
