"""`lipcert reproduce`: its tables on the terminal.

The tables themselves are made by another package, lipcert_experiments, which is imported when the command runs.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from lipcert.errors import OptionError
from lipcert.progress import Progress

if TYPE_CHECKING:
    from lipcert_experiments import Reproduction


def run(
    name: str,
    budget: str,
    protocol: str,
    epochs: int | None,
    seed: int,
    out: Path,
    data_dir: Path | None,
    progress: Progress,
) -> Reproduction:
    """Reproduce an experiment by name."""
    _check_installed()
    from lipcert_experiments import Plan, reproduce

    return reproduce(name, Plan(budget, protocol, epochs, seed), out, data_dir, progress)


def experiments_table() -> Table:
    """All experiments with what they are and how long they take."""
    _check_installed()
    from lipcert_experiments import EXPERIMENTS

    table = Table(
        title="Tables and figures of the paper",
        caption="tiny: small networks on the embedded digits. hour: fewer epochs and configurations, on two cores. "
        "paper: the paper's settings in full, for a GPU. Rough times; runs are shared between experiments.",
    )
    table.add_column("name", no_wrap=True)
    table.add_column("what")
    for budget in ("tiny", "hour", "paper"):
        table.add_column(budget, no_wrap=True, justify="right")
    for experiment in EXPERIMENTS.values():
        times = (experiment.minutes[budget] for budget in ("tiny", "hour", "paper"))
        table.add_row(experiment.name, experiment.what, *times)
    return table


def outcome_table(done: Reproduction) -> Table:
    """The table of an experiment; in parentheses the published numbers."""
    table = Table(title=f"{done.experiment.name}: {escape(done.experiment.what)}", caption=escape(" ".join(done.notes)))
    for head in done.outcome.table.heads:
        table.add_column(escape(head), overflow="fold")
    for column in done.outcome.table.columns:
        table.add_column(escape(column), justify="right", overflow="fold")
    for row in done.outcome.table.texts():
        table.add_row(*(escape(cell) for cell in row))
    return table


def _check_installed() -> None:
    if find_spec("lipcert_experiments") is None:
        raise OptionError(
            "lipcert reproduce needs the package lipcert_experiments, which is not installed: "
            "run `pip install .` in a checkout of lipcert, which brings both"
        )
