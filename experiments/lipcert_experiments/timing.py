"""How long Lipschitz constants take: alone, inside a training iteration, and the whole iteration."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from math import log
from pathlib import Path
from statistics import correlation, linear_regression, median
from typing import Any

import torch

from lipcert import losses
from lipcert.bounds.estimator import Estimator
from lipcert.files import replace_file
from lipcert.models import zoo

ALONE, INSIDE, WHOLE = "bound alone", "in training", "whole iteration"
Parts = dict[str, float]
"""Seconds by name."""


def side_by_side(
    functions: Mapping[str, Callable[[], Any]], repeats: int
) -> dict[str, float]:
    """Median seconds of each function; the functions take turns, so that all see the same machine."""
    timed = {name: _timed(function) for name, function in functions.items()}
    return {name: parts["seconds"] for name, parts in rounds(timed, repeats).items()}


def rounds(
    functions: Mapping[str, Callable[[], Parts]],
    repeats: int,
    path: Path | None = None,
    origin: Mapping[str, Any] | None = None,
    progress: Callable[[str, float], None] = lambda what, fraction: None,
) -> dict[str, Parts]:
    """Medians over rounds of what the functions measure of themselves, after one call each that does not count.

    A finished round is kept in `path`. An interrupted measurement continues with the next round, if `origin` and the
    functions are the same.
    """
    mark = {"functions": list(functions), **(origin or {})}
    done: list[dict[str, Parts]] = []
    if path is not None and path.exists():
        stored = json.loads(path.read_text())
        done = stored["rounds"] if stored["origin"] == mark else []
    if len(done) < repeats:
        for function in functions.values():
            function()
    for k in range(len(done), repeats):
        done.append({})
        for name, function in functions.items():
            done[-1][name] = function()
            progress("measuring", (k + len(done[-1]) / len(functions)) / repeats)
        if path is not None:
            with replace_file(path) as temporary:
                temporary.write_text(
                    json.dumps({"origin": mark, "rounds": done}, indent=1) + "\n"
                )
    return {
        name: {part: median(r[name][part] for r in done) for part in done[0][name]}
        for name in functions
    }


def _timed(function: Callable[[], Any]) -> Callable[[], Parts]:
    def run() -> Parts:
        began = clock()
        function()
        return {"seconds": clock() - began}

    return run


def clock() -> float:
    """Seconds, when everything that was asked of the device is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class TrainingStep:
    """A whole iteration of training on random inputs: forward pass, constants, CRM loss, backward pass, Adam.

    method: of the constants; None for cross-entropy alone. A call makes one iteration and returns what it took, and
    with constants also how long these took inside it.
    """

    def __init__(
        self,
        name: str,
        method: str | None = "liplt",
        iterations: int = 5,
        *,
        batch: int = 512,
        input_shape: tuple[int, ...] | None = None,
        classes: int | None = None,
        target: str = "pairwise",
    ) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        shape, count = (
            input_shape or zoo.ZOO[name].input_shape,
            classes or zoo.ZOO[name].classes,
        )
        self.model = zoo.build(name, shape, count, seed=0)
        self.model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        generator = torch.Generator().manual_seed(0)
        x = torch.rand(batch, *shape, generator=generator)
        self.x = x.to(device, memory_format=torch.channels_last)
        self.labels = torch.randint(0, count, (batch,), generator=generator).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        self.estimator = (
            Estimator(self.model, shape, method, target, iterations) if method else None
        )

    def __call__(self) -> Parts:
        began = clock()
        logits = self.model(self.x)
        inside = 0.0
        if self.estimator is None:
            loss = losses.standard(logits, self.labels).loss
        else:
            before = clock()
            constants = self.estimator()
            inside = clock() - before
            loss = losses.crm(
                logits, self.labels, constants, t=5.0, r0=2.2, weight=30.0
            ).loss
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        self.optimizer.step()
        whole = {WHOLE: clock() - began}
        return whole if self.estimator is None else {INSIDE: inside, **whole}

    @torch.no_grad()
    def alone(self) -> Parts:
        """The constants by themselves, without gradient."""
        assert self.estimator is not None
        began = clock()
        self.estimator()
        return {ALONE: clock() - began}


def growth(sizes: Sequence[float], seconds: Sequence[float]) -> dict[str, float]:
    """The exponent of a power law, and how straight the line is (R²)."""
    slope = linear_regression([log(n) for n in sizes], [log(t) for t in seconds]).slope
    return {"exponent": slope, "r2_of_straight_line": correlation(sizes, seconds) ** 2}


def depth(name: str) -> int:
    """The number of weight layers of a network of the zoo."""
    return sum(
        parameter.dim() > 1 for parameter in zoo.build(name, seed=0).parameters()
    )
