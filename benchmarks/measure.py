"""Peak memory in a process of its own, and figures stored with the environment they belong to."""

from __future__ import annotations

import json
import multiprocessing
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lipcert_experiments.facts import environment

RESULTS = Path(__file__).parent / "results"


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
        line = next(
            line for line in status.read_text().splitlines() if line.startswith("VmHWM")
        )
        return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def store(name: str, command: str, figures: Any) -> None:
    """Write the figures with their environment to benchmarks/results."""
    RESULTS.mkdir(exist_ok=True)
    content = {"command": command, "environment": environment(), "figures": figures}
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
