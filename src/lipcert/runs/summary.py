"""The result of a run, as it is kept in summary.json."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from math import isfinite
from pathlib import Path
from typing import Any

from lipcert.errors import DataError
from lipcert.files import write_json
from lipcert.layout import CONFIG, MODEL, SUMMARY


@dataclass(frozen=True)
class Accuracy:
    """Shares of the test inputs at one ε: certified, left standing by attacks, and certified locally, if they were."""

    epsilon: float
    certified: float
    attacked: float | None = None
    local: float | None = None


@dataclass(frozen=True)
class Example:
    """A test image of the gallery: where it is, how it is classified, and how far the closest other one found is."""

    group: str
    idx: int
    label: int
    prediction: int
    radius: float
    distance: float | None = None
    adversarial_prediction: int | None = None


@dataclass(frozen=True)
class Summary:
    """What a run has reached, by guaranteed bounds.

    Of a model that was certified without being trained here, name, loss, epochs and
    seed are None. A run folder of an earlier version may lack more.

    Example:
        >>> summary = lipcert.pretrained("digits").summary
        >>> summary.at[0].certified <= summary.clean
        True
    """

    model: str
    data: str
    at: tuple[Accuracy, ...]
    name: str | None = None
    loss: str | None = None
    epochs: int | None = None
    seed: int | None = None
    note: str = ""
    data_title: str = ""
    data_note: str = ""
    inputs: int = 0
    units: str = ""
    execution: str = "float32"
    method: str | None = None
    target: str | None = None
    guarantee: str = ""
    mean_constant: float | None = None
    fingerprint: str | None = None
    weights: str | None = None
    """SHA-256 of the file of weights that is in the same folder; None if there is none."""
    clean: float = 0.0
    mean_radius: float = 0.0
    median_radius: float = 0.0
    class_names: tuple[str, ...] = ()
    local_norm: str | None = None
    """The norm of the local certificates, "l2" or "l∞"; None if there are none."""
    attacked_inputs: int = 0
    gallery: tuple[Example, ...] = ()
    training_seconds: float | None = None
    certifying_seconds: float | None = None
    local_seconds: float | None = None
    attacking_seconds: float | None = None
    seconds: float | None = None

    @property
    def epsilons(self) -> list[float]:
        """The sizes of perturbations that the accuracies are for."""
        return [entry.epsilon for entry in self.at]

    def local_shares(self) -> str:
        """The shares that are certified locally, in words; empty if there are none."""
        shares = []
        for entry in self.at:
            if entry.local is not None:
                shares.append(f"{entry.local:.2%} at ε = {entry.epsilon:.4g}")
        if not shares:
            return ""
        return f"certified locally ({self.local_norm}): {', '.join(shares)}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values, without those that are not known."""
        # A missing name reads back as its default, None.
        return {
            name: value for name, value in asdict(self).items() if value is not None
        }

    def write(self, folder: Path) -> None:
        write_json(folder / SUMMARY, self.as_dict())

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Summary:
        """The summary with these values; names that this version does not know are left out."""
        known = {field.name for field in fields(cls)}
        # A newer version may have written names that this one does not know.
        chosen = {name: value for name, value in values.items() if name in known}
        chosen["at"] = tuple(Accuracy(**entry) for entry in values["at"])
        chosen["gallery"] = tuple(
            Example(**entry) for entry in values.get("gallery", ())
        )
        chosen["class_names"] = tuple(values.get("class_names", ()))
        summary = cls(**chosen)
        # JSON of Python has NaN and Infinity, which would pass as accuracies.
        shares = [
            float(share)
            for entry in summary.at
            for share in (entry.epsilon, entry.certified)
        ]
        if not shares or not all(isfinite(share) for share in shares):
            raise ValueError("it has no accuracies")
        return summary


def weights_digest(folder: Path) -> str | None:
    """SHA-256 of the weights in a folder, if there are any."""
    path = folder / MODEL
    if not path.exists():
        return None
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_summary(folder: Path) -> Summary:
    """The summary of a finished run."""
    path = folder / SUMMARY
    if not path.exists():
        remedy = "give a run folder"
        if (folder / CONFIG).exists():
            remedy = f"finish it with lipcert train --resume {folder}"
        raise DataError(
            f"{folder} holds no finished run: {SUMMARY} is missing; {remedy}"
        )
    try:
        return Summary.from_dict(read_object(path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is damaged ({type(error).__name__}: {error}); "
            "certify the model again"
        ) from None


def read_object(path: Path) -> dict[str, Any]:
    """The values of a JSON object."""
    value = json.loads(path.read_text("utf-8"))
    if not isinstance(value, dict):
        raise ValueError("expected a JSON object")
    return value
