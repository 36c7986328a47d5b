"""How a `Run` looks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lipcert.display.frames import data_frame
from lipcert.display.plots import draw_lines
from lipcert.display.style import new_figure
from lipcert.display.text_table import TextTable
from lipcert.display.training_curves import training_curves
from lipcert.display.views import frame, plot, table
from lipcert.runs import Run, Summary
from lipcert.runs.metrics import flat_metrics

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


@table.register(Run)
def run_table(run: Run) -> TextTable:
    """Accuracies of the run and of its twin; certified by guaranteed bounds only."""
    summary = run.summary
    some = (
        f" ({summary.attacked_inputs:,} inputs)"
        if summary.attacked_inputs < summary.inputs
        else ""
    )
    columns = ["loss", "clean"]
    for entry in summary.at:
        if entry.attacked is not None:
            columns.append(f"attacked at ε = {entry.epsilon:.4g}{some}")
        columns.append(f"certified at ε = {entry.epsilon:.4g}")
    columns.append("median radius")
    rows, notes = [_row(summary)], []
    if summary.note:
        notes.append(summary.note)
    if run.standard is not None:
        rows.append(_row(run.standard.summary))
        notes.append("standard: the same network, trained for accuracy only.")
    notes.append(
        f"Trained in {summary.training_seconds:.0f} s. Certified: "
        f"{summary.guarantee}; executed in "
        f"{summary.execution}, rounding included; {summary.units}. Folder: {run.folder}"
    )
    title = (
        f"{summary.name}: {summary.model} on {summary.data_title}, "
        f"{summary.inputs:,} test inputs"
    )
    return TextTable(title, columns, rows, " ".join(notes))


def _row(summary: Summary) -> list[str]:
    cells = [str(summary.loss), f"{summary.clean:.2%}"]
    for entry in summary.at:
        if entry.attacked is not None:
            cells.append(f"{entry.attacked:.2%}")
        cells.append(f"{entry.certified:.2%}")
    return [*cells, f"{summary.median_radius:.4f}"]


@plot.register(Run)
def run_figure(run: Run) -> Figure:
    """Losses, accuracies and mean constants over the epochs; constants and certified shares are estimates."""
    panels = training_curves(run.metrics)
    figure, axes = new_figure(columns=len(panels), size=(4.4, 3.4))
    for place, panel in zip(axes, panels, strict=True):
        draw_lines(
            place,
            panel.curves,
            "epoch",
            panel.quantity,
            percent=panel.percent,
            logarithmic=panel.logarithmic,
        )
    return figure


@frame.register(Run)
def run_frame(run: Run) -> pandas.DataFrame:
    """The metrics, one row per epoch, None where an epoch has no value."""
    columns: dict[str, list[Any]] = {"epoch": []}
    for row, record in enumerate(run.metrics):
        # `flat_metrics` makes floats of everything; epochs stay whole numbers.
        values: dict[str, Any] = {**flat_metrics(record), "epoch": record["epoch"]}
        for name in values:
            # A metric that first appears in epoch 5 has four empty cells above it.
            columns.setdefault(name, [None] * row)
        for name, column in columns.items():
            column.append(values.get(name))
    return data_frame(columns, index="epoch")
