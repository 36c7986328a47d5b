"""A run that is killed at any moment and resumed ends with the same bits."""

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
from lipcert.training import TrainConfig, checkpoint, resume

KILLS = 10 if os.environ.get("LIPCERT_FULL") == "1" else 3
CONFIG = tiny("model=2C2F", "checkpoint_seconds=0", "batch_size=128", "augmentation.flip=true", "clip_norm=5")
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
        assert all(torch.equal(found[tensor], expected[tensor]) for tensor in expected), name
    assert (folder / "certificates.csv").read_bytes() == (reference / "certificates.csv").read_bytes()
    assert metrics(folder) == metrics(reference)
    assert not list(folder.glob(".*"))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    began = time.perf_counter()
    child = FORK.Process(target=start_or_resume, args=(CONFIG, folder))
    child.start()
    child.join()
    assert child.exitcode == 0
    return folder, time.perf_counter() - began


def test_killed_at_random_moments(uninterrupted, tmp_path):
    reference, seconds = uninterrupted
    chance = random.Random(0)
    kills = 0
    for _ in range(KILLS):
        child = FORK.Process(target=start_or_resume, args=(CONFIG, tmp_path))
        child.start()
        time.sleep(chance.uniform(0.3, 1) * seconds / (KILLS + 1) + 0.1)
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        kills += child.exitcode == -signal.SIGKILL
    assert kills >= 2
    start_or_resume(CONFIG, tmp_path)
    assert_same_run(tmp_path, reference)


@pytest.mark.parametrize("call", [1, 2, 9])
def test_killed_while_writing_a_checkpoint(uninterrupted, tmp_path, call):
    reference, _ = uninterrupted

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
    assert_same_run(tmp_path, reference)


def test_the_command_line_resumes(uninterrupted, tmp_path):
    """The same by real commands, killed after the first epoch."""
    reference, _ = uninterrupted
    (tmp_path / "digits.toml").write_text(CONFIG.to_toml())
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "lipcert", "train"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    began = [*command, str(tmp_path / "digits.toml"), "--run-dir", str(folder), "--quiet"]
    process = subprocess.Popen(began, env=environment, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not ((folder / "metrics.jsonl").exists() and metrics(folder)):
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL, process.stderr.read()
    done = subprocess.run(
        [*command, "--resume", str(folder)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "certified at ε" in " ".join(done.stdout.split())
    assert f"run: {folder}" in done.stdout
    assert_same_run(folder, reference)
