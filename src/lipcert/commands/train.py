"""`lipcert train` and `lipcert presets`: runs with a progress bar, and their tables."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from lipcert.commands.progress import progress_bar
from lipcert.errors import OptionError
from lipcert.training import Run, TrainConfig, presets, resume, train

DEFAULT = "digits"


def chosen_config(spec: str | None, overrides: Sequence[str]) -> TrainConfig:
    """The configuration of a preset or a TOML file, with overrides."""
    return TrainConfig.named(spec or DEFAULT).with_overrides(overrides)


def run(
    spec: str | None,
    overrides: Sequence[str],
    run_dir: Path | None,
    data_dir: Path | None,
    resumed: Path | None,
    *,
    quiet: bool,
) -> Run:
    """Begin a run, or continue one; the first process shows the progress, and how to go on after Ctrl-C."""
    if resumed is None:
        config = chosen_config(spec, overrides)
    elif spec or overrides or run_dir:
        raise OptionError("--resume continues a run as it was configured; leave out the preset, --set and --run-dir")
    try:
        with progress_bar(hidden=quiet or not is_first_process()) as progress:
            if resumed is None:
                return train(config, run_dir, data_dir, progress)
            return resume(resumed, data_dir, progress)
    except KeyboardInterrupt as stop:
        if is_first_process():
            print(*(stop.args or ["stopped"]), file=sys.stderr)
        raise


def is_first_process() -> bool:
    """Whether this process is the one that shows and writes."""
    return os.environ.get("RANK", "0") == "0"


def presets_table() -> Group:
    """All presets with what distinguishes them, and their notes."""
    table = Table(title="Presets of lipcert train", show_edge=False, pad_edge=False)  # fits 80 columns
    for column in ("preset", "model", "loss", "epochs", "ε (l2)"):
        table.add_column(column, overflow="fold")
    notes = []
    for name in presets():
        config = TrainConfig.preset(name)
        epsilons = ", ".join(f"{epsilon:.4g}" for epsilon in config.epsilons)
        table.add_row(name, config.model, config.loss.type, str(config.epochs), epsilons)
        notes.append(f"[bold]{name}[/]: {escape(config.note)}")
    return Group(table, *notes)
