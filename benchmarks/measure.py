"""Timing side by side, peak memory in a process of its own, and the environment a figure belongs to."""

from __future__ import annotations

import json
import multiprocessing
import platform
import resource
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def side_by_side(functions: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of each function; the functions take turns, so that all see the same machine."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    for _ in range(repeats):
        for name, function in functions.items():
            began = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - began)
    return {name: median(values) for name, values in times.items()}


def peak_memory(function: Callable[..., Any], *args: Any) -> float:
    """Peak resident memory in MiB of a fresh process that calls the function."""
    context = multiprocessing.get_context("spawn")
    queue: Any = context.Queue()
    process = context.Process(target=_run, args=(queue, function, args))
    process.start()
    result: float = queue.get()
    process.join()
    return result


def _run(queue: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    function(*args)
    queue.put(own_peak())


def own_peak() -> float:
    """Peak resident memory of this process in MiB; not that of the process it was started from."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def environment() -> dict[str, Any]:
    """What a figure depends on besides the code."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit.stdout.strip(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def store(name: str, command: str, figures: Any) -> None:
    """Write the figures with their environment to benchmarks/results."""
    RESULTS.mkdir(exist_ok=True)
    content = {"command": command, "environment": environment(), "figures": figures}
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
