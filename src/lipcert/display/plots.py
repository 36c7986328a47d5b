"""The pictures of certificates, bounds and trainings, drawn from plain numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lipcert.display.style import (
    INK,
    MAP,
    MEANING,
    colours,
    logarithmic_axis,
    new_figure,
    percent_axis,
    styled,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    Numbers = Sequence[float] | NDArray[np.float64]

_BINS = 40
# More classes than that, and numbers in the cells of a heat map are unreadable.
_NAMED_CELLS = 15


@styled
def accuracy_curve(
    curves: Mapping[str, tuple[Numbers, int]],
    points: Mapping[str, Sequence[tuple[float, float, str]]] | None = None,
    unit: str = "l2, pixels in [0, 1]",
) -> Figure:
    """Certified accuracy over ε.

    curves: for each name the certified radii of the correctly classified inputs, and
    the number of all inputs.
    points: for each name some (ε, accuracy, meaning), with a meaning such as "attacked"
    or "clean".
    """
    figure, (axes,) = new_figure()
    shades = colours(list(curves))
    many = len(curves) > 1
    for (name, (radii, count)), shade in zip(curves.items(), shades, strict=True):
        ordered = np.sort(np.asarray(radii, dtype=float))
        x = np.concatenate([[0.0], ordered, [np.max(ordered, initial=0.0)]])
        y = np.concatenate([np.arange(len(ordered), -1, -1), [0]]) / max(count, 1)
        axes.step(x, y * 100, where="post", color=shade, label=name)
        labelled: set[str] = set()
        for epsilon, accuracy, meaning in (points or {}).get(name, ()):
            style: dict[str, Any] = {"ms": 6, "ls": "", "clip_on": False}
            label, style["color"] = meaning, MEANING.get(meaning, INK)
            if many:
                label, style["color"] = f"{name}: {meaning}", shade
            marker = "D" if meaning == "clean" else "o"
            # One entry of the legend for all points of a kind.
            shown = "" if label in labelled else label
            axes.plot(epsilon, accuracy * 100, marker, label=shown, **style)
            labelled.add(label)
    percent_axis(axes, "accuracy")
    axes.set_xlabel(f"ε ({unit})")
    axes.set_xlim(left=0)
    axes.legend()
    return figure


@styled
def radius_histogram(
    radii: Numbers,
    correct: Sequence[bool] | NDArray[np.bool_] | None = None,
    title: str = "",
    unit: str = "l2, pixels in [0, 1]",
) -> Figure:
    """How certified radii are distributed, with the share that reaches each radius.

    correct: which predictions are right, to show them apart from the wrong ones; None
    if that is not known.
    """
    figure, (axes,) = new_figure()
    values = np.asarray(radii, dtype=float)
    finite = np.isfinite(values)
    top = float(np.max(values[finite], initial=0.0)) or 1.0
    right = np.ones(len(values), dtype=bool)
    groups = {"certified": values[finite]}
    reaching = "certified beyond"
    if correct is not None:
        right = np.asarray(correct, dtype=bool)
        groups = {"correct": values[right & finite], "wrong": values[~right & finite]}
        reaching = "correct and certified beyond"
    percent = 100 / max(len(values), 1)
    _draw_bars(axes, groups, percent, top)
    axes.set_xlabel(f"certified radius ({unit})")
    axes.set_ylabel("share of inputs (%)")
    axes.set_title(title)
    axes.set_xlim(0, top)
    survival = _draw_survival(axes, values[right & finite], percent, reaching)
    handles, labels = axes.get_legend_handles_labels()
    more_handles, more_labels = survival.get_legend_handles_labels()
    handles, labels = handles + more_handles, labels + more_labels
    figure.legend(handles, labels, loc="outside upper center", ncols=3)
    return figure


def _draw_bars(
    axes: Axes, groups: Mapping[str, NDArray[np.float64]], percent: float, top: float
) -> None:
    """How many radii of each group lie in each bin up to the largest, on top of each other."""
    axes.hist(
        list(groups.values()),
        bins=np.linspace(0, top, _BINS + 1).tolist(),
        weights=[np.full(len(group), percent) for group in groups.values()],
        stacked=True,
        alpha=0.85,
        color=[MEANING[name] for name in groups],
        label=[f"{name} ({len(group):,})" for name, group in groups.items()],
    )


def _draw_survival(axes: Axes, radii: Numbers, percent: float, label: str) -> Axes:
    """The share of inputs that reaches a radius, on an axis of its own; one input is that many percent."""
    ordered = np.sort(radii)
    # A bin holds a few percent, the line begins near 100: on one axis the bars would
    # vanish.
    survival = axes.twinx()
    at = np.concatenate([[0], ordered])
    shares = percent * np.arange(len(ordered), -1, -1)
    survival.step(at, shares, color=INK, lw=1.4, where="post", label=label)
    survival.set_ylim(0, 100)
    survival.set_ylabel("reaches that radius (%)")
    survival.spines["right"].set_visible(True)
    survival.grid(visible=False)
    return survival


@styled
def contributions(shares: Mapping[str, Mapping[str, float]]) -> Figure:
    """Which site costs how much: for each method, the share of every site in the constant."""
    sites = list(dict.fromkeys(site for parts in shares.values() for site in parts))
    needed = 0.34 * len(sites) * max(1, 0.6 * len(shares)) + 1.2
    figure, (axes,) = new_figure(size=(6.0, max(2.4, needed)))
    height = 0.8 / len(shares)
    shades = colours(list(shares))
    for k, (method, parts) in enumerate(shares.items()):
        # Two methods: bars at −0.2 and 0.2 around the name of the site.
        places = np.arange(len(sites)) + (k - (len(shares) - 1) / 2) * height
        widths = [parts.get(site, 0.0) for site in sites]
        label = f"{method}: {sum(parts.values()):.4g} in all"
        axes.barh(places, widths, height * 0.9, color=shades[k], label=label)
    axes.set_yticks(np.arange(len(sites)), sites)
    # The input on top, as networks are read.
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("contribution to the mean constant")
    axes.legend()
    return figure


@styled
def heat_map(
    values: NDArray[np.float64], names: Sequence[str], title: str = ""
) -> Figure:
    """Constants of the differences between any two classes."""
    count = len(names)
    side = min(7.0, max(4.2, 0.46 * count + 1.4))
    figure, (axes,) = new_figure(size=(side + 0.8, side))
    shown = np.array(values, dtype=float)
    # Zeros there would take a good part of the colours.
    np.fill_diagonal(shown, np.nan)
    image = axes.imshow(shown, cmap=MAP)
    axes.grid(visible=False)
    if 1 < count <= _NAMED_CELLS:
        _write_numbers(axes, shown)
    # More names than that overlap.
    if count <= 40:
        rotation = 90 if max(map(len, names)) > 2 else 0
        axes.set_xticks(range(count), names, rotation=rotation)
        axes.set_yticks(range(count), names)
    axes.set_title(title)
    bar = figure.colorbar(image, ax=axes, shrink=0.8)
    bar.set_label("Lipschitz constant of the difference")
    return figure


def _write_numbers(axes: Axes, shown: NDArray[np.float64]) -> None:
    """The constants into the cells of a heat map, but for the diagonal."""
    low, high = np.nanmin(shown), np.nanmax(shown)
    middle = low + 0.6 * (high - low)
    style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7}
    for (a, b), value in np.ndenumerate(shown):
        if a != b:
            # viridis is light at its upper end.
            tone = "black" if value > middle else "white"
            axes.text(b, a, f"{value:.3g}", color=tone, **style)


@styled
def lines(
    series: Mapping[str, tuple[Numbers, Numbers]],
    x: str,
    y: str,
    *,
    logarithmic: bool = False,
    percent: bool = False,
    marked: bool = False,
    title: str = "",
) -> Figure:
    """Some quantities over one, such as constants over epochs or seconds over depth."""
    figure, (axes,) = new_figure()
    style = {"logarithmic": logarithmic, "percent": percent, "marked": marked}
    draw_lines(axes, series, x, y, **style)
    axes.set_title(title)
    return figure


@styled
def draw_lines(
    axes: Axes,
    series: Mapping[str, tuple[Numbers, Numbers]],
    x: str,
    y: str,
    *,
    logarithmic: bool = False,
    percent: bool = False,
    marked: bool = False,
) -> None:
    """The same, on given axes. Percent: the values are shares."""
    factor = 100 if percent else 1
    shades, markers = colours(list(series)), "osD^vP*X" * 4
    named = zip(series.items(), shades, markers, strict=False)
    for (name, (at, values)), shade, marker in named:
        style: dict[str, Any] = {"color": shade, "label": name}
        # A line through a single point is invisible.
        if marked or len(at) == 1:
            style |= {"marker": marker, "ms": 5}
        axes.plot(np.asarray(at), np.asarray(values, dtype=float) * factor, **style)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if percent:
        percent_axis(axes, y)
    if logarithmic:
        logarithmic_axis(axes)
    if len(series) > 1 or next(iter(series), ""):
        axes.legend()
