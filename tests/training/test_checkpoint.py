"""Checkpoints: complete or absent, verified, refused by name when they are not right."""

import json

import pytest
import torch
from runs import tiny
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import lipcert
from lipcert.errors import CheckpointError
from lipcert.runs.working import working_in
from lipcert.training import checkpoint, resume
from lipcert.training.checkpoint import (
    Position,
    TrainingState,
    read_checkpoint,
    write_checkpoint,
)


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory):
    """A run whose training is done, but not its certificates."""
    folder = tmp_path_factory.mktemp("run")
    lipcert.train(tiny(), folder)
    (folder / "summary.json").unlink()
    return folder


@pytest.fixture
def run_folder(unfinished, tmp_path):
    for name in (
        "config.toml",
        "environment.json",
        "metrics.jsonl",
        "checkpoint.safetensors",
    ):
        (tmp_path / name).write_bytes((unfinished / name).read_bytes())
    return tmp_path


def small_parts(seed: int) -> TrainingState:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(2, 3, 3),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(3, 2),
    )
    model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters())
    estimator = lipcert.Estimator(model, (2, 3, 3), seed=seed)
    for _ in range(2):
        (model(torch.randn(4, 2, 3, 3)).square().mean() + estimator().sum()).backward()
        optimizer.step()
    return TrainingState(model, [optimizer], {"estimator": estimator})


def test_round_trip_restores_values_and_memory_formats(tmp_path):
    source, target, path = (
        small_parts(0),
        small_parts(1),
        tmp_path / "state.safetensors",
    )
    position = Position(3, 17, {"loss": 0.1 + 0.2, "count": 1e-300})
    write_checkpoint(path, source.tensors(), position, "config")
    tensors, found = read_checkpoint(path, "config")
    assert found == position
    target.restore(tensors, path)
    expected, restored = source.tensors(), target.tensors()
    assert expected.keys() == restored.keys()
    assert {name.split(".")[0] for name in expected} == {
        "model",
        "optimizer",
        "estimator",
    }
    assert all(torch.equal(expected[name], restored[name]) for name in expected)
    weight = target.model[0].weight
    assert target.optimizers[0].state[weight]["exp_avg"].stride() == weight.stride()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_truncated_checkpoints_are_refused_by_name(run_folder, share):
    path = run_folder / "checkpoint.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    before = sorted(entry.name for entry in run_folder.iterdir())
    with pytest.raises(
        CheckpointError,
        match=r"checkpoint.safetensors is truncated or not a checkpoint .*remove it",
    ):
        resume(run_folder)
    assert sorted(entry.name for entry in run_folder.iterdir()) == sorted(
        [".lock", *before]
    )


def test_altered_checkpoints_are_refused_by_name(run_folder):
    path = run_folder / "checkpoint.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"checkpoint.safetensors is damaged: .* checksum"
    ):
        resume(run_folder)
    path.write_bytes((run_folder / "config.toml").read_bytes())
    with pytest.raises(
        CheckpointError,
        match=r"checkpoint.safetensors is truncated or not a checkpoint",
    ):
        resume(run_folder)
    save_file({"weight": torch.zeros(3)}, path)
    with pytest.raises(
        CheckpointError,
        match=r"checkpoint.safetensors is not a checkpoint of this version",
    ):
        resume(run_folder)


def test_checkpoints_of_other_runs_are_refused_by_name(run_folder):
    config, path = run_folder / "config.toml", run_folder / "checkpoint.safetensors"
    text = config.read_text()
    config.write_text(text.replace("seed = 0", "seed = 1"))
    with pytest.raises(
        CheckpointError,
        match=r"checkpoint.safetensors belongs to another configuration",
    ):
        resume(run_folder)
    config.write_text(text)
    with safe_open(path, framework="pt") as file:
        digest = file.metadata()["config"]
    tensors = load_file(path)
    write_checkpoint(
        path, {**tensors, "model.extra": torch.zeros(1)}, Position(1), digest
    )
    with pytest.raises(
        CheckpointError,
        match=r"does not fit the configuration: model.extra is only on one side",
    ):
        resume(run_folder)
    write_checkpoint(
        path, {**tensors, "model.1.bias": torch.zeros(7)}, Position(1), digest
    )
    with pytest.raises(
        CheckpointError, match=r"model.1.bias has shape \(7,\), expected \(64,\)"
    ):
        resume(run_folder)
    with pytest.raises(CheckpointError, match=r"absent.safetensors does not exist"):
        read_checkpoint(run_folder / "absent.safetensors", digest)


def test_a_write_that_fails_leaves_the_old_checkpoint_and_nothing_else(
    tmp_path, monkeypatch
):
    path, parts = tmp_path / "state.safetensors", small_parts(0)
    write_checkpoint(path, parts.tensors(), Position(1), "config")

    def fail(tensors, temporary, metadata):
        temporary.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint, "save_file", fail)
    with pytest.raises(OSError, match="no space"):
        write_checkpoint(path, parts.tensors(), Position(2), "config")
    assert list(tmp_path.iterdir()) == [path]
    assert read_checkpoint(path, "config")[1].epoch == 1


def test_leftovers_of_killed_writers_are_removed(tmp_path):
    for name in (".checkpoint.safetensors.17.tmp", ".tmphyXIIu", "metrics.jsonl"):
        (tmp_path / name).touch()
    with working_in(tmp_path):
        assert not [path for path in tmp_path.iterdir() if "tmp" in path.name]
    assert (tmp_path / "metrics.jsonl").exists()


def test_metrics_beyond_the_checkpoint_are_cut_off(run_folder):
    path = run_folder / "metrics.jsonl"
    lines = path.read_text()
    later = {**json.loads(lines.splitlines()[-1]), "epoch": 4}
    path.write_text(lines + json.dumps(later) + "\n" + '{"epoch": 5, "lo')
    result = resume(run_folder)
    assert [record["epoch"] for record in result.metrics] == [1, 2, 3]
    assert path.read_text() == lines
