"""`lipcert report`: the page of some runs, and their table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lipcert.commands.options import print_path
from lipcert.errors import check_choice
from lipcert.layout import LATEX, MARKDOWN

TABLES = {"markdown": MARKDOWN, "latex": LATEX}


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of runs, or that certify has written.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Where to write; default: the first run's folder."),
    ] = None,
    table: Annotated[
        str | None, typer.Option(help="Print the table of the runs: markdown or latex.")
    ] = None,
) -> None:
    """A page on one run or several side by side, with figures and tables; nothing is computed again."""
    from lipcert.models.shipped import shipped_folder
    from lipcert.report import write_report

    # Before the page is written, which takes a while.
    if table is not None:
        check_choice("--table", table, list(TABLES))
    folders = []
    for run in runs:
        shipped = None if run.exists() else shipped_folder(str(run))
        if shipped is not None and out is None:
            out = Path("runs") / run  # nothing is written into the installation
        folders.append(shipped or run)
    page = write_report(folders, out)
    if table is None:
        print_path("report", page)
    else:
        # The file as it was written, so that it can be piped.
        print(page.with_name(TABLES[table]).read_text("utf-8"), end="")
