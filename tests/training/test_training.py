"""Runs: what they reach, what they leave, how they fail."""

import json
import shutil
import sys

import pytest
import torch
from runs import metrics, tiny, weights
from safetensors.torch import load_file
from torch import nn

import lipcert
from lipcert import data
from lipcert.errors import (
    ConfigError,
    DivergenceError,
    LipcertError,
    OptionError,
    ResumeError,
)
from lipcert.losses import Loss
from lipcert.models import load_model
from lipcert.resources import bfloat16_works
from lipcert.training import launching, loop, resume
from lipcert.training.checkpoint import read_checkpoint
from lipcert.training.loop import Training
from lipcert.training.muon import KernelMuon
from lipcert.training.objective import Prepared, objective
from lipcert.training.optimizers import build_optimizers


def test_crm_raises_certified_accuracy_above_the_standard_twin(tmp_path):
    config = tiny(
        "epochs=8",
        "schedule.decay_epoch=4",
        "batch_size=64",
        "compare_standard=true",
        "epsilons=[0.5]",
    )
    result = lipcert.train(config, tmp_path / "run")
    assert result.standard is not None
    assert result.standard.folder == tmp_path / "run" / "standard"
    (robust,), (standard,) = result.summary.at, result.standard.summary.at
    assert robust.certified > standard.certified + 0.2
    assert result.summary.clean > 0.8
    assert result.standard.summary.clean > 0.9


def test_a_run_leaves_everything_to_repeat_and_judge_it(finished):
    result, seen = finished
    folder = result.folder
    assert {path.name for path in folder.iterdir()} >= {
        "config.toml", "environment.json", "metrics.jsonl", "checkpoint.safetensors", "model.safetensors",
        "certificates.csv", "summary.json",
    }  # fmt: skip
    assert lipcert.TrainConfig.from_toml(folder / "config.toml") == tiny()
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["data"]["checksum"] == data.load("digits").checksum
    assert environment["versions"]["torch"] == torch.__version__
    assert [record["epoch"] for record in result.metrics] == [1, 2, 3]
    for record in result.metrics:
        assert 0 < record["estimated_mean_liplt"] <= record["estimated_mean_naive"]
        assert ("estimated_certified" in record) == (record["epoch"] >= 2)
    assert result.metrics[0]["robust"] == 0
    assert result.metrics[1]["robust"] != 0
    fractions = [fraction for what, fraction in seen if what == "training"]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1
    assert {what for what, _ in seen} >= {"training", "certifying"}


def test_weights_that_are_stored_in_half_are_certified_as_stored(tmp_path):
    result = lipcert.train(tiny("stored=float16"), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float16}
    model = load_model(str(tmp_path)).model
    for name, weight in model.state_dict().items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, stored[name].float())
    test = data.load("digits").test
    certificates = lipcert.certify(model, test.pixels(), labels=test.labels)
    assert certificates.clean_accuracy == result.summary.clean
    for entry in result.summary.at:
        assert certificates.certified_accuracy(entry.epsilon) == entry.certified


def test_the_stored_model_is_the_certified_one(tmp_path):
    result = lipcert.train(tiny("input_range=[-1, 1]", "model=2C2F"), tmp_path)
    loaded, test = load_model(str(tmp_path)), data.load("digits").test
    certificates = lipcert.certify(loaded.model, test.pixels(), labels=test.labels)
    assert certificates.clean_accuracy == result.summary.clean
    assert certificates.certified_accuracy(0.25) == pytest.approx(
        result.summary.at[0].certified
    )
    inside = lipcert.bound(loaded.model.network, loaded.input_shape).mean
    assert result.summary.mean_constant == pytest.approx(2 * inside, rel=1e-6)


@pytest.mark.parametrize(
    "overrides",
    [
        ("loss.type=standard", "warmup_epochs=0"),
        (
            "loss.type=signed-radius",
            "loss.t=2",
            "loss.r0=0.5",
            "estimator.method=naive",
        ),
        (
            "loss.type=gloro",
            "loss.epsilon=0.3",
            "estimator.target=last-layer",
            "clip_norm=1",
        ),
        (
            "loss.type=lmt",
            "loss.epsilon=0.3",
            "estimator.target=network",
            "classes_per_batch=4",
        ),
        (
            "loss.radius=hard",
            "loss.base=soft-margin",
            "estimator.target=per-class",
            "augmentation.translate=0.1",
        ),
    ],
    ids=lambda overrides: overrides[0],
)
def test_every_loss_lowers_itself_with_any_estimator(overrides, tmp_path):
    result = lipcert.train(tiny(*overrides, "warmup_epochs=0", "epochs=4"), tmp_path)
    assert result.metrics[-1]["loss"] < result.metrics[0]["loss"]


