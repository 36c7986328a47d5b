"""`lipcert sweep`: several values and seeds of one training, as a table of means and deviations and one report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lipcert.commands.options import AsJson, DataDir, Quiet, print_path, print_table
from lipcert.commands.progress_bar import progress_bar

if TYPE_CHECKING:
    from lipcert.display import TextTable
    from lipcert.training.sweeping import Cell, Spread


def sweep_command(
    config: Annotated[str, typer.Argument(help="Preset or TOML file.")],
    set_: Annotated[
        list[str],
        typer.Option(
            "--set", help="key=value,value, such as loss.t=3,5,8; repeatable."
        ),
    ],
    seeds: Annotated[
        int, typer.Option(help="How many seeds, from the configured one on.", min=1)
    ] = 1,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the sweep; default: sweeps/<name>.")
    ] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train with several values and seeds: mean ± standard deviation, and a report. Continues where it stopped."""
    from lipcert.report import write_report
    from lipcert.training import TrainConfig
    from lipcert.training.sweeping import SWEEP, sweep

    base = TrainConfig.named(config)
    # A fixed name, unlike that of a run: the same command finds what it has begun.
    folder = out or Path("sweeps") / base.name
    try:
        with progress_bar(hidden=quiet or as_json) as progress:
            cells = sweep(base, set_, seeds, folder, data_dir, progress)
    except KeyboardInterrupt:
        print("stopped; the same command continues the sweep", file=sys.stderr)
        # The exit code is that of an interruption.
        raise
    page = write_report([run.folder for cell in cells for run in cell.runs], folder)
    if as_json:
        print((folder / SWEEP).read_text("utf-8"), end="")
        return
    print_table(_table(base.name, cells, seeds))
    print_path("report", page)


def _table(name: str, cells: Sequence[Cell], seeds: int) -> TextTable:
    from lipcert.display import NOTHING, TextTable

    keys = list(cells[0].values)
    # Cells of a sweep over ε have shares at their own ε only.
    figures = list(dict.fromkeys(figure for cell in cells for figure in cell.spreads()))
    rows = []
    for cell in cells:
        spreads = cell.spreads()
        row = list(cell.values.values())
        for figure in figures:
            row.append(
                _shown(figure, spreads[figure]) if figure in spreads else NOTHING
            )
        rows.append(row)
    caption = (
        f"Mean{' ± standard deviation' if seeds > 1 else ''} over {seeds} "
        f"seed{'s' if seeds > 1 else ''}."
    )
    return TextTable(
        f"sweep of {name}", [*keys, *figures], rows, caption, words=len(keys)
    )


def _shown(figure: str, spread: Spread) -> str:
    """A share in per cent, a radius as a number."""
    form = ".4f" if "radius" in figure else ".2%"
    if spread.deviation is None:
        return f"{spread.mean:{form}}"
    return f"{spread.mean:{form}} ± {spread.deviation:{form}}"
