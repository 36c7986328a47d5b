"""The figures of a report, as files and for the page."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lipcert.figures import (
    accuracy_curve,
    contributions,
    heat_map,
    inline_svg,
    lines,
    radius_histogram,
    save_figure,
)
from lipcert.figures.style import styled
from lipcert.report.folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HALF, _THIRD, _SQUARE = (4.8, 3.5), (3.9, 3.4), (5.2, 4.5)
"""Inches, for two or three figures beside each other; small enough that the text is readable on a phone."""
_LOG_FROM = 20.0
"""Constants whose largest is that many times the smallest are drawn on a logarithmic axis."""


@dataclass(frozen=True)
class Drawn:
    """A figure of the page: inline SVG, and the name of its files."""

    run: str
    svg: str
    file: str


class Pictures:
    """Draws figures into a folder; every one is also returned for the page."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _draw(self, name: str, run: RunFolder | None, label: str, figure: Figure) -> Drawn:
        name = f"{name}-{_slug(run.name)}" if run else name
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # once is enough for all files
        save_figure(figure, self.folder / name)
        # Ids must be unique in the page, and every figure begins to count at 1.
        svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", inline_svg(figure, label))
        return Drawn(run.name if run else "", svg, f"{self.folder.name}/{name}")

    def accuracy(self, runs: Sequence[RunFolder]) -> None:
        """Only a file: the page has the chart with the slider instead."""
        curves, points = {}, {}
        for run in runs:
            name = run.name if len(runs) > 1 else "certified"
            curves[name] = (run.certificates.radius[run.certificates.correct].numpy(), len(run.certificates))
            found = [(eps, run.attacked_at(eps), "attacked") for eps in run.epsilons]
            points[name] = [(0.0, run.clean, "clean"), *((e, share, m) for e, share, m in found if share is not None)]
        save_figure(accuracy_curve(curves, points), self.folder / "accuracy")

    def radii(self, runs: Sequence[RunFolder]) -> list[Drawn]:
        """On one scale, so that they can be compared."""
        radii = np.concatenate([run.certificates.radius.numpy() for run in runs])
        end = float(np.max(radii[np.isfinite(radii)], initial=0.0)) or 1.0
        result = []
        for run in runs:
            figure = radius_histogram(run.certificates.radius.numpy(), run.certificates.correct.numpy())
            figure.set_size_inches(*_HALF)
            _legend_below(figure)
            figure.axes[0].set_xlim(0, end)
            result.append(self._draw("radii", run, f"Distribution of the certified radii of {run.name}", figure))
        return result

    def contributions(self, run: RunFolder) -> Drawn:
        """By the naive method and by that of the bound; by the latter alone in folders that hold no more."""
        kinds = (run.constants or {}).get("sites", {})
        shares = {
            method: {_site(name, kinds): value for name, value in parts.items()}
            for method, parts in run.contributions.items()
        }
        figure = contributions(shares)
        figure.set_size_inches(_HALF[0], max(2.6, figure.get_figheight()))
        return self._draw("contributions", run, f"Contribution of each layer, {run.name}", figure)

    def pairwise(self, run: RunFolder) -> Drawn:
        assert run.pairwise is not None
        figure = heat_map(run.pairwise, run.class_names)
        figure.set_size_inches(*_SQUARE)
        return self._draw("pairwise", run, f"Constants of all pairs of classes, {run.name}", figure)

    def training(self, run: RunFolder) -> list[Drawn]:
        """Constants, losses and accuracies over the epochs, as far as they were recorded."""
        constants = {name: _series(run, f"estimated_mean_{name}") for name in ("naive", "liplt")}
        values = [value for _, series in constants.values() for value in series]
        logarithmic = bool(values) and max(values) > _LOG_FROM * max(min(values), 1e-30)
        losses = {"loss": _series(run, "loss"), "base": _series(run, "base"), "robust part": _series(run, "robust")}
        accuracies = {"training": _series(run, "train_accuracy"), "clean": _series(run, "clean")}
        for eps in dict.fromkeys(eps for record in run.metrics for eps in record.get("estimated_certified", {})):
            accuracies[f"certified at {eps} (estimate)"] = _series(run, "estimated_certified", eps)
        drawn = []
        for name, label, series in (
            ("constants", "mean pairwise constant (estimate)", constants),
            ("losses", "loss", losses),
            ("accuracies", "accuracy", accuracies),
        ):
            known = {key: value for key, value in series.items() if value[0]}
            if known:
                scale = logarithmic and name == "constants"
                figure = lines(known, "epoch", label, percent=name == "accuracies", logarithmic=scale)
                _legend_below(figure)
                figure.set_size_inches(*_THIRD)
                drawn.append(self._draw(name, run, f"{label} over the epochs, {run.name}", figure))
        return drawn


def data_uri(image: NDArray[np.float32]) -> str:
    """An image (C, H, W) with pixels in [0, 1] as a PNG; the first channel if it has neither one nor three."""
    from PIL import Image

    pixels = np.clip(np.rint(image * 255), 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels.transpose(1, 2, 0) if len(pixels) == 3 else pixels[0]).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


@styled
def _legend_below(figure: Figure) -> None:
    """Where it hides no line and has room for two columns."""
    for legend in [*figure.legends, *(axes.get_legend() for axes in figure.axes)]:
        if legend is not None:
            legend.remove()
    entries = [entry for axes in figure.axes for entry in zip(*axes.get_legend_handles_labels(), strict=True)]
    figure.legend(*zip(*entries, strict=True), loc="outside lower left", ncols=2)


def _series(run: RunFolder, *keys: str) -> tuple[list[float], list[float]]:
    """Epochs and values of a metric, where there are any; several keys lead to a value of a level below."""
    epochs, values = [], []
    for record in run.metrics:
        value: Any = record
        for key in keys:
            value = value.get(key, {})
        if value != {}:
            epochs.append(record["epoch"])
            values.append(value)
    return epochs, values


def _site(name: str, kinds: dict[str, str]) -> str:
    return f"{name} {kinds[name]}" if kinds.get(name) else name


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