def test_clipping_limits_the_gradient(tmp_path):
    norms = []
    original = torch.optim.Adam.step

    def step(self, *args, **kwargs):
        norms.append(
            torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"]])
            .norm()
            .item()
        )
        return original(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.Adam, "step", step)
        lipcert.train(tiny("clip_norm=0.01"), tmp_path)
    assert max(norms) == pytest.approx(0.01, rel=1e-3)


def test_mixed_precision_needs_a_processor_that_has_it(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launching, "bfloat16_works", lambda: False)
        with pytest.raises(
            ConfigError,
            match=r"precision is bf16-mixed, but this processor cannot .* use 32-true",
        ):
            lipcert.train(tiny("precision=bf16-mixed"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(
    not bfloat16_works(), reason="this processor cannot multiply bfloat16 numbers"
)
def test_mixed_precision_is_for_the_forward_pass_only(tmp_path):
    config = tiny("precision=bf16-mixed", "warmup_epochs=0")
    with launching.launched(config) as fabric:
        dataset = data.load("digits")
        training = Training(
            fabric, config, "digest", dataset, tmp_path, Prepared.of(config, dataset)
        )
        outputs, constants = [], []
        training.model[1].register_forward_hook(
            lambda module, inputs, output: outputs.append(output.dtype)
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                loop,
                "objective",
                lambda c, z, y, L: constants.append(L.dtype) or objective(c, z, y, L),
            )
            training.step(
                torch.arange(32),
                0,
                0,
                1e-3,
                dict.fromkeys(("loss", "base", "robust", "correct", "count"), 0),
            )
        assert (outputs, constants) == ([torch.bfloat16], [torch.float32])
        estimator = training.estimators["estimator"]
        estimator.power_iterations = 0
        plain = estimator.pairwise()
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(estimator.pairwise(), plain)
    result = lipcert.train(tiny("precision=bf16-mixed", "epochs=4"), tmp_path / "run")
    assert result.metrics[-1]["train_accuracy"] > result.metrics[0]["train_accuracy"]


def test_divergence_is_diagnosed_and_the_last_good_checkpoint_stays(tmp_path):
    config = tiny("schedule.lr0=1e18", "schedule.lrf=1e18", "checkpoint_seconds=0")
    with pytest.raises(DivergenceError) as caught:
        lipcert.train(config, tmp_path)
    message, path = str(caught.value), tmp_path / "checkpoint.safetensors"
    assert "training diverged in epoch 1, step" in message
    assert "at learning rate 1e+18" in message
    assert "Lower schedule.lr0" in message
    assert str(path) in message
    tensors, _ = read_checkpoint(path, config.weights_digest())
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert not (tmp_path / "model.safetensors").exists()


def test_weights_that_became_nan_are_not_saved(tmp_path, monkeypatch):
    """A finite loss with a NaN gradient: the step spoils the weights, the checkpoint must not have them."""

    def bad(config, logits, labels, constants):
        loss = objective(config, logits, labels, constants)
        return Loss(loss.loss + (0 * logits.sum()).sqrt(), loss.base, loss.robust)

    monkeypatch.setattr(loop, "objective", bad)
    config = tiny("checkpoint_seconds=0")
    with pytest.raises(
        DivergenceError, match=r"model.1.weight contains NaN or infinity"
    ):
        lipcert.train(config, tmp_path)
    tensors, position = read_checkpoint(
        tmp_path / "checkpoint.safetensors", config.weights_digest()
    )
    assert (position.epoch, position.step) == (0, 0)
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_folders_that_are_in_use_are_refused(finished, tmp_path, monkeypatch):
    shutil.copytree(finished.result.folder, tmp_path / "run")
    with pytest.raises(
        ResumeError, match=r"run already holds a run; continue it with --resume"
    ):
        lipcert.train(tiny(), tmp_path / "run")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(OptionError, match=r"other exists and is not an empty folder"):
        lipcert.train(tiny(), tmp_path / "other")
    with pytest.raises(
        ResumeError, match=r"other holds no run: config.toml is missing"
    ):
        resume(tmp_path / "other")
    monkeypatch.setattr(
        Training, "run", lambda *args: pytest.fail("a finished run is only read")
    )
    assert resume(tmp_path / "run").summary == finished.result.summary
    environment = tmp_path / "run" / "environment.json"
    environment.write_text(
        environment.read_text().replace(data.load("digits").checksum, "0" * 64)
    )
    with pytest.raises(
        ResumeError,
        match=r"run was begun with other data: the checksum of digits differs",
    ):
        resume(tmp_path / "run")


def test_runs_are_numbered_and_the_same_seed_gives_the_same_weights(
    finished, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    same, other = lipcert.train(tiny()), lipcert.train(tiny("seed=1"))
    assert torch.equal(torch.rand(1), expected)
    assert [str(result.folder) for result in (same, other)] == [
        "runs/digits-1",
        "runs/digits-2",
    ]
    assert metrics(same.folder) == metrics(finished.result.folder)
    a, b, c = (weights(run.folder) for run in (finished.result, same, other))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["1.weight"], c["1.weight"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data=nowhere/images", "nowhere/images does not exist"),
        ("model=8C2F", "does not accept"),
    ],
)
def test_what_cannot_be_trained_leaves_no_folder(tmp_path, override, message):
    with pytest.raises(LipcertError, match=message):
        lipcert.train(tiny(override), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_preset_or_a_file_may_be_named(tmp_path):
    with pytest.raises(ConfigError, match="there is no preset 'digit'"):
        lipcert.train("digit", tmp_path / "run")
    (tmp_path / "mine.toml").write_text(tiny("epochs=2").to_toml())
    assert (
        lipcert.train(str(tmp_path / "mine.toml"), tmp_path / "run").summary.epochs == 2
    )


def test_all_files_of_a_run_have_the_same_permissions(finished, tmp_path):
    (tmp_path / "plain").touch()
    modes = {
        path.name: path.stat().st_mode
        for path in finished.result.folder.iterdir()
        if path.name != ".lock"
    }
    assert "model.safetensors" in modes
    assert set(modes.values()) == {(tmp_path / "plain").stat().st_mode}


def test_a_missing_tensorboard_is_said_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(
        ConfigError,
        match=r"TensorBoard is not installed; pip install 'lipcert\[tensorboard\]'",
    ):
        lipcert.train(tiny("tensorboard=true"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    lipcert.train(tiny("tensorboard=true"), tmp_path)
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_muon_moves_the_matrices_of_dense_layers_and_adam_everything_else():
    config = tiny(
        "optimizer.type=muon", "estimator.method=rescaled", "estimator.scale_lr=7"
    )
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(144, 20),
        nn.ReLU(),
        nn.Linear(20, 10),
    )
    scales = [nn.Parameter(torch.zeros(20))]
    adam, muon = build_optimizers(config, model, scales)
    assert isinstance(adam, torch.optim.Adam)
    assert isinstance(muon, KernelMuon)
    moved = [id(p) for group in muon.param_groups for p in group["params"]]
    assert moved == [id(model[3].weight), id(model[5].weight)]
    (rest, learned) = adam.param_groups
    assert {id(p) for p in rest["params"]} == {id(p) for p in model.parameters()} - set(
        moved
    )
    assert (learned["params"], learned["pace"], rest["pace"]) == (scales, 7.0, 1.0)


def test_only_adam_without_muon():
    (adam,) = build_optimizers(tiny(), nn.Linear(3, 2), [])
    assert len(adam.param_groups) == 1
    assert len(adam.param_groups[0]["params"]) == 2


def test_a_run_is_certified_in_float64_if_asked(finished, tmp_path):
    single = finished.result.summary
    double = lipcert.train(tiny("execution=float64"), tmp_path / "double").summary
    assert (single.execution, double.execution) == ("float32", "float64")
    one, other = weights(finished.result.folder), weights(tmp_path / "double")
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert single.mean_radius < double.mean_radius < 1.05 * single.mean_radius
