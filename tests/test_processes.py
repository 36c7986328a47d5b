"""Two processes under torchrun bound and certify as one does."""

import csv
import json
import os
import socket
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from lipcert.cli import app
from lipcert.processes import (
    gathered,
    of_first,
    own_share,
    process_count,
    process_rank,
    sharing_work,
)


def torchrun(*command, folder, module="lipcert"):
    """What two processes of a module, or of a file, print together, in an empty cache."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    start = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        f"--master-port={port}",
    ]
    what = [str(module)] if str(module).endswith(".py") else ["-m", module]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "LIPCERT_CACHE": str(folder / "cache"),
    }
    done = subprocess.run(
        [*start, *what, *command],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def alone(*command, folder):
    """What this process prints."""
    environment = {"LIPCERT_CACHE": str(folder / "cache")}
    done = CliRunner().invoke(app, list(command), env=environment)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_one_process_shares_nothing():
    with sharing_work():
        assert (process_count(), process_rank()) == (1, 0)
        assert gathered(3) == [3]
        assert of_first("a") == "a"
        assert own_share({"a": 1.0, "b": 2.0}) == ["a", "b"]


def test_two_processes_bound_as_one(tmp_path):
    """Norms are proved, some here, some there: the constants agree in all but the last digits."""
    command = ("bound", "2C2F", "--method", "liplt", "--json")
    one, two = (json.loads(run(*command, folder=tmp_path)) for run in (alone, torchrun))
    assert [row["target"] for row in one] == [row["target"] for row in two]
    for single, double in zip(one, two, strict=True):
        assert double["value"] == pytest.approx(single["value"], rel=1e-9)
        assert double["guarantee"] == single["guarantee"]
    assert not list(
        (tmp_path / "cache").rglob("*.json")
    )  # the command has ended: nothing is kept


def test_two_processes_certify_as_one(tmp_path):
    """297 digits: a batch of 256 for the first process, the rest for the second, rows in order."""
    command = (
        "certify",
        "2C2F",
        "--data",
        "digits",
        "--eps",
        "0.1",
        "--quiet",
        "--limit",
        "297",
        "--out",
    )
    alone(*command, str(tmp_path / "one"), folder=tmp_path)
    torchrun(*command, str(tmp_path / "two"), folder=tmp_path)
    one, two = (rows(tmp_path / name) for name in ("one", "two"))
    assert [row["idx"] for row in two] == [str(k) for k in range(297)]
    for single, double in zip(one, two, strict=True):
        assert single["prediction"] == double["prediction"]
        assert float(double["radius"]) == pytest.approx(
            float(single["radius"]), rel=1e-6, abs=1e-12
        )


def rows(folder):
    with (folder / "certificates.csv").open() as file:
        return list(csv.DictReader(file))


def test_the_metric_counts_the_inputs_of_all_processes(tmp_path):
    script = tmp_path / "metric.py"
    script.write_text(
        "import os, torch, torch.distributed as dist, lipcert\n"
        "dist.init_process_group('gloo')\n"
        "metric = lipcert.CertifiedAccuracy(0.5)\n"
        "mine = slice(0, 1) if dist.get_rank() == 0 else slice(1, 4)\n"
        "radius, labels = torch.tensor([1.0, 0.2, 0.7, 0.9]), torch.tensor([0, 0, 1, 0])\n"
        "metric.update(torch.eye(2)[[0, 0, 0, 0]][mine], radius[mine], labels[mine])\n"
        "print(metric.compute(), flush=True)\n"
        "dist.barrier()\n"
        "os._exit(0)\n"  # threads of gloo abort some processes that leave in the usual way
    )
    printed = torchrun(
        folder=tmp_path, module=script
    )  # lines of two processes may run into each other
    assert printed.replace("\n", "") == 2 * "{0.0: 0.75, 0.5: 0.5}"
