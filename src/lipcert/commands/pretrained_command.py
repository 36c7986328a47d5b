"""`lipcert pretrained`: the trained networks that come with lipcert."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lipcert.commands.options import print_table
from lipcert.layout import MODEL

if TYPE_CHECKING:
    from lipcert.runs.summary import Accuracy, Summary


def pretrained_command() -> None:
    """The trained networks that come with lipcert, with what they reach on all test images."""
    from lipcert.display import TextTable
    from lipcert.models.shipped import shipped_names
    from lipcert.runs.pretrained import pretrained_folder
    from lipcert.runs.summary import read_summary

    rows = []
    for name in shipped_names():
        folder = pretrained_folder(name)
        summary = read_summary(folder)
        size = (folder / MODEL).stat().st_size / 1e6
        for entry in summary.at:
            rows.append(_row(name, summary, entry, size))
    columns = (
        "name",
        "data",
        "executed in",
        "ε (l2)",
        "clean",
        "attacked",
        "certified",
        "MB",
    )
    note = (
        "Certified by guaranteed bounds, rounding included. "
        "lipcert.pretrained(NAME) is the classifier, "
        "lipcert certify NAME --data-dir DATA repeats its figures, lipcert train "
        "NAME trains it again."
    )
    print_table(TextTable("Pretrained networks", columns, rows, note, words=3))


def _row(name: str, summary: Summary, entry: Accuracy, size: float) -> list[str]:
    from lipcert.display import NOTHING

    attacked = NOTHING
    if entry.attacked is not None:
        attacked = f"{entry.attacked:.2%}"
        # Shares of different inputs look comparable: the number says that they are not.
        if summary.attacked_inputs < summary.inputs:
            attacked += f" of {summary.attacked_inputs:,}"
    figures = [
        f"{summary.clean:.2%}",
        attacked,
        f"{entry.certified:.2%}",
        f"{size:.1f}",
    ]
    return [
        name,
        summary.data_title,
        summary.execution,
        f"{entry.epsilon:.4g}",
        *figures,
    ]
