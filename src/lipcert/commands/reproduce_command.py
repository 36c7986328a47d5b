"""`lipcert reproduce`: the paper's tables and figures.

They are made by another package, lipcert_experiments, which is imported when the
command runs.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from lipcert.commands.options import DataDir, Quiet, print_path, print_table
from lipcert.commands.progress_bar import progress_bar
from lipcert.commands.terminal import console
from lipcert.errors import OptionError

BUDGETS = ("tiny", "hour", "paper")


Name = Annotated[
    str | None, typer.Argument(help="A table or figure; without it, the list.")
]
Budget = Annotated[
    str, typer.Option(help="tiny (digits), hour (two cores) or paper (in full).")
]
ResultsFolder = Annotated[
    Path, typer.Option(help="Folder of results and of the runs they share.")
]
Protocol = Annotated[
    str, typer.Option(help="lipcert, or authors: their PGD, CIFAR-10 in [-1, 1].")
]
Epochs = Annotated[
    int | None, typer.Option(help="Of every run, instead of the budget's.")
]
Seed = Annotated[int, typer.Option(help="Of every run.")]
ShowList = Annotated[bool, typer.Option("--list", help="List all tables and figures.")]


def reproduce(
    name: Name = None,
    budget: Budget = "tiny",
    data_dir: DataDir = None,
    out: ResultsFolder = Path("runs/reproduce"),
    protocol: Protocol = "lipcert",
    epochs: Epochs = None,
    seed: Seed = 0,
    show_list: ShowList = False,
    quiet: Quiet = False,
) -> None:
    """Tables and figures of the paper, the published numbers beside ours. Continues where it stopped.

    Exits with 1 if a configuration failed; the table says which and why.
    """
    _check_installed()
    if name is None or show_list:
        _list_experiments()
        return
    from lipcert_experiments import Plan
    from lipcert_experiments import reproduce as run_experiment

    with progress_bar(hidden=quiet) as progress:
        done = run_experiment(
            name, Plan(budget, protocol, epochs, seed), out, data_dir, progress
        )
    print_table(done.table())
    print_path("results", done.folder)
    # After the table: what has succeeded is shown all the same.
    if done.failed:
        raise typer.Exit(1)


def _list_experiments() -> None:
    """All experiments with what they are and how long they take."""
    from lipcert_experiments import EXPERIMENTS

    table = Table(
        title="Tables and figures of the paper",
        caption="tiny: small networks on the embedded digits. hour: fewer epochs and "
        "configurations, on two cores. "
        "paper: the paper's settings in full, for a GPU. Rough times; runs are "
        "shared between experiments.",
    )
    table.add_column("name", no_wrap=True)
    table.add_column("what")
    for budget in BUDGETS:
        table.add_column(budget, no_wrap=True, justify="right")
    for experiment in EXPERIMENTS.values():
        times = (experiment.minutes[budget] for budget in BUDGETS)
        table.add_row(experiment.name, experiment.what, *times)
    console.print(table)


def _check_installed() -> None:
    # Asked without importing, which takes a while.
    if find_spec("lipcert_experiments") is None:
        raise OptionError(
            "lipcert reproduce needs the package lipcert_experiments, which "
            "is not installed: "
            "run `pip install .` in a checkout of lipcert, which brings both"
        )
