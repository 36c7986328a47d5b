"""Tables for the terminal, for notebooks and for pandas, from plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from lipcert.errors import OptionError

if TYPE_CHECKING:
    import pandas
    from rich.table import Table


@dataclass(frozen=True)
class TextTable:
    """Cells of text under a title; the first column is a name, all others are numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str

    def rich(self) -> Table:
        """For the terminal."""
        from rich.markup import escape as plain
        from rich.table import Table

        table = Table(title=plain(self.title), caption=plain(self.caption))
        for k, column in enumerate(self.columns):
            table.add_column(plain(column), justify="right" if k else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*map(plain, row))
        return table

    def html(self) -> str:
        """For Jupyter: self-contained, in the colours of the page, dark or light."""
        head = _cells("th", self.columns)
        body = "".join(f"<tr>{_cells('td', row)}</tr>" for row in self.rows)
        return (
            f"<div><strong>{escape(self.title)}</strong>"
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
            f"<small>{escape(self.caption)}</small></div>"
        )


def _cells(tag: str, texts: Sequence[str]) -> str:
    sides = ("left" if k == 0 else "right" for k in range(len(texts)))
    return "".join(
        f'<{tag} style="text-align:{side}">{escape(text)}</{tag}>' for side, text in zip(sides, texts, strict=True)
    )


def data_frame(columns: Mapping[str, Any], index: str | None = None) -> pandas.DataFrame:
    """A pandas DataFrame of the columns, one of which may be its index."""
    try:
        import pandas
    except ImportError:
        raise OptionError("to_pandas needs pandas, which is not installed: pip install pandas") from None
    frame = pandas.DataFrame(dict(columns))
    return frame.set_index(index) if index else frame
