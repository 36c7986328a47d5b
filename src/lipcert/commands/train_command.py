"""`lipcert train`: a run with a progress bar, its table and its report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lipcert.commands.options import (
    TRAIN_EPS_OPTION,
    AsJson,
    DataDir,
    Quiet,
    print_json,
    print_path,
)
from lipcert.commands.progress_bar import progress_bar
from lipcert.commands.terminal import console
from lipcert.errors import OptionError
from lipcert.processes import is_first_process

if TYPE_CHECKING:
    from lipcert.runs import Run

DEFAULT = "digits"


Config = Annotated[
    str | None,
    typer.Argument(help="Preset or TOML file; default: digits.", show_default=False),
]
RunFolder = Annotated[
    Path | None, typer.Option(help="New folder for the run; default: runs/<name>-<n>.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="key=value, such as loss.t=4; repeatable."),
]
Resumed = Annotated[
    Path | None,
    typer.Option("--resume", help="Continue the interrupted run in this folder."),
]


def train_command(
    config: Config = None,
    run_dir: RunFolder = None,
    data_dir: DataDir = None,
    eps: Annotated[float | None, TRAIN_EPS_OPTION] = None,
    set_: Overrides = None,
    resumed: Resumed = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train a certifiably robust classifier and certify it. Works under torchrun."""
    # An option that is silently left out would be taken for one that was used.
    if resumed is not None and (config or set_ or run_dir or eps):
        raise OptionError(
            "--resume continues a run as it was configured; leave out the preset "
            "and all other options"
        )
    from lipcert.training import TrainConfig, resume, train

    try:
        hidden = quiet or as_json or not is_first_process()
        with progress_bar(hidden) as progress:
            if resumed is not None:
                run = resume(resumed, data_dir, progress)
            else:
                chosen = TrainConfig.named(config or DEFAULT)
                if eps is not None:
                    # Before the overrides: what a user sets by hand is in the new units
                    # already.
                    chosen = chosen.at_epsilon(eps)
                chosen = chosen.with_overrides(set_ or [])
                run = train(chosen, run_dir, data_dir, progress)
    except KeyboardInterrupt as stop:
        if is_first_process():
            # `working_in` has put the command that continues into the interruption.
            print(*(stop.args or ["stopped"]), file=sys.stderr)
        raise
    if is_first_process():
        _show(run, as_json)


def _show(run: Run, as_json: bool) -> None:
    from lipcert.report import write_report

    page = write_report([run.folder])
    if as_json:
        print_json(
            {"folder": str(run.folder), "report": str(page), **run.summary.as_dict()}
        )
        return
    console.print(run)
    print_path("run", run.folder)
    print_path("report", page)
