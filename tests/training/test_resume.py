"""A run that is killed at any moment and resumed ends with the same bits."""

import importlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from runs import metrics, tiny
from safetensors.torch import load_file

import lipcert
from lipcert.errors import ResumeError
from lipcert.runs.metrics import read_metrics
from lipcert.training import TrainConfig, checkpoint, resume

KILLS = 10 if os.environ.get("LIPCERT_FULL") == "1" else 3
# Four epochs of 12 steps with a checkpoint after each: the second epoch is the first with constants.
CONFIG = tiny(
    "model=2C2F",
    "epochs=4",
    "checkpoint_seconds=0",
    "batch_size=128",
    "augmentation.flip=true",
    "clip_norm=5",
)
FORK = multiprocessing.get_context("fork")


def start_or_resume(config: TrainConfig, folder: Path) -> None:
    if (folder / "config.toml").exists():
        resume(folder)
    else:
        lipcert.train(config, folder)


def assert_same_run(folder: Path, reference: Path) -> None:
    for name in ("model.safetensors", "checkpoint.safetensors"):
        found, expected = load_file(folder / name), load_file(reference / name)
        assert found.keys() == expected.keys()
        assert all(
            torch.equal(found[tensor], expected[tensor]) for tensor in expected
        ), name
    assert (folder / "certificates.csv").read_bytes() == (
        reference / "certificates.csv"
    ).read_bytes()
    assert metrics(folder) == metrics(reference)
    assert [path.name for path in folder.glob(".*")] == [".lock"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    for slow in ("lightning_fabric", "kornia.augmentation"):
        importlib.import_module(slow)  # once, instead of in every forked process
    folder = tmp_path_factory.mktemp("reference")
    child = FORK.Process(target=start_or_resume, args=(CONFIG, folder))
    child.start()
    child.join()
    assert child.exitcode == 0
    return folder


def test_killed_at_random_moments(uninterrupted, tmp_path):
    """Each time after at least one new checkpoint, so that every resumed run goes on from a later step."""
    seconds = sum(record["seconds"] for record in read_metrics(uninterrupted))
    chance = random.Random(0)
    path, kills = tmp_path / "checkpoint.safetensors", 0
    for _ in range(KILLS):
        before = modified(path)
        child = FORK.Process(target=start_or_resume, args=(CONFIG, tmp_path))
        child.start()
        while child.is_alive() and modified(path) == before:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 1.5) * seconds / (KILLS + 1))
        child.kill()
        child.join()
        kills += child.exitcode == -signal.SIGKILL
    assert kills >= KILLS // 2
    start_or_resume(CONFIG, tmp_path)
    assert_same_run(tmp_path, uninterrupted)


def modified(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


@pytest.mark.parametrize("call", [1, 20])
def test_killed_while_writing_a_checkpoint(uninterrupted, tmp_path, call):
    def die_half_way() -> None:
        original, calls = checkpoint.save_file, []

        def save(tensors, temporary, metadata):
            original(tensors, temporary, metadata=metadata)
            calls.append(temporary)
            if len(calls) == call:
                os.truncate(temporary, temporary.stat().st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)

        checkpoint.save_file = save
        start_or_resume(CONFIG, tmp_path)

    child = FORK.Process(target=die_half_way)
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert len(list(tmp_path.glob(".checkpoint*.tmp"))) == 1
    start_or_resume(CONFIG, tmp_path)
    assert_same_run(tmp_path, uninterrupted)


def test_the_command_line_resumes(uninterrupted, tmp_path):
    """The same by real commands, killed after the first epoch."""
    (tmp_path / "digits.toml").write_text(CONFIG.to_toml())
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "lipcert", "train"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    began = [
        *command,
        str(tmp_path / "digits.toml"),
        "--run-dir",
        str(folder),
        "--quiet",
    ]
    process = subprocess.Popen(
        began, env=environment, stderr=subprocess.PIPE, text=True
    )
    while process.poll() is None and not read_metrics(folder):
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL, process.stderr.read()
    done = subprocess.run(
        [*command, "--resume", str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "certified at ε" in " ".join(done.stdout.split())
    assert f"run: {folder}" in done.stdout
    assert_same_run(folder, uninterrupted)


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_scales_continue_with_the_weights(tmp_path, optimizer):
    """Their values and the optimizers' moments are part of the checkpoint."""
    config = tiny(
        "estimator.method=rescaled",
        f"optimizer.type={optimizer}",
        "checkpoint_seconds=0",
    )
    lipcert.train(config, tmp_path / "whole")

    def interrupt(what: str, fraction: float, figures: str = "") -> None:
        if fraction > 0.6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lipcert.train(config, tmp_path / "parts", progress=interrupt)
    resume(tmp_path / "parts")
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    state = load_file(tmp_path / "whole" / "checkpoint.safetensors")
    assert state["estimator.scales.log_1"].abs().max() > 1e-3
    assert "optimizer.estimator.scales.log_1.exp_avg" in state
    assert any(name.endswith("weight.momentum_buffer") for name in state) == (
        optimizer == "muon"
    )
    assert (
        json.loads((tmp_path / "whole" / "summary.json").read_text())["method"]
        == "rescaled"
    )


def test_two_processes_do_not_work_in_one_folder(tmp_path):
    def intrude(what: str, fraction: float, figures: str = "") -> None:
        with pytest.raises(ResumeError, match="another process is working in"):
            resume(tmp_path / "run")

    finished = lipcert.train(tiny(), tmp_path / "run", progress=intrude)
    assert resume(tmp_path / "run").summary == finished.summary
