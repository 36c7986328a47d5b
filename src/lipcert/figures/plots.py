"""The pictures of certificates, bounds and trainings, drawn from plain numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from lipcert.figures.style import INK, MAP, MEANING, colours, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    Numbers = Sequence[float] | NDArray[np.float64]

_BINS = 40
_NAMED_CELLS = 15  # more classes than that and numbers in the cells of a heat map are unreadable


@styled
def accuracy_curve(
    curves: Mapping[str, tuple[Numbers, int]],
    points: Mapping[str, Sequence[tuple[float, float, str]]] | None = None,
    unit: str = "l2, pixels in [0, 1]",
) -> Figure:
    """Certified accuracy over ε.

    curves: for each name the certified radii of the correctly classified inputs, and the number of all inputs.
    points: for each name some (ε, accuracy, meaning), with a meaning such as "attacked" or "clean".
    """
    figure, (axes,) = new_figure()
    shades = colours(list(curves)) if len(curves) > 1 else [MEANING["certified"]]
    for (name, (radii, count)), shade in zip(curves.items(), shades, strict=True):
        ordered = np.sort(np.asarray(radii, dtype=float))
        x = np.concatenate([[0.0], ordered, ordered[-1:] if len(ordered) else [0.0]])
        y = np.concatenate([np.arange(len(ordered), -1, -1), [0]]) / max(count, 1)
        axes.step(x, y * 100, where="pre", color=shade, label=name)
        for marker, (epsilon, accuracy, meaning) in zip("osD^vP*X" * 4, (points or {}).get(name, ()), strict=False):
            label = f"{name}: {meaning}" if len(curves) > 1 else meaning
            filled = shade if len(curves) > 1 else MEANING.get(meaning, INK)
            known = axes.get_legend_handles_labels()[1]
            axes.plot(epsilon, accuracy * 100, "o" if meaning == "attacked" else "D" if meaning == "clean" else marker,
                      color=filled, ms=6, ls="", clip_on=False, label=None if label in known else label)  # fmt: skip
    _percent(axes, "accuracy")
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

    correct: which predictions are right, to show them apart from the wrong ones; None if that is not known.
    """
    figure, (axes,) = new_figure()
    values = np.asarray(radii, dtype=float)
    right = np.ones(len(values), dtype=bool) if correct is None else np.asarray(correct, dtype=bool)
    finite = np.isfinite(values)
    top = float(values[finite].max()) if finite.any() else 1.0
    edges = np.linspace(0, top or 1.0, _BINS + 1)
    kinds = [("certified" if correct is None else "correct", values[right & finite])]
    if correct is not None:
        kinds.append(("wrong", values[~right & finite]))
    shares = [np.full(len(part), 100 / max(len(values), 1)) for _, part in kinds]
    axes.hist([part for _, part in kinds], bins=edges.tolist(), weights=shares, stacked=True, alpha=0.85,
              color=[MEANING[name] for name, _ in kinds],
              label=[f"{name} ({len(part):,})" for name, part in kinds])  # fmt: skip
    axes.set_xlabel(f"certified radius ({unit})")
    axes.set_ylabel("share of inputs (%)")
    ordered = np.sort(values[right & finite])
    survival = axes.twinx()
    survival.step(np.concatenate([[0], ordered]), 100 * np.arange(len(ordered), -1, -1) / max(len(values), 1),
                  color=INK, lw=1.4, where="pre",
                  label="certified beyond" if correct is None else "correct and certified beyond")  # fmt: skip
    survival.set_ylim(0, 100)
    survival.set_ylabel("reaches that radius (%)")
    survival.spines["right"].set_visible(True)
    survival.grid(visible=False)
    handles, labels = (a + b for a, b in zip(axes.get_legend_handles_labels(), survival.get_legend_handles_labels(),
                                             strict=True))  # fmt: skip
    figure.legend(handles, labels, loc="outside upper center", ncols=3)
    axes.set_title(title)
    axes.set_xlim(0, top or 1.0)
    return figure


