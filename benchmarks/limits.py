"""Ordinary networks under a hard limit of memory, and by two processes instead of one."""

from __future__ import annotations

import csv
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from math import isclose, nan
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks import ordinary
from lipcert import NormOptions, bound, zoo
from lipcert.errors import LipcertError
from lipcert.processes import is_first_process, sharing_work

ROOM = 4 << 30
"""Bytes of address space above what the interpreter and its libraries take."""
# Long enough that the start of the interpreter does not count. Both have one result: the
# bound has a seed, and the shipped network its stored bound.
WORK = {
    "bound of 8C2F, 200 classes": ("benchmarks.limits",),
    "certify cifar10-hour, 10,000 images": (
        "lipcert",
        "certify",
        "cifar10-hour",
        "--quiet",
    ),
}


def _limited(name: str) -> dict[str, Any]:
    """A case of `ordinary` within the limit: its figures, or the refusal."""
    torch.ones(512, 512) @ torch.ones(
        512, 512
    )  # the threads of the interpreter's own libraries are there
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
    try:
        if name.endswith("estimate"):
            return ordinary.estimated(name)
        return ordinary.bounded(name)
    except LipcertError as error:
        return {"refused": str(error)}


def ceilings(repeats: int) -> tuple[dict[str, Any], Table]:
    """All ordinary networks under a hard limit of the address space."""
    table = Table("what", "how it ends", "seconds", "GiB")
    table.title = f"Under a hard limit of {ROOM >> 30} GiB of address space above the interpreter's own"
    figures: dict[str, Any] = {}
    for name in (*ordinary.CASES, "ResNet-50, estimate", "chain of 200, estimate"):
        figures[name] = found = ordinary.apart(_limited, name)
        if "refused" in found:
            table.add_row(name, f"refused: {found['refused']}", "", "")
        else:
            table.add_row(
                name, "done", f"{found['seconds']:.1f}", f"{found['gibibytes']:.2f}"
            )
    return figures, table


def processes(repeats: int) -> tuple[dict[str, Any], Table]:
    """`lipcert bound` and `lipcert certify` by one process and by two under torchrun, one thread each."""
    table = Table("what", "one process, s", "two, s", "ratio", "same result")
    table.title = "One process and two under torchrun, one thread each"
    figures: dict[str, Any] = {}
    for what, command in WORK.items():
        with tempfile.TemporaryDirectory() as folder:
            one, first = _timed(1, command, Path(folder) / "one")
            two, second = _timed(2, command, Path(folder) / "two")
        same = _agree(first, second)
        figures[what] = {"one": one, "two": two, "ratio": two / one, "same": same}
        table.add_row(what, f"{one:.1f}", f"{two:.1f}", f"{two / one:.2f}", str(same))
    return figures, table


def _agree(first: list[list[str]], second: list[list[str]]) -> bool:
    """Whether two tables have the same words, and numbers that agree in all but their last digits.

    Norms are proved, some here, some there, in batches of other sizes, which round differently.
    """
    if [len(row) for row in first] != [len(row) for row in second]:
        return False
    for row, other in zip(first, second, strict=True):
        for cell, twin in zip(row, other, strict=True):
            if cell != twin and not isclose(
                _number(cell), _number(twin), rel_tol=1e-6, abs_tol=1e-12
            ):
                return False
    return True


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return nan


def _timed(count: int, command: tuple[str, ...], folder: Path) -> tuple[float, Any]:
    """Seconds of a command, and its result: constants in nine digits, or rows of certificates."""
    start = [sys.executable]
    if count > 1:
        start += ["-m", "torch.distributed.run", f"--nproc-per-node={count}", _port()]
    certifies = "certify" in command
    out = ["--out", str(folder)] if certifies else []
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "LIPCERT_CACHE": str(folder) + "-cache",
    }
    if certifies:
        # Images are decoded once on every machine, which nobody divides.
        once = [*command, "--limit", "1", "--out", str(folder) + "-once"]
        subprocess.run(
            [sys.executable, "-m", *once],
            env=environment,
            capture_output=True,
            check=True,
        )
    began = time.perf_counter()
    done = subprocess.run(
        [*start, "-m", *command, *out],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - began
    if done.returncode:
        raise RuntimeError(done.stderr)
    if certifies:
        with open(folder / "certificates.csv", encoding="utf-8") as file:
            return seconds, list(csv.reader(file))
    return seconds, [json.loads(done.stdout)]


def _port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"--master-port={found.getsockname()[1]}"


def shared_bound() -> None:
    """Bound 8C2F together with the other processes; the first one prints the constants, in nine digits."""
    torch.manual_seed(0)
    model = zoo.build("8C2F").eval()
    with sharing_work():
        value = bound(model, (3, 64, 64), options=NormOptions(seed=0)).value
    if is_first_process():
        print(json.dumps([f"{entry:.9g}" for entry in value.flatten().tolist()]))


if __name__ == "__main__":
    shared_bound()
