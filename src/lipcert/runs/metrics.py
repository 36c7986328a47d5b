"""The figures of a training over its epochs, one line of JSON each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lipcert.layout import METRICS

Record = dict[str, Any]


def read_metrics(folder: Path) -> list[Record]:
    """The complete lines of a run's metrics.jsonl."""
    path = folder / METRICS
    if not path.exists():
        return []
    text = path.read_text()
    # A process that was killed may have left half a line. Without any line end rfind
    # gives −1, and nothing is left.
    complete = text[: text.rfind("\n") + 1]
    return [json.loads(line) for line in complete.splitlines()]


def flat_metrics(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """A record as plain numbers; those of a level below are named like "estimated_certified/0.5"."""
    result: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            result |= flat_metrics(value, f"{prefix}{name}/")
        else:
            result[prefix + name] = float(value)
    return result


def metric_series(records: list[Record]) -> dict[str, tuple[list[int], list[float]]]:
    """For every metric by its flat name, the epochs that have it and its values."""
    series: dict[str, tuple[list[int], list[float]]] = {}
    for record in records:
        for name, value in flat_metrics(record).items():
            # Certified shares are measured in some epochs only, so that every metric
            # has epochs of its own.
            epochs, values = series.setdefault(name, ([], []))
            epochs.append(record["epoch"])
            values.append(value)
    return series
