"""What certifying gives: predictions with radii, and how they are shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lipcert.errors import OptionError
from lipcert.shown import Shown


@dataclass(frozen=True, eq=False)
class Certificates(Shown):
    """Predictions with certified radii, one entry per input.

    prediction: class that the model returns.
    margin: its logit minus the next largest, as computed.
    radius: no input closer than this changes the prediction of the model as executed;
    float64, 0 if nothing is known.
    label: true classes, if given.
    guarantee: that of the bound.
    norm: of the distances, 2 or ∞.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
        >>> certificates = lipcert.certify(model, torch.rand(5, 4), labels=torch.tensor([0, 1, 2, 0, 1]))
        >>> certificates.certified_accuracy(0.5) <= certificates.clean_accuracy
        True
    """

    prediction: Tensor
    margin: Tensor
    radius: Tensor
    guarantee: str
    label: Tensor | None = None
    norm: float = 2.0

    def __len__(self) -> int:
        return len(self.prediction)

    @property
    def correct(self) -> Tensor:
        """Which predictions equal the labels."""
        if self.label is None:
            raise OptionError(
                "accuracy needs labels: pass labels= or a loader of (inputs, "
                "labels) to certify"
            )
        return self.prediction == self.label

    @property
    def clean_accuracy(self) -> float:
        return float(self.correct.double().mean())

    def certified_accuracy(self, epsilon: float) -> float:
        """Share of inputs that are classified correctly and certified at radius ε."""
        # torch has no mean of truth values; as float64 they are counted exactly,
        # however many there are.
        return float((self.correct & (self.radius >= epsilon)).double().mean())

    def certified_accuracies(self, epsilons: Iterable[float]) -> list[float]:
        """The certified accuracy at each of several radii."""
        return [self.certified_accuracy(epsilon) for epsilon in epsilons]

    def __repr__(self) -> str:
        accuracy = ""
        if self.label is not None and len(self):
            accuracy = f", clean accuracy {self.clean_accuracy:.2%}"
        median = float(self.radius.median()) if len(self) else float("nan")
        return (
            f"Certificates({len(self)} inputs, median radius "
            f"{median:.4g}{accuracy}, {self.guarantee})"
        )


def take(certificates: Certificates, index: slice | Tensor) -> Certificates:
    """Some of the certificates."""
    label = certificates.label
    return replace(
        certificates,
        prediction=certificates.prediction[index],
        margin=certificates.margin[index],
        radius=certificates.radius[index],
        label=None if label is None else label[index],
    )


def concatenate(batches: Sequence[Certificates]) -> Certificates:
    """The certificates of several batches as one; labels only if all have them."""
    labels = [batch.label for batch in batches if batch.label is not None]
    return Certificates(
        torch.cat([batch.prediction for batch in batches]),
        torch.cat([batch.margin for batch in batches]),
        torch.cat([batch.radius for batch in batches]),
        batches[0].guarantee,
        torch.cat(labels) if len(labels) == len(batches) else None,
        batches[0].norm,
    )
