"""`lipcert presets`: the configurations that come with lipcert."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from lipcert.commands.terminal import console


def list_presets() -> None:
    """The configurations that come with lipcert."""
    from lipcert.training import TrainConfig, presets

    table = Table(
        title="Presets of lipcert train", show_edge=False, pad_edge=False
    )  # fits 80 columns
    for column in ("preset", "model", "loss", "epochs", "ε (l2)"):
        table.add_column(column, overflow="fold")
    notes = []
    for name in presets():
        config = TrainConfig.preset(name)
        # One below the other, to keep the table narrow.
        epsilons = "\n".join(f"{epsilon:.4g}" for epsilon in config.epsilons)
        table.add_row(
            name, config.model, config.loss.type, str(config.epochs), epsilons
        )
        notes.append(f"[bold]{name}[/]: {escape(config.note)}")
    console.print(table, *notes, sep="\n")
