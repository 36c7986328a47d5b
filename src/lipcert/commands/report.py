"""`lipcert report`: the page of some runs, and their table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lipcert.errors import check_choice
from lipcert.report.page import LATEX, MARKDOWN, write_report

TABLES = {"markdown": MARKDOWN, "latex": LATEX}


def report(folders: Sequence[Path], out: Path | None, table: str | None) -> tuple[Path, str | None]:
    """Write the page with its figures and tables; returns its path, and the table in the form that is asked for."""
    if table is not None:
        check_choice("--table", table, list(TABLES))
    page = write_report(folders, out)
    return page, page.with_name(TABLES[table]).read_text("utf-8") if table is not None else None
