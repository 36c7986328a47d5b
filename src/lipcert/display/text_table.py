"""One table of text for the terminal, for notebooks, in Markdown and in LaTeX."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table

NOTHING = "–"
"""In cells without a value."""
_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "_": r"\_",
    "#": r"\#",
    "$": r"\$",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "ε": r"$\varepsilon$",
    "λ": r"$\lambda$",
    "±": r"$\pm$",
    "×": r"$\times$",
    "≥": r"$\geq$",
    "−": "$-$",
    "√": r"$\surd$",
    "–": "--",
    "\u202f": r"\,",
}


@dataclass(frozen=True)
class TextTable:
    """Cells of text under a title; the first `words` columns are words, all others are numbers.

    remark: whether the last column has words too.
    lines: the numbers of the rows above which a line is drawn.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    words: int = 1
    remark: bool = False
    lines: Collection[int] = ()

    def is_number(self, column: int) -> bool:
        """Whether a column has numbers, which stand on the right."""
        if self.remark and column == len(self.columns) - 1:
            return False
        return column >= self.words

    def rich(self) -> FittedTable:
        """For the terminal: a grid, or, where it is too narrow for the numbers, one line per cell."""
        return FittedTable(self)

    def grid(self) -> Table:
        """Rows and columns; words are wrapped, numbers are not."""
        from rich.markup import escape as plain
        from rich.table import Table

        # Brackets in names of runs would be markup to rich.
        table = Table(title=plain(self.title), caption=plain(self.caption))
        for k, column in enumerate(self.columns):
            number = self.is_number(k)
            table.add_column(
                plain(column),
                justify="right" if number else "left",
                overflow="fold",
                no_wrap=number,
            )
        for k, row in enumerate(self.rows):
            if k in self.lines:
                table.add_section()
            table.add_row(*map(plain, row))
        return table

    def html(self) -> str:
        """For Jupyter: self-contained, in the colours of the page, dark or light."""
        body = "".join(self._html_row("td", row) for row in self.rows)
        return (
            f"<div><strong>{escape(self.title)}</strong>"
            f"<table><thead>{self._html_row('th', self.columns)}</thead><tbody>{body}</tbody></table>"
            f"<small>{escape(self.caption)}</small></div>"
        )

    def _html_row(self, tag: str, row: Sequence[str]) -> str:
        cells = []
        for k, text in enumerate(row):
            side = "right" if self.is_number(k) else "left"
            cells.append(f'<{tag} style="text-align:{side}">{escape(text)}</{tag}>')
        return f"<tr>{''.join(cells)}</tr>"

    def markdown(self) -> str:
        """The cells alone, without title and caption."""
        # Colons say on which side of a column its cells stand.
        sides = [
            "---:" if self.is_number(k) else ":---" for k in range(len(self.columns))
        ]
        lines = [_markdown_row(self.columns), f"| {' | '.join(sides)} |\n"]
        lines.extend(map(_markdown_row, self.rows))
        return "".join(lines)

    def latex(self) -> str:
        """The cells alone, as a tabular; it needs the package booktabs."""
        sides = "".join(
            "r" if self.is_number(k) else "l" for k in range(len(self.columns))
        )
        lines = [
            rf"\begin{{tabular}}{{{sides}}}",
            r"\toprule",
            _latex_row(self.columns),
            r"\midrule",
        ]
        for k, row in enumerate(self.rows):
            if k in self.lines:
                lines.append(r"\midrule")
            lines.append(_latex_row(row))
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


@dataclass(frozen=True)
class FittedTable:
    """A table as the width of a terminal allows."""

    table: TextTable

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        from rich.measure import Measurement
        from rich.text import Text

        grid = self.table.grid()
        # The least width in which no number is broken, in a terminal that is wide
        # enough for anything.
        needed = Measurement.get(
            console, options.update(max_width=10_000), grid
        ).minimum
        if needed <= options.max_width:
            yield grid
            return
        yield Text(self.table.title, style="italic")
        for row in self.table.rows:
            for column, cell in zip(self.table.columns, row, strict=True):
                yield Text(f"{column}: {cell}")
            yield Text("")
        yield Text(self.table.caption)


def _markdown_row(row: Sequence[str]) -> str:
    # A bar in a name would begin another column.
    cells = " | ".join(cell.replace("|", r"\|") for cell in row)
    return f"| {cells} |\n"


def _latex_row(row: Sequence[str]) -> str:
    return " & ".join(map(latex_text, row)) + r" \\"


def latex_text(text: str) -> str:
    """A text in which no character means anything to LaTeX."""
    # Character by character: replacing one after the other would escape the backslashes
    # of the first.
    return "".join(_LATEX.get(character, character) for character in text)
