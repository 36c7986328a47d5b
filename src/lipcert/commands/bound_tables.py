"""The tables of `lipcert bound`: every method above the slopes that were found, or methods beside the naive one."""

from __future__ import annotations

from collections.abc import Sequence

from lipcert.commands.bound_task import FLOOR, ConstantRow
from lipcert.display import NOTHING, TextTable
from lipcert.models import LoadedModel


def overview(loaded: LoadedModel, rows: Sequence[ConstantRow]) -> TextTable:
    """A line per method, a column per target."""
    targets = list(dict.fromkeys(row.target for row in rows))
    titles = [target if target == "network" else f"mean {target}" for target in targets]
    lines: list[list[str]] = []
    last = []
    for method in dict.fromkeys(row.method for row in rows):
        if method == FLOOR:
            # A line above the sampled slopes: what is over it are bounds, below it is
            # the floor.
            last.append(len(lines))
        by_target = {row.target: row for row in rows if row.method == method}
        values = [by_target[target].value for target in targets]
        # Mostly the same for all targets, and said once.
        guarantees = dict.fromkeys(row.guarantee for row in by_target.values())
        cells = [NOTHING if value is None else f"{value:.6g}" for value in values]
        lines.append(
            [
                method,
                *cells,
                _seconds(method, list(by_target.values())),
                "; ".join(guarantees),
            ]
        )
    caption = "l2; sampled: the largest slope found, which no bound can be below."
    return TextTable(
        _title(loaded),
        ["method", *titles, "seconds", "guarantee"],
        lines,
        caption,
        remark=True,
        lines=last,
    )


def _seconds(method: str, rows: Sequence[ConstantRow]) -> str:
    """How long a method took: guaranteed bounds of all targets are computed together, everything else one by one."""
    # A method that refuses the network took no time worth showing.
    if all(row.value is None for row in rows):
        return NOTHING
    seconds = [row.seconds for row in rows]
    # Every row of a guaranteed method has the time of all its targets: their sum would
    # count it several times.
    together = method != FLOOR and all(row.guarantee != "estimate" for row in rows)
    return f"{max(seconds) if together else sum(seconds):.2f}"


def comparison(loaded: LoadedModel, rows: Sequence[ConstantRow]) -> TextTable:
    """The constants with their ratio to the naive method."""
    naive = {row.target: row.value for row in rows if row.method == "naive"}
    cells, lines = [], []
    for k, row in enumerate(rows):
        # Rows come target by target.
        if k > 0 and row.target != rows[k - 1].target:
            lines.append(k)
        # No ratio without the naive method, nor to a naive constant of 0.
        value, reference = row.value or 0.0, naive.get(row.target)
        ratio = f"{value / reference:.3f}" if reference else ""
        cells.append(
            [
                row.target,
                row.method,
                f"{value:.6g}",
                ratio,
                f"{row.seconds:.2f}",
                row.guarantee,
            ]
        )
    columns = ["target", "method", "constant", "ratio", "seconds", "guarantee"]
    caption = "l2; per class and pairwise: the mean. ratio: to the naive method."
    return TextTable(
        _title(loaded), columns, cells, caption, words=2, remark=True, lines=lines
    )


def _title(loaded: LoadedModel) -> str:
    shape = "×".join(map(str, loaded.input_shape))
    return f"Lipschitz constants of {loaded.name} for inputs {shape}"
