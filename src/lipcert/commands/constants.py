"""`lipcert bound`: constants by method and target, side by side."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from lipcert.bounds.compute import bound_targets, promised_constants
from lipcert.bounds.estimator import METHODS as ESTIMATES
from lipcert.bounds.estimator import Estimator
from lipcert.bounds.fit import FitOptions, fit_scales
from lipcert.bounds.methods import METHODS
from lipcert.bounds.sampled import estimate_sampled
from lipcert.bounds.targets import TARGETS
from lipcert.errors import OptionError, TooLargeError
from lipcert.loading import LoadedModel
from lipcert.progress import Progress as Report

ALL = "all"
"""The method that stands for all of them, with the sampled slopes as the floor."""
QUICK = ("naive", "liplt")
FLOOR = "sampled"
PROMISED = "promised"


@dataclass(frozen=True)
class Constant:
    """One line of the table of constants; without a value, `guarantee` says why the method refuses the network."""

    method: str
    target: str
    value: float | None
    seconds: float
    guarantee: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def constants(
    loaded: LoadedModel,
    methods: Sequence[str] | None,
    targets: Sequence[str] | None,
    iterations: int | None,
    progress: Report,
) -> list[Constant]:
    """Every method for every target: estimates if a number of iterations is given, guaranteed bounds otherwise."""
    everything = ALL in (methods or ())
    chosen = list(targets or (("network", "pairwise") if everything else TARGETS))
    known = METHODS if iterations is None else ESTIMATES
    rows: list[Constant] = []
    for method in known if everything else methods or QUICK:
        if iterations is None:
            rows += _bounds(loaded, method, chosen, everything, progress)
        else:
            rows += [_estimate(loaded, method, target, iterations, progress) for target in chosen]
    if everything:
        return rows + list(_promised(loaded, chosen, progress)) + list(_floor(loaded, chosen, progress))
    return sorted(rows, key=lambda row: chosen.index(row.target))


def _bounds(
    loaded: LoadedModel, method: str, targets: Sequence[str], refusals: bool, progress: Report
) -> list[Constant]:
    """The constants of one method; with `refusals`, a method that cannot treat the network says so in its rows."""
    try:
        fit = FitOptions(start=loaded.scales)
        bounds = bound_targets(
            loaded.model, loaded.input_shape, method, targets, fit=fit, network=loaded.network, progress=progress
        )
    except (TooLargeError, OptionError) as error:
        if not refusals:
            raise
        if isinstance(error, OptionError) and len(targets) > 1:  # perhaps it has only some of the targets
            return [row for target in targets for row in _bounds(loaded, method, [target], True, progress)]
        return [Constant(method, target, None, 0.0, str(error).split(";")[0]) for target in targets]
    return [Constant(method, t, b.mean, b.seconds, b.guarantee) for t, b in bounds.items()]


def _estimate(loaded: LoadedModel, method: str, target: str, iterations: int, progress: Report) -> Constant:
    progress(f"{method} {target}", 0.0)
    began = time.perf_counter()
    estimator = Estimator(loaded.model, loaded.input_shape, method, target, iterations, accelerated=True)
    if estimator.scales is not None:
        estimator.scales.begin_with(loaded.scales or {})
        fit_scales(estimator, progress=lambda fraction: progress(f"{method} {target}", fraction))
    with torch.no_grad():
        value = float(estimator.estimate().contributions.sum())
    return Constant(method, target, value, time.perf_counter() - began, "estimate")


def _promised(loaded: LoadedModel, targets: Sequence[str], progress: Report) -> Iterator[Constant]:
    """What layers that are Lipschitz by construction promise, if there are any."""
    began = time.perf_counter()
    values = promised_constants(loaded.model, loaded.input_shape, targets, progress)
    for target, value in values.items():
        yield Constant(PROMISED, target, _mean(value), time.perf_counter() - began, "by construction, proved")


def _mean(value: Tensor) -> float:
    count = value.numel() - (len(value) if value.dim() == 2 else 0)  # the diagonal is zero
    return float(value.sum()) / max(count, 1)


def _floor(loaded: LoadedModel, targets: Sequence[str], progress: Report) -> Iterator[Constant]:
    """The steepest slopes found: no bound can be smaller."""
    for target in targets:
        began = time.perf_counter()
        value = estimate_sampled(loaded.model, loaded.input_shape, target, progress=progress)
        yield Constant(FLOOR, target, _mean(value), time.perf_counter() - began, "from below")


def overview_table(loaded: LoadedModel, rows: Sequence[Constant]) -> Table:
    """A line per method, a column per target."""
    targets = list(dict.fromkeys(row.target for row in rows))
    table = Table(title=_title(loaded), caption="l2; sampled: the largest slope found, which no bound can be below.")
    table.add_column("method", overflow="fold")
    for target in targets:
        table.add_column(target if target == "network" else f"mean {target}", justify="right", overflow="fold")
    table.add_column("seconds", justify="right", overflow="fold")
    table.add_column("guarantee", overflow="fold")
    for method in dict.fromkeys(row.method for row in rows):
        own = {row.target: row for row in rows if row.method == method}
        values = [own[target].value for target in targets]
        shared = method != FLOOR and all(row.guarantee != "estimate" for row in own.values())
        seconds = (max if shared else sum)(row.seconds for row in own.values())
        if method == FLOOR:
            table.add_section()
        table.add_row(
            method,
            *("–" if value is None else f"{value:.6g}" for value in values),
            "–" if all(value is None for value in values) else f"{seconds:.2f}",
            "; ".join(dict.fromkeys(row.guarantee for row in own.values())),
        )
    return table


def constants_table(loaded: LoadedModel, rows: Sequence[Constant]) -> Table:
    """The constants with their ratio to the naive method."""
    table = Table(title=_title(loaded), caption="l2; per class and pairwise: the mean. ratio: to the naive method.")
    for column, side in (("target", "left"), ("method", "left"), ("constant", "right"), ("ratio", "right"),
                         ("seconds", "right"), ("guarantee", "left")):  # fmt: skip
        table.add_column(column, justify=side, overflow="fold")  # type: ignore[arg-type]
    naive = {row.target: row.value for row in rows if row.method == "naive"}
    previous = rows[0].target if rows else ""
    for row in rows:
        if row.target != previous:
            table.add_section()
            previous = row.target
        value, reference = row.value or 0.0, naive.get(row.target)
        ratio = f"{value / reference:.3f}" if reference else ""
        table.add_row(row.target, row.method, f"{value:.6g}", ratio, f"{row.seconds:.2f}", row.guarantee)
    return table


def _title(loaded: LoadedModel) -> str:
    shape = "×".join(map(str, loaded.input_shape))
    return f"Lipschitz constants of {loaded.name} for inputs {shape}"
