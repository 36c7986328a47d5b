"""The chart of accuracies over ε on which a reader moves ε: an SVG drawn by hand, and the numbers behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lipcert.attacks import ON_SPHERE
from lipcert.figures.style import COLOURS, MEANING
from lipcert.report.folder import RunFolder

WIDTH, HEIGHT = 760, 390
LEFT, RIGHT, TOP, BOTTOM = 56, 24, 14, 36
_LARGEST = 1e300
"""Stands for infinity, which JSON has not."""


@dataclass(frozen=True)
class Curve:
    """One line of the chart."""

    kind: str
    colour: str
    path: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Slider:
    """All that the page draws: lines, the area between what is certified and what attacks leave open, axes, numbers."""

    curves: Sequence[Curve]
    area: str
    clean: Sequence[tuple[float, str]]
    x_ticks: Sequence[tuple[float, str]]
    y_ticks: Sequence[tuple[float, str]]
    numbers: dict[str, Any]


def slider(runs: Sequence[RunFolder]) -> Slider:
    """The chart of some runs: certified accuracy of each, and what the attacks have left standing."""
    end = _end(runs)
    colours = run_colours(runs)
    scale = _Scale(end)
    curves, series = [], []
    for run, colour in zip(runs, colours, strict=True):
        radii, distances, survivors, attacked = _numbers(run)
        steps = _survival(radii, len(run.certificates), len(radii), scale)
        marks = [(scale.x(eps), scale.y(run.certified_at(eps))) for eps in run.epsilons if eps <= end]
        curves.append(Curve("certified", colour, _path(steps), marks))
        if attacked:
            left = _survival(distances, attacked, survivors, scale)
            shade = MEANING["attacked"] if len(runs) == 1 else colour
            marks = [(scale.x(e), scale.y(run.attacked_at(e) or 0.0)) for e in run.epsilons if e <= end]
            curves.append(Curve("attacked", shade, _path(left), marks))
        series.append(
            {
                "radii": radii.tolist(), "count": len(run.certificates),
                "distances": distances.tolist(), "survivors": survivors, "attacked": attacked,
            }
        )  # fmt: skip
    area = ""
    if len(runs) == 1 and len(curves) == 2:
        area = _path([*steps, *reversed(left)]) + "Z"
    numbers = {
        "runs": series, "end": end, "start": runs[0].epsilons[0], "slack": 1 + ON_SPHERE,
        "left": LEFT, "right": WIDTH - RIGHT, "top": TOP, "bottom": HEIGHT - BOTTOM,
    }  # fmt: skip
    return Slider(
        curves,
        area,
        [(scale.y(run.clean), colour) for run, colour in zip(runs, colours, strict=True)],
        [(scale.x(value), f"{value:g}") for value in _ticks(end)],
        [(scale.y(share / 100), f"{share}") for share in range(0, 101, 20)],
        numbers,
    )


def run_colours(runs: Sequence[RunFolder]) -> list[str]:
    """The colour of each run, as in the figures."""
    if len(runs) == 1:
        return [MEANING["certified"]]
    return [COLOURS[k % len(COLOURS)] for k in range(len(runs))]


@dataclass(frozen=True)
class _Scale:
    end: float

    def x(self, epsilon: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * epsilon / self.end, 2)

    def y(self, share: float) -> float:
        return round(TOP + (HEIGHT - TOP - BOTTOM) * (1 - share), 2)


def _numbers(run: RunFolder) -> tuple[NDArray[np.float64], NDArray[np.float64], int, int]:
    """Sorted radii of correct predictions, sorted distances of those that were fooled, survivors of any distance and
    fooled ones together, and how many inputs were attacked."""
    radii = np.sort(np.minimum(run.certificates.radius[run.certificates.correct].numpy(), _LARGEST))
    part = run.attacked
    if part is None or run.distance is None:
        return radii, np.empty(0), 0, 0
    found = run.distance[part.correct].numpy()
    return radii, np.sort(found[np.isfinite(found)]), len(found), len(part)


def _end(runs: Sequence[RunFolder]) -> float:
    """Where the axis ends: beyond all radii of correct predictions, every ε, and most of the distances found."""
    largest = [1.15 * max(run.epsilons) for run in runs]
    for run in runs:
        radii, distances, _, _ = _numbers(run)
        largest += radii[radii < _LARGEST][-1:].tolist()
        largest += [float(np.quantile(distances, 0.95))] if len(distances) else []
    return 1.02 * max(largest)


def _survival(values: NDArray[np.float64], count: int, start: int, scale: _Scale) -> list[tuple[float, float]]:
    """The points of a falling staircase, at most one step for each tenth of a pixel."""
    shown = values[values <= scale.end]
    x = np.round(LEFT + (WIDTH - LEFT - RIGHT) * shown / scale.end, 1)
    points = [(float(LEFT), scale.y(start / count))]
    for place, fallen in zip(*np.unique(x, return_counts=True), strict=True):
        start -= int(fallen)
        points += [(float(place), points[-1][1]), (float(place), scale.y(start / count))]
    return [*points, (float(WIDTH - RIGHT), points[-1][1])]


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:g},{y:g}" for x, y in points)


def _ticks(end: float) -> list[float]:
    from matplotlib.ticker import MaxNLocator

    return [float(value) for value in MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]).tick_values(0, end) if 0 <= value <= end]
