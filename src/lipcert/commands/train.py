"""`lipcert train` and `lipcert presets`: runs with a progress bar, and their tables."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.markup import escape
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from lipcert.errors import OptionError
from lipcert.training import Run, TrainConfig, presets, resume, train
from lipcert.training.loop import Progress

DEFAULT = "digits"


def chosen_config(spec: str | None, overrides: Sequence[str]) -> TrainConfig:
    """The configuration of a preset or a TOML file, with overrides."""
    spec = spec or DEFAULT
    is_file = spec.endswith(".toml") or Path(spec).is_file()
    return (TrainConfig.from_toml(spec) if is_file else TrainConfig.preset(spec)).with_overrides(overrides)


def run(
    spec: str | None,
    overrides: Sequence[str],
    run_dir: Path | None,
    data_dir: Path | None,
    resumed: Path | None,
    *,
    quiet: bool,
) -> Run:
    """Begin a run, or continue one, with a progress bar on the first process."""
    if resumed is None:
        config = chosen_config(spec, overrides)
    elif spec or overrides or run_dir:
        raise OptionError("--resume continues a run as it was configured; leave out the preset, --set and --run-dir")
    with training_bar(hidden=quiet or not is_first_process()) as progress:
        if resumed is None:
            return train(config, run_dir, data_dir, progress)
        return resume(resumed, data_dir, progress)


def is_first_process() -> bool:
    """Whether this process is the one that shows and writes."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def training_bar(hidden: bool = False) -> Iterator[Progress]:
    """A progress bar with the remaining time and the latest figures, on standard error."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True, disable=hidden) as bar:
        current: dict[str, Any] = {"what": None, "task": None, "fraction": 0.0}

        def report(what: str, fraction: float, figures: str = "") -> None:
            if what != current["what"] or fraction < current["fraction"]:
                if current["task"] is not None:
                    bar.remove_task(current["task"])
                # A resumed run does not begin at 0: what was done before must not count as speed.
                current["task"] = bar.add_task(what, total=1.0 - fraction, figures=figures)
                current["start"] = fraction
            current["what"], current["fraction"] = what, fraction
            bar.update(current["task"], completed=fraction - current["start"], figures=escape(figures))

        yield report


def presets_table() -> Group:
    """All presets with what distinguishes them, and their notes."""
    table = Table(title="Presets of lipcert train")
    for column in ("preset", "model", "loss", "epochs", "ε (l2)"):
        table.add_column(column, no_wrap=True)
    notes = []
    for name in presets():
        config = TrainConfig.preset(name)
        epsilons = ", ".join(f"{epsilon:.4g}" for epsilon in config.epsilons)
        table.add_row(name, config.model, config.loss.type, str(config.epochs), epsilons)
        notes.append(f"[bold]{name}[/]: {escape(config.note)}")
    return Group(table, *notes)
