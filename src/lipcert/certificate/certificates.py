"""What certifying gives: predictions with radii, and how they are shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lipcert.errors import OptionError
from lipcert.figures import TextTable, accuracy_curve, data_frame, radius_histogram

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from rich.table import Table

_QUANTILES = {"smallest": 0.0, "25 %": 0.25, "median": 0.5, "75 %": 0.75, "largest": 1.0}


@dataclass(frozen=True, eq=False)
class Certificates:
    """Predictions with certified l2 radii, one entry per input.

    prediction: class that the model returns. margin: its logit minus the next largest, as computed.
    radius: no input closer than this changes the prediction of the model as executed; float64, 0 if nothing is known.
    label: true classes, if given. guarantee: that of the bound.
    """

    prediction: Tensor
    margin: Tensor
    radius: Tensor
    guarantee: str
    label: Tensor | None = None

    def __len__(self) -> int:
        return len(self.prediction)

    @property
    def correct(self) -> Tensor:
        """Which predictions equal the labels."""
        if self.label is None:
            raise OptionError("accuracy needs labels: pass labels= or a loader of (inputs, labels) to certify")
        return self.prediction == self.label

    @property
    def clean_accuracy(self) -> float:
        return float(self.correct.double().mean())

    def certified_accuracy(self, epsilon: float) -> float:
        """Share of inputs that are classified correctly and certified at radius ε."""
        return float((self.correct & (self.radius >= epsilon)).double().mean())

    def certified_accuracies(self, epsilons: Iterable[float]) -> list[float]:
        """The certified accuracy at each of several radii."""
        return [self.certified_accuracy(epsilon) for epsilon in epsilons]

    def __repr__(self) -> str:
        accuracy = f", clean accuracy {self.clean_accuracy:.2%}" if self.label is not None and len(self) else ""
        median = float(self.radius.median()) if len(self) else float("nan")
        return f"Certificates({len(self)} inputs, median radius {median:.4g}{accuracy}, {self.guarantee})"

    def __rich__(self) -> Table:
        return self._table().rich()

    def _repr_html_(self) -> str:
        return self._table().html()

    def _table(self) -> TextTable:
        parts = {"all": self.radius}
        if self.label is not None:
            parts |= {"correct": self.radius[self.correct], "wrong": self.radius[~self.correct]}
        accuracy = f"clean accuracy {self.clean_accuracy:.2%}; " if self.label is not None and len(self) else ""
        return TextTable(
            f"Certified radii of {len(self):,} inputs",
            ("which", "inputs", *_QUANTILES),
            [(name, f"{len(radius):,}", *_quantiles(radius)) for name, radius in parts.items()],
            f"{accuracy}l2 in the units of the input, {self.guarantee}, rounding included",
        )

    def plot(self, unit: str = "l2") -> Figure:
        """Certified accuracy over ε; without labels, the distribution of the radii."""
        if self.label is None:
            return radius_histogram(self.radius.numpy(), unit=unit)
        return accuracy_curve({"certified": (self.radius[self.correct].numpy(), len(self))}, unit=unit)

    def to_pandas(self) -> pandas.DataFrame:
        """One row per input: prediction, margin, radius and, with labels, label and whether the prediction is right."""
        columns = {"prediction": self.prediction, "margin": self.margin, "radius": self.radius}
        if self.label is not None:
            columns |= {"label": self.label, "correct": self.correct}
        return data_frame({name: values.numpy() for name, values in columns.items()})


def _quantiles(radius: Tensor) -> list[str]:
    """Entries of the sorted radii, rounded down to an existing one."""
    ordered = radius.sort().values
    return [f"{ordered[int(q * (len(ordered) - 1))]:.4g}" if len(ordered) else "–" for q in _QUANTILES.values()]


def concatenate(batches: Sequence[Certificates]) -> Certificates:
    """The certificates of several batches as one; labels only if all have them."""
    labels = [batch.label for batch in batches if batch.label is not None]
    return Certificates(
        torch.cat([batch.prediction for batch in batches]),
        torch.cat([batch.margin for batch in batches]),
        torch.cat([batch.radius for batch in batches]),
        batches[0].guarantee,
        torch.cat(labels) if len(labels) == len(batches) else None,
    )
