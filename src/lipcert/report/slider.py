"""The chart of accuracies over ε on which a reader moves ε: an SVG drawn by hand, and the numbers behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lipcert.attacks import ON_SPHERE
from lipcert.certificate import Certificates
from lipcert.display.style import COLOURS, MEANING
from lipcert.runs import RunFolder

WIDTH, HEIGHT = 760, 390
LEFT, RIGHT, TOP, BOTTOM = 56, 24, 14, 36
FRAME = {
    "WIDTH": WIDTH,
    "HEIGHT": HEIGHT,
    "LEFT": LEFT,
    "RIGHT": RIGHT,
    "TOP": TOP,
    "BOTTOM": BOTTOM,
}
"""Where the axes are, in the units of the SVG."""
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
    scale = _Scale(_end(runs))
    curves, series, clean = [], [], []
    for run, colour in zip(runs, run_colours(runs), strict=True):
        numbers = _sorted_distances(run)
        # Certified at ε: of all inputs, the correct ones whose radius is not yet
        # passed.
        count, correct = len(run.certificates), len(numbers.radii)
        certified = _survival(numbers.radii, count, correct, scale)
        points = _points(run, run.certified_at, scale)
        curves.append(Curve("certified", colour, _path(certified), points))
        if numbers.attacked:
            attacked, survivors = numbers.attacked, numbers.survivors
            standing = _survival(numbers.distances, attacked, survivors, scale)
            points = _points(run, run.attacked_at, scale)
            # One run: colours tell certified from attacked. Several: they tell the runs
            # apart.
            shade = MEANING["attacked"] if len(runs) == 1 else colour
            curves.append(Curve("attacked", shade, _path(standing), points))
        series.append(numbers.as_dict(count))
        clean.append((scale.y(run.clean), colour))
    area = ""
    # There along one curve, back along the other: what is neither certified nor
    # refuted.
    if len(runs) == 1 and len(curves) == 2:
        area = _path([*certified, *reversed(standing)]) + "Z"
    x_ticks = [(scale.x(value), f"{value:g}") for value in _ticks(scale.end)]
    y_ticks = [(scale.y(share / 100), f"{share}") for share in range(0, 101, 20)]
    start = runs[0].summary.epsilons[0]
    page_numbers = _page_numbers(series, scale.end, start)
    return Slider(curves, area, clean, x_ticks, y_ticks, page_numbers)


def _page_numbers(
    series: list[dict[str, Any]], end: float, start: float
) -> dict[str, Any]:
    """What the page needs to count and to draw where the reader moves ε."""
    return {
        "runs": series,
        "end": end,
        "start": start,
        # As in `attacks.fooled`: PGD ends on the sphere, up to rounding, and the page
        # has to count alike.
        "slack": 1 + ON_SPHERE,
        "left": LEFT,
        "right": WIDTH - RIGHT,
        "top": TOP,
        "bottom": HEIGHT - BOTTOM,
    }


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
        # SVG counts from the top.
        return round(TOP + (HEIGHT - TOP - BOTTOM) * (1 - share), 2)


@dataclass(frozen=True)
class _SortedDistances:
    """Sorted radii of correct predictions, and sorted distances of those that were fooled at any distance.

    survivors: correct predictions among the `attacked` inputs, fooled at some distance
    or not at all.
    attacked_radii: sorted radii of these, so that shares of the same inputs stand side
    by side.
    """

    radii: NDArray[np.float64]
    distances: NDArray[np.float64]
    survivors: int
    attacked: int
    attacked_radii: NDArray[np.float64]

    def as_dict(self, count: int) -> dict[str, Any]:
        # Of all inputs they are the radii that are there already.
        attacked_radii = self.attacked_radii if self.attacked < count else np.empty(0)
        return {
            "radii": self.radii.tolist(),
            "count": count,
            "distances": self.distances.tolist(),
            "survivors": self.survivors,
            "attacked": self.attacked,
            "attacked_radii": attacked_radii.tolist(),
        }


def _sorted_distances(run: RunFolder) -> _SortedDistances:
    radii = _sorted_radii(run.certificates)
    if run.attacked is None or run.distance is None:
        return _SortedDistances(radii, np.empty(0), 0, 0, np.empty(0))
    # A wrong prediction needs no attack: it is not standing at any ε.
    distances = run.distance[run.attacked.correct].numpy()
    fooled = np.sort(distances[np.isfinite(distances)])
    return _SortedDistances(
        radii, fooled, len(distances), len(run.attacked), _sorted_radii(run.attacked)
    )


def _sorted_radii(certificates: Certificates) -> NDArray[np.float64]:
    """Of correct predictions."""
    radii = certificates.radius[certificates.correct].numpy()
    return np.sort(np.minimum(radii, _LARGEST))


def _points(
    run: RunFolder, share: Callable[[float], float | None], scale: _Scale
) -> list[tuple[float, float]]:
    """Where the run's own sizes of perturbations are on a curve."""
    points = []
    for epsilon in run.summary.epsilons:
        if epsilon <= scale.end:
            points.append((scale.x(epsilon), scale.y(share(epsilon) or 0.0)))
    return points


def _end(runs: Sequence[RunFolder]) -> float:
    """Where the axis ends: beyond all radii of correct predictions, every ε, and most of the distances found."""
    largest = []
    for run in runs:
        largest.append(1.15 * max(run.summary.epsilons))
        numbers = _sorted_distances(run)
        # [-1:] of a sorted array is its largest, or nothing.
        largest += numbers.radii[numbers.radii < _LARGEST][-1:].tolist()
        if len(numbers.distances):
            # A few inputs are fooled only far away; the axis would be theirs.
            largest.append(float(np.quantile(numbers.distances, 0.95)))
    return 1.02 * max(largest)


def _survival(
    values: NDArray[np.float64], count: int, start: int, scale: _Scale
) -> list[tuple[float, float]]:
    """The points of a falling staircase, at most one step for each tenth of a pixel."""
    shown = values[values <= scale.end]
    x = np.round(LEFT + (WIDTH - LEFT - RIGHT) * shown / scale.end, 1)
    points = [(float(LEFT), scale.y(start / count))]
    # Across to the step, then down by all that fall in the same tenth of a pixel.
    for place, fallen in zip(*np.unique(x, return_counts=True), strict=True):
        start -= int(fallen)
        points.append((float(place), points[-1][1]))
        points.append((float(place), scale.y(start / count)))
    return [*points, (float(WIDTH - RIGHT), points[-1][1])]


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:g},{y:g}" for x, y in points)


def _ticks(end: float) -> list[float]:
    from matplotlib.ticker import MaxNLocator

    # Some of them are beyond the axis.
    proposed = MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]).tick_values(0, end)
    return [float(value) for value in proposed if 0 <= value <= end]
