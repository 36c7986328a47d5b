"""Tables with the published number beside ours, and what an experiment yields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lipcert.display import TextTable
from lipcert.runs import Summary
from lipcert.training import TrainConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Cell:
    """Our number and the paper's, in the same unit; None where there is none. digits: after the point."""

    ours: float | None = None
    published: float | None = None
    digits: int = 2

    def __str__(self) -> str:
        ours = "–" if self.ours is None else f"{self.ours:.{self.digits}f}"
        return (
            ours
            if self.published is None
            else f"{ours} ({self.published:.{self.digits}f})"
        )

    def as_dict(self) -> dict[str, float | None]:
        return {"ours": self.ours, "published": self.published}


@dataclass(frozen=True)
class Row:
    """heads: what the row is about, one per head column. failed: why there are no numbers of ours, if so."""

    heads: tuple[str, ...]
    cells: Mapping[str, Cell]
    failed: str = ""


@dataclass(frozen=True)
class Table:
    """Rows × columns; a row need not have a cell in every column."""

    heads: tuple[str, ...]
    columns: tuple[str, ...]
    rows: Sequence[Row]

    def texts(self) -> list[tuple[str, ...]]:
        """The rows as text, a failure marked in its first cell."""
        result = []
        for row in self.rows:
            cells = [
                str(row.cells[name]) if name in row.cells else "–"
                for name in self.columns
            ]
            if row.failed:
                cells[0] = f"failed {cells[0].removeprefix('–').strip()}".strip()
            result.append((*row.heads, *cells))
        return result

    def as_dict(self) -> dict[str, Any]:
        rows = [
            {
                **dict(zip(self.heads, row.heads, strict=True)),
                **{name: cell.as_dict() for name, cell in row.cells.items()},
                **({"failed": row.failed} if row.failed else {}),
            }
            for row in self.rows
        ]
        return {"heads": self.heads, "columns": self.columns, "rows": rows}

    def as_text(self) -> TextTable:
        """For the terminal, in Markdown and in LaTeX."""
        return TextTable(
            "", (*self.heads, *self.columns), self.texts(), words=len(self.heads)
        )


@dataclass(frozen=True)
class Finished:
    """A finished run with what was measured on it."""

    config: TrainConfig
    folder: Path
    summary: Summary
    metrics: Sequence[Mapping[str, Any]] = field(repr=False)
    measured: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True)
class Failed:
    """A configuration that gave no result, and why."""

    config: TrainConfig
    reason: str


@dataclass(frozen=True)
class Outcome:
    """A table, a figure if the paper has one, and sentences that a reader needs."""

    table: Table
    notes: Sequence[str] = ()
    figure: Figure | None = field(default=None, repr=False)
    numbers: Mapping[str, Any] = field(default_factory=dict, repr=False)
