"""Ordinary networks: how long guaranteed bounds and differentiable estimates take, and how much memory.

Every network has a process of its own. Seconds are those on the clock, beside those of the processor. On a machine
with an accelerator, estimates and training steps run there.
"""

from __future__ import annotations

import multiprocessing
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import nn

from benchmarks import networks
from benchmarks.measure import own_peak
from lipcert import Estimator, bound, zoo
from lipcert.resources import reused_memory

BATCH = 8
TARGETS = {"ResNet-50 per class": "per-class", "ResNet-50 pairwise": "pairwise"}


@dataclass(frozen=True)
class Case:
    """A network, what was measured before, and the limits."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    before: str
    seconds: float
    gibibytes: float | None = None


CASES = {
    "resnet18": Case(
        lambda: zoo.build("resnet18"), (3, 32, 32), "killed at 900 s, 12 GiB", 480, 4
    ),
    "VGG-11": Case(networks.vgg11, (3, 32, 32), "unfinished", 180),
    "6C2F": Case(lambda: zoo.build("6C2F"), (3, 32, 32), "97 s", 40),
    "8C2F, 200 classes": Case(
        lambda: zoo.build("8C2F"), (3, 64, 64), "239 s, 6.2 GiB", 120, 3
    ),
    "1,000 classes": Case(networks.many_classes, (3, 64, 64), "67 s, 4 GiB", 30, 2),
    "chain of 200": Case(lambda: networks.chain(200), (32,), "unfinished", 30),
}


def _built(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


def bounded(name: str) -> dict[str, float]:
    """A guaranteed pairwise bound by LipLT."""
    case = CASES[name]
    model = _built(case.build).eval()
    began, worked = time.perf_counter(), time.process_time()
    made = bound(model, case.shape)
    figures = {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - worked,
    }
    return {
        **figures,
        "gibibytes": own_peak() / 1024,
        "inflation": made.inflation,
        "mean": made.mean,
    }


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _later(run: Callable[[], None]) -> dict[str, float]:
    """The median of three calls behind the first one, which sets up, and the peak of all.

    Memory is reused, as it is in `lipcert train`.
    """
    seconds, worked = [], []
    with reused_memory():
        run()
        for _ in range(3):
            began, before = time.perf_counter(), time.process_time()
            run()
            seconds.append(time.perf_counter() - began)
            worked.append(time.process_time() - before)
    peak = own_peak() / 1024
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated() / 2**30
    return {
        "seconds": median(seconds),
        "cpu_seconds": median(worked),
        "gibibytes": peak,
    }


def _trained(name: str) -> dict[str, float]:
    """A training step of ResNet-50."""
    model = _built(networks.resnet50).to(_device())
    x = torch.rand(BATCH, 3, 224, 224, device=_device())
    labels = torch.arange(BATCH, device=_device())
    return _later(lambda: F.cross_entropy(model(x), labels).backward())


def estimated(name: str) -> dict[str, float]:
    """A differentiable estimate with one iteration: of ResNet-50, or of a chain."""
    if name.startswith("chain"):
        model = _built(lambda: networks.chain(200)).to(_device())
        estimator = Estimator(model, (32,), power_iterations=1, span=4)
        return _later(lambda: estimator().sum().backward())
    model = _built(networks.resnet50).to(_device())
    target = TARGETS.get(name, "network")
    # Rows of 1,000 logits are 7 GiB on their way back across four nonlinearities.
    memory = 7 << 30 if name in TARGETS else 2 << 30
    estimator = Estimator(
        model, (3, 224, 224), target=target, power_iterations=1, span=4, memory=memory
    )
    return _later(lambda: estimator().sum().backward())


def _put(results: Any, function: Callable[[str], dict[str, Any]], name: str) -> None:
    try:
        results.put(function(name))
    except Exception as error:  # for the process that waits
        results.put({"failed": f"{type(error).__name__}: {error}"})


def apart(function: Callable[[str], dict[str, Any]], name: str) -> dict[str, Any]:
    """The figures of a function that runs in a process of its own."""
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    process = context.Process(target=_put, args=(results, function, name))
    process.start()
    while True:
        try:
            figures: dict[str, Any] = results.get(timeout=1.0)
            break
        except queue.Empty:
            if not process.is_alive():
                raise RuntimeError(
                    f"{name}: the process ended with code {process.exitcode}"
                ) from None
    process.join()
    if "failed" in figures:
        raise RuntimeError(f"{name}: {figures['failed']}")
    return figures


def ordinary(repeats: int) -> tuple[dict[str, Any], Table]:
    """Guaranteed bounds of ordinary networks, and estimates of deep ones, against their limits."""
    table = Table(
        "what", "before", "seconds", "limit", "CPU s", "GiB", "limit", "inflation"
    )
    table.title = (
        "Ordinary networks: guaranteed pairwise LipLT, and differentiable estimates"
    )
    figures: dict[str, Any] = {}
    for name, case in CASES.items():
        figures[name] = found = apart(bounded, name)
        limit = "" if case.gibibytes is None else f"{case.gibibytes:g}"
        row = [
            name,
            case.before,
            f"{found['seconds']:.1f}",
            f"{case.seconds:g}",
            f"{found['cpu_seconds']:.1f}",
        ]
        table.add_row(
            *row, f"{found['gibibytes']:.2f}", limit, f"{found['inflation']:.2%}"
        )
    step = figures["ResNet-50, step"] = apart(_trained, "ResNet-50")
    estimates = {
        "ResNet-50": ("20 GiB", 4 * step["seconds"], "8"),
        "chain of 200": ("", 1.0, ""),
    }
    for name, (before, seconds, limit) in estimates.items():
        figures[f"{name}, estimate"] = found = apart(estimated, name)
        row = [
            f"{name}, estimate",
            before,
            f"{found['seconds']:.1f}",
            f"{seconds:.1f}",
            f"{found['cpu_seconds']:.1f}",
        ]
        table.add_row(*row, f"{found['gibibytes']:.2f}", limit, "")
    for name in TARGETS:
        figures[f"{name}, estimate"] = found = apart(estimated, name)
        row = [
            f"{name}, estimate",
            "",
            f"{found['seconds']:.1f}",
            "",
            f"{found['cpu_seconds']:.1f}",
        ]
        table.add_row(*row, f"{found['gibibytes']:.2f}")
    table.caption = f"Estimates: span 4, one iteration. ResNet-50: 3×224×224, against four steps of batch {BATCH}."
    return figures, table
