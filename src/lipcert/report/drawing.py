"""The figures of a report, as files and for the page."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lipcert.display import (
    accuracy_curve,
    contributions,
    heat_map,
    inline_svg,
    lines,
    radius_histogram,
    save_figure,
)
from lipcert.display.style import styled
from lipcert.display.training_curves import training_curves
from lipcert.runs import RunFolder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HALF, _THIRD, _SQUARE = (4.8, 3.5), (3.9, 3.4), (5.2, 4.5)
"""Inches, for two or three figures beside each other; small enough that the text is readable on a phone."""
_TRAINING = ("constants", "losses", "accuracies")
"""The order of the figures of a training: what the library is about comes first."""


@dataclass(frozen=True)
class Drawn:
    """A figure of the page: inline SVG, and the name of its files."""

    run: str
    svg: str
    file: str


class Drawings:
    """Draws figures into a folder; every one is also returned for the page."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _draw(
        self, name: str, run: RunFolder | None, label: str, figure: Figure
    ) -> Drawn:
        # Files of several runs lie in one folder.
        name = f"{name}-{_slug(run.name)}" if run else name
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # once is enough for all files
        save_figure(figure, self.folder / name)
        # Ids must be unique in the page, and every figure begins to count at 1.
        svg = re.sub(
            r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", inline_svg(figure, label)
        )
        return Drawn(run.name if run else "", svg, f"{self.folder.name}/{name}")

    def accuracy(self, runs: Sequence[RunFolder]) -> None:
        """Only a file: the page has the chart with the slider instead."""
        curves, points = {}, {}
        for run in runs:
            name = run.name if len(runs) > 1 else "certified"
            # Shares of all inputs: wrong predictions are in the denominator only.
            curves[name] = (
                run.certificates.radius[run.certificates.correct].numpy(),
                len(run.certificates),
            )
            points[name] = [(0.0, run.clean, "clean")]
            for epsilon in run.summary.epsilons:
                standing = run.attacked_at(epsilon)
                if standing is not None:
                    points[name].append((epsilon, standing, "attacked"))
        save_figure(accuracy_curve(curves, points), self.folder / "accuracy")

    def radii(self, runs: Sequence[RunFolder]) -> list[Drawn]:
        """On one scale, so that they can be compared."""
        radii = np.concatenate([run.certificates.radius.numpy() for run in runs])
        # If nothing is certified, an axis from 0 to 0 would be an error.
        end = float(np.max(radii[np.isfinite(radii)], initial=0.0)) or 1.0
        result = []
        for run in runs:
            figure = radius_histogram(
                run.certificates.radius.numpy(), run.certificates.correct.numpy()
            )
            figure.set_size_inches(*_HALF)
            _legend_below(figure)
            figure.axes[0].set_xlim(0, end)
            result.append(
                self._draw(
                    "radii",
                    run,
                    f"Distribution of the certified radii of {run.name}",
                    figure,
                )
            )
        return result

    def contributions(self, run: RunFolder) -> Drawn:
        """By the naive method and by that of the bound; by the latter alone in folders that hold no more."""
        kinds = (run.constants or {}).get("sites", {})
        shares: dict[str, dict[str, float]] = {}
        for method, by_site in run.contributions.items():
            shares[method] = {}
            for site, share in by_site.items():
                label = f"{site} {kinds.get(site, '')}".strip()
                shares[method][label] = share
        figure = contributions(shares)
        # Networks with many sites need the height that they have.
        figure.set_size_inches(_HALF[0], max(2.6, figure.get_figheight()))
        return self._draw(
            "contributions", run, f"Contribution of each layer, {run.name}", figure
        )

    def pairwise(self, run: RunFolder) -> Drawn:
        assert run.pairwise is not None
        figure = heat_map(run.pairwise, run.class_names)
        figure.set_size_inches(*_SQUARE)
        return self._draw(
            "pairwise", run, f"Constants of all pairs of classes, {run.name}", figure
        )

    def training(self, run: RunFolder) -> list[Drawn]:
        """Constants, losses and accuracies over the epochs, as far as they were recorded."""
        drawn = []
        for panel in sorted(
            training_curves(run.metrics), key=lambda panel: _TRAINING.index(panel.name)
        ):
            if not panel.curves:
                continue
            figure = lines(
                panel.curves,
                "epoch",
                panel.quantity,
                percent=panel.percent,
                logarithmic=panel.logarithmic,
            )
            _legend_below(figure)
            figure.set_size_inches(*_THIRD)
            drawn.append(
                self._draw(
                    panel.name,
                    run,
                    f"{panel.quantity} over the epochs, {run.name}",
                    figure,
                )
            )
        return drawn


def data_uri(image: NDArray[np.float32]) -> str:
    """An image (C, H, W) with pixels in [0, 1] as a PNG; the first channel if it has neither one nor three."""
    from PIL import Image

    # Rounded, not cut off: k/255 comes back as k.
    pixels = np.clip(np.rint(image * 255), 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels.transpose(1, 2, 0) if len(pixels) == 3 else pixels[0]).save(
        buffer, "PNG"
    )
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


@styled
def _legend_below(figure: Figure) -> None:
    """Where it hides no line and has room for two columns."""
    # Gathered from all axes, for a histogram and its line have one each.
    for legend in [*figure.legends, *(axes.get_legend() for axes in figure.axes)]:
        if legend is not None:
            legend.remove()
    handles, labels = [], []
    for axes in figure.axes:
        more_handles, more_labels = axes.get_legend_handles_labels()
        handles += more_handles
        labels += more_labels
    figure.legend(handles, labels, loc="outside lower left", ncols=2)


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
