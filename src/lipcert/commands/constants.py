"""`lipcert bound`: constants by method and target, side by side."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table

from lipcert.bounds.certified import METHODS, bound_targets
from lipcert.bounds.estimator import Estimator
from lipcert.bounds.targets import TARGETS
from lipcert.loading import LoadedModel
from lipcert.norms.certified import Progress as Report


@dataclass(frozen=True)
class Constant:
    """One line of the table of constants."""

    method: str
    target: str
    value: float
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
    chosen = targets or TARGETS
    rows = []
    for method in methods or METHODS:
        if iterations is None:
            bounds = bound_targets(loaded.model, loaded.input_shape, method, chosen, progress=progress)
            rows += [Constant(method, t, b.mean, b.seconds, b.guarantee) for t, b in bounds.items()]
            continue
        for target in chosen:
            progress(f"{method} {target}", 0.0)
            began = time.perf_counter()
            estimator = Estimator(loaded.model, loaded.input_shape, method, target, iterations)
            with torch.no_grad():
                value = float(estimator.estimate().contributions.sum())
            rows.append(Constant(method, target, value, time.perf_counter() - began, "estimate"))
    return sorted(rows, key=lambda row: chosen.index(row.target))


def constants_table(loaded: LoadedModel, rows: Sequence[Constant]) -> Table:
    """The constants with their ratio to the naive method."""
    shape = "×".join(map(str, loaded.input_shape))
    table = Table(
        title=f"Lipschitz constants of {loaded.name} for inputs {shape}",
        caption="l2; per class and pairwise: the mean. ratio: to the naive method.",
    )
    for column, side in (("target", "left"), ("method", "left"), ("constant", "right"), ("ratio", "right"),
                         ("seconds", "right"), ("guarantee", "left")):  # fmt: skip
        table.add_column(column, justify=side)  # type: ignore[arg-type]
    naive = {row.target: row.value for row in rows if row.method == "naive"}
    previous = rows[0].target if rows else ""
    for row in rows:
        if row.target != previous:
            table.add_section()
            previous = row.target
        reference = naive.get(row.target)
        ratio = f"{row.value / reference:.3f}" if reference else ""
        table.add_row(row.target, row.method, f"{row.value:.6g}", ratio, f"{row.seconds:.2f}", row.guarantee)
    return table
