"""Two processes under torchrun do what one does."""

import os
import socket
import subprocess
import sys

import torch
from runs import metrics, tiny, weights

import lipcert


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_two_processes_end_where_one_does(tmp_path):
    """Three batches of 479 and one of a single digit, of which the second process gets nothing."""
    options = (
        "model=2C2F",
        "batch_size=479",
        "augmentation.translate=0.1",
        "clip_norm=1",
        "checkpoint_seconds=0",
    )
    config = tiny(*options, "estimator.method=rescaled")
    lipcert.train(config, tmp_path / "one")
    (tmp_path / "digits.toml").write_text(config.to_toml())
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}",
        "-m", "lipcert", "train", str(tmp_path / "digits.toml"), "--run-dir", str(tmp_path / "two"), "--quiet",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("run:") == 1
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    start = lipcert.zoo.build("2C2F", seed=0).state_dict()
    for name, weight in one.items():
        assert (weight - two[name]).abs().max() < 1e-4
        assert (weight - start[name]).abs().max() > 1e-3
    for single, double in zip(
        metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True
    ):
        assert double.pop("constants_spread") == 0
        for name in ("loss", "train_accuracy", "estimated_mean_liplt"):
            assert torch.isclose(
                torch.tensor(single[name]), torch.tensor(double[name]), rtol=1e-3
            )
