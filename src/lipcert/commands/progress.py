"""The progress bar of the command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lipcert.norms.certified import Progress as Report


@contextmanager
def progress_bar(hidden: bool = False) -> Iterator[Report]:
    """A progress bar with the remaining time, on standard error."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=hidden) as bar:
        tasks: dict[str, Any] = {}

        def report(what: str, fraction: float) -> None:
            if what not in tasks:
                for task in tasks.values():
                    bar.update(task, visible=False)
                tasks[what] = bar.add_task(what, total=1.0)
            bar.update(tasks[what], completed=fraction)

        yield report
