"""One look for every picture: fonts, colours that colour-blind people can tell apart, files in PNG and SVG.

Figures are made without pyplot, so that drawing changes nothing in the caller's
session.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from lipcert.files import replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

P = ParamSpec("P")
R = TypeVar("R")

INK = "#30343f"
"""Text and axes; in inline SVG it becomes the colour of the surrounding text."""
COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#7a5195",
    "#8c6d31",
)
"""Okabe and Ito's, for any series in this order."""
MEANING = {
    "certified": COLOURS[0], "attacked": COLOURS[1], "clean": "#6b7280", "wrong": COLOURS[1], "correct": COLOURS[0],
    "naive": COLOURS[1], "liplt": COLOURS[0], "rescaled": COLOURS[2], "shifted": COLOURS[4], "lt-sdp": COLOURS[5],
    "lipsdp": COLOURS[3], "best": COLOURS[6], "sampled": "#6b7280",
}  # fmt: skip
"""What means the same has the same colour in every figure."""
MAP = "viridis"
"""Of heat maps: even in lightness, readable in grey."""
_SETTINGS: Any = {
    "font.family": "sans-serif", "font.size": 10, "axes.titlesize": 11, "axes.labelsize": 10, "legend.fontsize": 9,
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": INK, "axes.labelcolor": INK,
    "axes.titlecolor": INK, "text.color": INK, "xtick.color": INK, "ytick.color": INK, "xtick.labelsize": 9,
    "ytick.labelsize": 9, "axes.grid": True, "grid.color": "#9ca3af", "grid.alpha": 0.3, "grid.linewidth": 0.6,
    "lines.linewidth": 1.8, "legend.frameon": False, "svg.fonttype": "none", "svg.hashsalt": "lipcert",
}  # fmt: skip


def styled(draw: Callable[P, R]) -> Callable[P, R]:
    """A drawing function that draws in the common style and leaves the caller's settings alone."""

    @wraps(draw)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        import matplotlib

        # Some settings are read when a figure is made, others when it is saved: both
        # functions are styled.
        with matplotlib.rc_context(_SETTINGS):
            return draw(*args, **kwargs)

    return wrapper


@styled
def new_figure(
    columns: int = 1, rows: int = 1, size: tuple[float, float] = (6.0, 3.6)
) -> tuple[Figure, list[Axes]]:
    """A figure in the common style with `rows` × `columns` axes, each of `size` inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    return figure, [
        figure.add_subplot(rows, columns, k + 1) for k in range(rows * columns)
    ]


def colours(names: Sequence[str]) -> list[str]:
    """A colour for each of several series: by meaning if all have one, by position otherwise."""
    by_meaning = [MEANING.get(name) for name in names]
    # Two series of one colour would be worse than none with its usual one.
    if all(by_meaning) and len(set(by_meaning)) == len(names):
        return [value for value in by_meaning if value]
    return [COLOURS[k % len(COLOURS)] for k in range(len(names))]


@styled
def save_figure(figure: Figure, path: str | Path) -> list[Path]:
    """Write `path`.png and `path`.svg; both appear complete or not at all."""
    base, written = Path(path), []
    base.parent.mkdir(parents=True, exist_ok=True)
    for kind in ("png", "svg"):
        target = base.with_name(f"{base.name}.{kind}")
        with replace_file(target) as temporary:
            # Without a date, and with a fixed hashsalt: the same figures are the same
            # files.
            figure.savefig(
                temporary,
                format=kind,
                dpi=160,
                metadata={"Date": None} if kind == "svg" else None,
            )
        written.append(target)
    return written


@styled
def inline_svg(figure: Figure, label: str) -> str:
    """The figure as an <svg> element for a page: transparent, in the page's own text colour, read aloud as `label`."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    # The XML header and the doctype have no place inside a page.
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    # Fixed sizes in points would overflow a phone; the viewBox keeps the proportions.
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    return text.replace("<svg", f'<svg role="img" aria-label="{_escape(label)}"', 1)


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")


def logarithmic_axis(axes: Axes) -> None:
    """Labels at 1, 2 and 5 times a power of ten, or at powers of ten alone if there are many; written out."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    # Between 2 and 9 there is no power of ten, and an axis without labels says nothing.
    subs = (1, 2, 5) if high < 1e3 * low else (1,)
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def percent_axis(axes: Axes, what: str) -> None:
    """An axis from 0 to 100 %."""
    axes.set_ylabel(f"{what} (%)")
    axes.set_ylim(0, 100)
