"""`lipcert bound`: constants by method and target, side by side."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated

import torch
import typer
from torch import Tensor

from lipcert.bounds.bound import Bound
from lipcert.bounds.compute import bound_targets, promised_constants
from lipcert.bounds.estimator import METHODS as ESTIMATES
from lipcert.bounds.estimator import Estimator
from lipcert.bounds.fit import FitOptions, fit_scales
from lipcert.bounds.methods import METHODS
from lipcert.bounds.sampled import estimate_sampled
from lipcert.bounds.targets import TARGETS, default_target
from lipcert.commands.kept_bounds import KeptBounds
from lipcert.commands.options import AsJson, InputShape, Model, Quiet, Weights, named_model, print_json, print_table
from lipcert.commands.progress_bar import progress_bar
from lipcert.display import NOTHING, TextTable
from lipcert.errors import OptionError, TooLargeError
from lipcert.models import LoadedModel
from lipcert.norms.norm_options import NormOptions
from lipcert.processes import is_first_process, sharing_work
from lipcert.progress import Progress

ALL = "all"
"""The method that stands for all of them, with the sampled slopes as the floor."""
QUICK = ("naive", "liplt")
FLOOR = "sampled"
PROMISED = "promised"


def bound(
    model: Model,
    weights: Weights = None,
    input_shape: InputShape = None,
    method: Annotated[list[str] | None, typer.Option(help=f"all, or some of {', '.join(METHODS)}; repeatable.")] = None,
    target: Annotated[list[str] | None, typer.Option(help="network, per-class, last-layer, pairwise.")] = None,
    estimate: Annotated[bool, typer.Option("--estimate", help="Power iteration: fast, not guaranteed.")] = False,
    iterations: Annotated[int, typer.Option(help="Power iterations of an estimate.", min=1)] = 100,
    max_memory: Annotated[
        float | None, typer.Option(help="GiB that matrices may take; default: 60 % of what is free, at most 2.", min=0)
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Lipschitz constants by method and target, side by side, with times and guarantees.

    Without --method: naive and liplt. --method all: every method, above the steepest slopes found. An interrupted
    command continues when it is given again; under torchrun, processes divide the norms.
    """
    loaded = named_model(model, weights, input_shape)
    everything = ALL in (method or ())
    targets = target or (["network", "pairwise"] if everything else list(TARGETS))
    if not target and default_target(loaded.network) == "network":
        targets = ["network"]  # the output is no vector of logits
    kept = KeptBounds(loaded.network)
    options = NormOptions(keep=kept.folder)
    if max_memory is not None:
        options = replace(options, memory=int(max_memory * 2**30))
    hidden = quiet or as_json or not is_first_process()
    with progress_bar(hidden) as progress, sharing_work():
        task = _Task(loaded, targets, iterations if estimate else None, options, kept, progress)
        rows = task.everything() if everything else task.some(method or QUICK)
    kept.forget()
    if not is_first_process():
        return
    if as_json:
        print_json([asdict(row) for row in rows])
    elif everything:
        print_table(_overview(loaded, rows))
    else:
        print_table(_comparison(loaded, rows))


@dataclass(frozen=True)
class Constant:
    """One constant; without a value, `guarantee` says why the method refuses the network."""

    method: str
    target: str
    value: float | None
    seconds: float
    guarantee: str


