"""What is drawn of a training: losses, accuracies and constants over its epochs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lipcert.runs.metrics import Record, metric_series

Curves = Mapping[str, tuple[list[int], list[float]]]
"""Epochs and values by the label of a curve."""
_ESTIMATED = "estimated_certified/"
_LOG_FROM = 20.0
"""Constants whose largest is that many times the smallest are drawn on a logarithmic axis."""


@dataclass(frozen=True)
class TrainingCurves:
    """The curves of one quantity, as far as they were recorded."""

    name: str
    quantity: str
    curves: Curves
    percent: bool = False
    logarithmic: bool = False


def training_curves(metrics: list[Record]) -> list[TrainingCurves]:
    """Losses, accuracies and mean constants; constants and certified shares are estimates."""
    series = metric_series(metrics)
    losses = {"loss": "all", "base": "base", "robust": "robust"}
    accuracies = {"train_accuracy": "training", "clean": "clean"}
    # The ε of a run are known from what it has recorded.
    for name in series:
        if name.startswith(_ESTIMATED):
            accuracies[name] = (
                f"certified at {name.removeprefix(_ESTIMATED)} (estimate)"
            )
    constants = {"estimated_mean_naive": "naive", "estimated_mean_liplt": "liplt"}
    mean_constants = _labelled(series, constants)
    return [
        TrainingCurves("losses", "loss", _labelled(series, losses)),
        TrainingCurves(
            "accuracies", "accuracy", _labelled(series, accuracies), percent=True
        ),
        TrainingCurves(
            "constants",
            "mean pairwise constant (estimate)",
            mean_constants,
            logarithmic=_is_wide(mean_constants),
        ),
    ]


def _labelled(series: Curves, labels: Mapping[str, str]) -> Curves:
    """The recorded ones of these metrics, by their labels."""
    curves = {}
    for metric, label in labels.items():
        if metric in series:
            curves[label] = series[metric]
    return curves


def _is_wide(curves: Curves) -> bool:
    """Whether the largest value is many times the smallest."""
    values: list[float] = []
    for _, recorded in curves.values():
        values += recorded
    # A constant may be 0, which has no logarithm.
    return bool(values) and max(values) > _LOG_FROM * max(min(values), 1e-30)