@styled
def contributions(shares: Mapping[str, Mapping[str, float]]) -> Figure:
    """Which site costs how much: for each method, the share of every site in the constant."""
    sites = list(dict.fromkeys(site for parts in shares.values() for site in parts))
    figure, (axes,) = new_figure(size=(6.0, max(2.4, 0.34 * len(sites) * max(1, 0.6 * len(shares)) + 1.2)))
    height = 0.8 / len(shares)
    for k, ((method, parts), shade) in enumerate(zip(shares.items(), colours(list(shares)), strict=True)):
        places = np.arange(len(sites)) + (k - (len(shares) - 1) / 2) * height
        total = sum(parts.values())
        axes.barh(places, [parts.get(site, 0.0) for site in sites], height * 0.9, color=shade,
                  label=f"{method}: {total:.4g} in all")  # fmt: skip
    axes.set_yticks(np.arange(len(sites)), sites)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("contribution to the mean constant")
    axes.legend()
    return figure


@styled
def heat_map(values: NDArray[np.float64], names: Sequence[str], title: str = "") -> Figure:
    """Constants of the differences between any two classes."""
    count = len(names)
    side = min(7.0, max(4.2, 0.46 * count + 1.4))
    figure, (axes,) = new_figure(size=(side + 0.8, side))
    shown = np.array(values, dtype=float)
    np.fill_diagonal(shown, np.nan)
    image = axes.imshow(shown, cmap=MAP)
    axes.grid(visible=False)
    if count <= _NAMED_CELLS:
        middle = np.nanmin(shown) + 0.6 * (np.nanmax(shown) - np.nanmin(shown)) if count > 1 else 0.0
        for a in range(count):
            for b in range(count):
                if a != b:
                    tone = "black" if shown[a, b] > middle else "white"
                    axes.text(b, a, f"{shown[a, b]:.3g}", ha="center", va="center", fontsize=7, color=tone)
    if count <= 40:
        axes.set_xticks(range(count), names, rotation=90 if max(map(len, names)) > 2 else 0)
        axes.set_yticks(range(count), names)
    axes.set_title(title)
    bar = figure.colorbar(image, ax=axes, shrink=0.8)
    bar.set_label("Lipschitz constant of the difference")
    return figure


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
    draw_lines(axes, series, x, y, logarithmic=logarithmic, percent=percent, marked=marked)
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
    for (name, (at, values)), shade, marker in zip(series.items(), colours(list(series)), "osD^vP*X" * 4, strict=False):
        style = {"marker": marker, "ms": 5} if marked or len(at) == 1 else {}
        axes.plot(np.asarray(at), np.asarray(values, dtype=float) * factor, color=shade, label=name, **style)  # type: ignore[arg-type]
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if percent:
        _percent(axes, y)
    if logarithmic:
        _logarithmic(axes)
    if len(series) > 1 or next(iter(series), ""):
        axes.legend()


@styled
def bars(groups: Mapping[str, Mapping[str, float]], y: str, *, percent: bool = False, title: str = "") -> Figure:
    """For each group a bar per series."""
    names = list(dict.fromkeys(name for values in groups.values() for name in values))
    figure, (axes,) = new_figure(size=(max(6.0, 0.5 * len(groups) * max(1, len(names)) * 0.6), 3.6))
    width = 0.8 / max(len(names), 1)
    for k, (name, shade) in enumerate(zip(names, colours(names), strict=True)):
        places = np.arange(len(groups)) + (k - (len(names) - 1) / 2) * width
        heights = [values.get(name, np.nan) * (100 if percent else 1) for values in groups.values()]
        axes.bar(places, heights, width * 0.92, color=shade, label=name)
    axes.set_xticks(np.arange(len(groups)), list(groups), rotation=20 if len(groups) > 5 else 0)
    axes.set_ylabel(y)
    if percent:
        _percent(axes, y)
    axes.grid(visible=False, axis="x")
    axes.set_title(title)
    figure.legend(loc="outside upper center", ncols=min(4, max(1, len(names))))
    return figure


def _logarithmic(axes: Axes) -> None:
    """Labels at 1, 2 and 5 times a power of ten, or at powers of ten alone if there are many; written out."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1e3 * low else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _percent(axes: Axes, what: str) -> None:
    axes.set_ylabel(f"{what} (%)")
    axes.set_ylim(0, 100)
