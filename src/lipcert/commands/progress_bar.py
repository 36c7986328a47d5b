"""How commands show what they are doing: a bar in a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Column

from lipcert.progress import Progress, no_progress

_SECONDS = 30.0


@contextmanager
def progress_bar(hidden: bool = False) -> Iterator[Progress]:
    """Progress with the remaining time and the latest figures, on standard error."""
    # Standard output is for results, which may be piped.
    console = Console(stderr=True)
    if hidden:
        yield no_progress
    elif not console.is_terminal:
        # A bar would fill a log with control characters.
        yield Lines()
    else:
        with _bar(console) as report:
            yield report


class Lines:
    """Prints a line every half minute, and one at the end of a training."""

    def __init__(self) -> None:
        self.what, self.first, self.fraction = "", 0.0, 0.0
        self.began = self.printed = time.monotonic()

    def __call__(self, what: str, fraction: float, figures: str = "") -> None:
        now = time.monotonic()
        # Another piece of work, or the same one anew: its speed is measured from here.
        if what != self.what or fraction < self.fraction:
            self.what, self.first, self.began = what, fraction, now
        self.fraction = fraction
        if now - self.printed < _SECONDS and not (figures and fraction == 1):
            return
        self.printed = now
        parts = [f"{what} {fraction:.0%}", figures]
        # Time per fraction since the start of this piece, which a resumed run does not
        # begin at 0.
        if self.first < fraction < 1:
            seconds = (now - self.began) * (1 - fraction) / (fraction - self.first)
            parts.insert(1, f"left {timedelta(seconds=round(seconds))}")
        print("  ".join(part for part in parts if part), file=sys.stderr, flush=True)


@contextmanager
def _bar(console: Console) -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn(
            "{task.fields[figures]}", table_column=Column(no_wrap=True, ratio=1)
        ),  # what is left of the width
    )
    with Bar(*columns, console=console, transient=True, expand=True) as bar:
        # A dictionary, for the function below to change.
        current: dict[str, Any] = {"what": None, "task": None, "fraction": 0.0}

        def report(what: str, fraction: float, figures: str = "") -> None:
            if what != current["what"] or fraction < current["fraction"]:
                if current["task"] is not None:
                    bar.remove_task(current["task"])
                # A resumed run does not begin at 0: what was done before must not count
                # as speed.
                current["task"] = bar.add_task(
                    what, total=1.0 - fraction, figures=figures
                )
                current["start"] = fraction
            current["what"], current["fraction"] = what, fraction
            bar.update(
                current["task"],
                completed=fraction - current["start"],
                figures=escape(figures),
            )

        yield report