@dataclass(frozen=True)
class _Task:
    """Some targets for a model: estimates if a number of iterations is given, guaranteed bounds otherwise."""

    loaded: LoadedModel
    targets: Sequence[str]
    iterations: int | None
    options: NormOptions
    kept: KeptBounds
    progress: Progress

    def some(self, methods: Sequence[str]) -> list[Constant]:
        """Target by target, so that methods stand below each other."""
        rows = []
        for method in methods:
            rows += self.estimates(method) if self.iterations else self.bounds(method, self.targets)
        return sorted(rows, key=lambda row: self.targets.index(row.target))

    def everything(self) -> list[Constant]:
        """Method by method; one that cannot treat the network says so in its rows."""
        rows: list[Constant] = []
        for method in ESTIMATES if self.iterations else METHODS:
            rows += self.estimates(method) if self.iterations else self.bounds_or_reasons(method, self.targets)
        return rows + self.promised() + self.floor()

    def bounds(self, method: str, targets: Sequence[str]) -> list[Constant]:
        bounds = self.kept.find(method, targets)
        if len(bounds) < len(targets):
            bounds = self.computed(method, targets)
            self.kept.add(method, bounds)
        return [Constant(method, name, b.mean, b.seconds, b.guarantee) for name, b in bounds.items()]

    def computed(self, method: str, targets: Sequence[str]) -> dict[str, Bound]:
        loaded, fit = self.loaded, FitOptions(start=self.loaded.scales)
        return bound_targets(
            loaded.model, loaded.input_shape, method, targets, options=self.options, fit=fit, network=loaded.network,
            progress=self.progress,
        )  # fmt: skip

    def bounds_or_reasons(self, method: str, targets: Sequence[str]) -> list[Constant]:
        try:
            return self.bounds(method, targets)
        except (TooLargeError, OptionError) as error:
            reason = str(error).split(";")[0]
            if isinstance(error, TooLargeError) or len(targets) == 1:
                return [Constant(method, target, None, 0.0, reason) for target in targets]
        rows = []
        for target in targets:  # perhaps it has only some of the targets
            rows += self.bounds_or_reasons(method, [target])
        return rows

    def estimates(self, method: str) -> list[Constant]:
        rows = []
        for target in self.targets:
            self.progress(f"{method} {target}", 0.0)
            began = time.perf_counter()
            value = self.estimate(method, target)
            rows.append(Constant(method, target, value, time.perf_counter() - began, "estimate"))
        return rows

    def estimate(self, method: str, target: str) -> float:
        loaded = self.loaded
        estimator = Estimator(
            loaded.model, loaded.input_shape, method, target, self.iterations or 1, accelerated=True,
            network=loaded.network,
        )  # fmt: skip
        if estimator.scales is not None:
            estimator.scales.begin_with(loaded.scales or {})
            fit_scales(estimator, progress=lambda fraction: self.progress(f"{method} {target}", fraction))
        with torch.no_grad():
            return float(estimator.estimate().contributions.sum())

    def promised(self) -> list[Constant]:
        """What layers that are Lipschitz by construction promise, if there are any."""
        began = time.perf_counter()
        values = promised_constants(self.loaded.model, self.loaded.input_shape, self.targets, self.progress)
        seconds = time.perf_counter() - began
        rows = []
        for target, value in values.items():
            rows.append(Constant(PROMISED, target, _mean(value), seconds, "by construction, proved"))
        return rows

    def floor(self) -> list[Constant]:
        """The steepest slopes found: no bound can be smaller."""
        rows = []
        for target in self.targets:
            began = time.perf_counter()
            value = estimate_sampled(self.loaded.model, self.loaded.input_shape, target, progress=self.progress)
            rows.append(Constant(FLOOR, target, _mean(value), time.perf_counter() - began, "from below"))
        return rows


def _mean(value: Tensor) -> float:
    """The mean constant; between a class and itself there is none."""
    count = value.numel()
    if value.dim() == 2:
        count -= len(value)
    return float(value.sum()) / max(count, 1)


def _overview(loaded: LoadedModel, rows: Sequence[Constant]) -> TextTable:
    """A line per method, a column per target."""
    targets = list(dict.fromkeys(row.target for row in rows))
    titles = [target if target == "network" else f"mean {target}" for target in targets]
    lines: list[list[str]] = []
    last = []
    for method in dict.fromkeys(row.method for row in rows):
        if method == FLOOR:
            last.append(len(lines))
        by_target = {row.target: row for row in rows if row.method == method}
        values = [by_target[target].value for target in targets]
        guarantees = dict.fromkeys(row.guarantee for row in by_target.values())
        cells = [NOTHING if value is None else f"{value:.6g}" for value in values]
        lines.append([method, *cells, _seconds(method, list(by_target.values())), "; ".join(guarantees)])
    caption = "l2; sampled: the largest slope found, which no bound can be below."
    return TextTable(
        _title(loaded), ["method", *titles, "seconds", "guarantee"], lines, caption, remark=True, lines=last
    )


def _seconds(method: str, rows: Sequence[Constant]) -> str:
    """How long a method took: guaranteed bounds of all targets are computed together, everything else one by one."""
    if all(row.value is None for row in rows):
        return NOTHING
    seconds = [row.seconds for row in rows]
    together = method != FLOOR and all(row.guarantee != "estimate" for row in rows)
    return f"{max(seconds) if together else sum(seconds):.2f}"


def _comparison(loaded: LoadedModel, rows: Sequence[Constant]) -> TextTable:
    """The constants with their ratio to the naive method."""
    naive = {row.target: row.value for row in rows if row.method == "naive"}
    cells, lines = [], []
    for k, row in enumerate(rows):
        if k > 0 and row.target != rows[k - 1].target:
            lines.append(k)
        value, reference = row.value or 0.0, naive.get(row.target)
        ratio = f"{value / reference:.3f}" if reference else ""
        cells.append([row.target, row.method, f"{value:.6g}", ratio, f"{row.seconds:.2f}", row.guarantee])
    columns = ["target", "method", "constant", "ratio", "seconds", "guarantee"]
    caption = "l2; per class and pairwise: the mean. ratio: to the naive method."
    return TextTable(_title(loaded), columns, cells, caption, words=2, remark=True, lines=lines)


def _title(loaded: LoadedModel) -> str:
    shape = "×".join(map(str, loaded.input_shape))
    return f"Lipschitz constants of {loaded.name} for inputs {shape}"
