"""The paper's figures, drawn from our numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from lipcert.certificate import Certificates
from lipcert.display import draw_lines, new_figure
from lipcert.display.style import colours, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]
_BINS = 40
_SIZE = (4.6, 3.2)


@styled
def radii(panels: Mapping[str, Mapping[str, Certificates]]) -> Figure:
    """Above, how certified radii are distributed; below, the share that is correct and certified beyond each radius."""
    figure, axes = new_figure(len(panels), 2, _SIZE)
    for k, (title, series) in enumerate(panels.items()):
        above, below = axes[k], axes[k + len(panels)]
        top = max(float(found.radius.max()) for found in series.values()) or 1.0
        edges = np.linspace(0, top, _BINS + 1).tolist()
        for (name, found), shade in zip(
            series.items(), colours(list(series)), strict=True
        ):
            values = found.radius.numpy()
            weights = np.full(len(values), 100 / len(values))
            if len(series) <= 2:  # more would hide each other
                above.hist(
                    values,
                    bins=edges,
                    weights=weights,
                    histtype="stepfilled",
                    color=shade,
                    alpha=0.35,
                )
            above.hist(
                values,
                bins=edges,
                weights=weights,
                histtype="step",
                color=shade,
                lw=1.4,
                label=name,
            )
            ordered = np.sort(found.radius[found.correct].numpy())
            share = 100 * np.arange(len(ordered), -1, -1) / len(values)
            below.step(
                np.concatenate([[0.0], ordered]),
                share,
                where="pre",
                color=shade,
                label=name,
            )
        above.set_title(title)
        above.set_ylabel("share of test inputs (%)")
        below.set_ylabel("correct and certified (%)")
        below.set_ylim(0, 100)
        for one in (above, below):
            one.set_xlim(0, top)
            one.legend()
        below.set_xlabel("certified radius (l2, pixels in [0, 1])")
    return figure


@styled
def evolution(panels: Mapping[str, Series]) -> Figure:
    """Mean pairwise constants over the epochs, a panel for each training."""
    from matplotlib.ticker import MaxNLocator

    figure, axes = new_figure(len(panels), size=_SIZE)
    for one, (title, series) in zip(axes, panels.items(), strict=True):
        marked = max(len(epochs) for epochs, _ in series.values()) <= 20
        draw_lines(
            one,
            series,
            "epoch",
            "mean pairwise constant (estimate)",
            logarithmic=True,
            marked=marked,
        )
        one.set_title(title)
        one.xaxis.set_major_locator(MaxNLocator(integer=True))
        one.yaxis.set_major_formatter("{x:g}")
        one.yaxis.set_minor_formatter("{x:g}")
    return figure


@styled
def run_times(
    panels: Mapping[str, Series],
    x: str,
    columns: int,
    ticks: Mapping[float, str] | None = None,
) -> Figure:
    """Milliseconds over a size, a panel for each quantity."""
    rows = -(-len(panels) // columns)
    figure, axes = new_figure(columns, rows, _SIZE)
    for one, (title, series) in zip(axes, panels.items(), strict=False):
        draw_lines(one, series, x, "milliseconds (median)", marked=True)
        one.set_ylim(bottom=0)
        one.set_title(title)
        if ticks:
            one.set_xticks(list(ticks), list(ticks.values()))
    return figure
