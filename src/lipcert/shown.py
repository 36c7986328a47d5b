"""Results that have a table, a figure and a data frame; how these look is the business of `lipcert.display`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from rich.console import RenderableType


class Shown:
    """Shows itself in a terminal, in a notebook, as a figure and in pandas.

    `lipcert.display` has a function `table`, `plot` and `frame` for every class of this
    kind. It is imported when something is to be shown, so that what computes results
    knows nothing of drawing.
    """

    def __rich__(self) -> RenderableType:
        table: RenderableType = _display().table(self).rich()
        return table

    def _repr_html_(self) -> str:
        html: str = _display().table(self).html()
        return html

    def plot(self, *arguments: Any, **options: Any) -> Figure:
        """The picture of this result; `lipcert.display.plot` says which, and which options it has."""
        figure: Figure = _display().plot(self, *arguments, **options)
        return figure

    def to_pandas(self) -> pandas.DataFrame:
        """The numbers of this result as a data frame."""
        frame: pandas.DataFrame = _display().frame(self)
        return frame


def _display() -> Any:
    return import_module("lipcert.display")
