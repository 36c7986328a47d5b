"""What every kind of result looks like: a table, a picture and a data frame; one function each, by the kind."""

from __future__ import annotations

from functools import singledispatch
from typing import TYPE_CHECKING, Any

from lipcert.display.text_table import TextTable

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


@singledispatch
def table(result: Any) -> TextTable:
    """A result as a table of text."""
    raise _unknown(result)


@singledispatch
def plot(result: Any, *arguments: Any, **options: Any) -> Figure:
    """A result as a figure."""
    raise _unknown(result)


@singledispatch
def frame(result: Any) -> pandas.DataFrame:
    """A result as a data frame."""
    raise _unknown(result)


def _unknown(result: Any) -> TypeError:
    return TypeError(
        f"there is no display of a {type(result).__name__}; register one "
        "in lipcert.display"
    )
