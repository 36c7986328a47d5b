"""What a report needs, read from the folders of runs; what is not there is named with the reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file
from torch import Tensor

from lipcert.bounds.bound import Bound
from lipcert.certificate import Certificates
from lipcert.certificate.certificates import take
from lipcert.certificate.stream import read_certificates
from lipcert.errors import DataError, LipcertError
from lipcert.layout import (
    ATTACKS,
    BOUND,
    CERTIFICATES,
    CONFIG,
    CONSTANTS,
    ENVIRONMENT,
    GALLERY,
    METRICS,
    SUMMARY,
    TWIN,
)
from lipcert.losses import LOSSES
from lipcert.runs.evidence import attacked_accuracy, read_attacks
from lipcert.runs.metrics import Record, read_metrics
from lipcert.runs.summary import Example, Summary, read_object, read_summary

T = TypeVar("T")


@dataclass(frozen=True)
class Picture:
    """An image of the test split with the closest one found that is classified differently."""

    example: Example
    image: NDArray[np.float32]
    adversarial: NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class RunFolder:
    """The contents of a run folder, or of a folder that `lipcert certify` has written.

    attacked, distance: the attacked inputs, and how far the closest images found with
    another prediction are; None if
        no input was attacked.
    constants: means and contributions by method. bound: what the certificates rest on.
    missing: the parts that are not there, by name, each with the reason.
    twin: whether it is the standard twin of the run before it.
    """

    folder: Path
    name: str
    summary: Summary
    certificates: Certificates
    attacked: Certificates | None
    distance: Tensor | None
    constants: dict[str, Any] | None
    bound: Bound | None
    metrics: list[Record]
    gallery: list[Picture]
    environment: dict[str, Any] | None
    config: str | None
    missing: dict[str, str]
    twin: bool = False

    @property
    def loss(self) -> str | None:
        """What it was trained by, in words; None if the folder does not say."""
        loss = self.summary.loss
        if loss in LOSSES:
            return LOSSES[loss].label
        return loss

    @property
    def data(self) -> str:
        return self.summary.data_title or self.summary.data

    @property
    def model(self) -> str:
        """The name of the network; of one that was loaded from a file, the end of its path."""
        name = self.summary.model
        if name.endswith(".safetensors"):
            return "/".join(Path(name).parts[-2:])
        return name

    @property
    def pairwise(self) -> NDArray[np.float64] | None:
        """Guaranteed constants of the differences between any two classes."""
        if self.bound is None or self.bound.target == "network":
            return None
        return self.bound.pairwise(len(self.bound.value)).numpy()

    @property
    def contributions(self) -> dict[str, dict[str, float]]:
        """The contribution of every site to the mean constant, by method."""
        if self.constants is not None:
            return {
                method: constant["contributions"]
                for method, constant in self.constants["methods"].items()
            }
        if self.bound is not None:
            return {self.bound.method: self.bound.contributions}
        return {}

    @property
    def class_names(self) -> list[str]:
        if self.summary.class_names:
            return list(self.summary.class_names)
        classes = 1 + int(self.certificates.prediction.max())
        if self.pairwise is not None:
            classes = len(self.pairwise)
        return list(map(str, range(classes)))

    @property
    def clean(self) -> float:
        return self.certificates.clean_accuracy

    def certified_at(self, epsilon: float) -> float:
        return self.certificates.certified_accuracy(epsilon)

    def attacked_at(self, epsilon: float) -> float | None:
        if self.attacked is None or self.distance is None:
            return None
        return attacked_accuracy(self.attacked.correct, self.distance, epsilon)


def read_runs(folders: Sequence[str | Path]) -> list[RunFolder]:
    """The runs in the folders, each followed by its standard twin if there is one; names are made distinct."""
    runs = []
    for folder in map(Path, folders):
        run = read_run(folder)
        runs.append(run)
        if (folder / TWIN / SUMMARY).exists():
            runs.append(
                replace(
                    read_run(folder / TWIN), name=f"{run.name} (standard)", twin=True
                )
            )
    counts = Counter(run.name for run in runs)
    for k, run in enumerate(runs):
        if counts[run.name] > 1:
            # Names are the keys of tables and legends: two runs called "run" would be
            # one.
            runs[k] = replace(run, name=f"{run.name} ({run.folder})")
    if len({run.name for run in runs}) < len(runs):
        raise DataError(
            f"a run is given twice: {', '.join(run.name for run in runs)}; name every folder once"
        )
    return runs


def read_run(folder: Path) -> RunFolder:
    """Summary and certificates must be there; of everything else, what is not there or damaged is left out."""
    summary = read_summary(folder)
    certificates = _certificates(folder, summary)
    optional = _Optional(folder)
    attacked, distance = None, None
    attacks = optional.read(
        "attacks", ATTACKS, lambda path: _attacks(path, certificates)
    )
    if attacks is not None:
        attacked, distance = attacks
    identity = summary.fingerprint
    return RunFolder(
        folder,
        summary.name or folder.resolve().name,
        summary,
        certificates,
        attacked,
        distance,
        optional.read("constants", CONSTANTS, lambda path: _constants(path, identity)),
        optional.read("bound", f"{BOUND}.json", lambda path: _bound(path, identity)),
        optional.read("metrics", METRICS, lambda _: read_metrics(folder)) or [],
        optional.read("gallery", GALLERY, lambda path: _gallery(path, summary.gallery))
        or [],
        optional.read("environment", ENVIRONMENT, read_object),
        optional.read("config", CONFIG, lambda path: path.read_text("utf-8")),
        optional.missing,
    )


@dataclass(frozen=True)
class _Optional:
    """Reads files that may be missing or damaged, and keeps the reasons."""

    folder: Path
    missing: dict[str, str] = field(default_factory=dict)

    def read(self, name: str, file: str, reader: Callable[[Path], T]) -> T | None:
        path = self.folder / file
        try:
            if path.exists():
                return reader(path)
            self.missing[name] = f"there is no {file}"
        except LipcertError as error:
            self.missing[name] = str(error)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            self.missing[name] = f"{path} is damaged ({type(error).__name__}: {error})"
        return None


def _certificates(folder: Path, summary: Summary) -> Certificates:
    path = folder / CERTIFICATES
    try:
        certificates = read_certificates(path, summary.guarantee)
    except (OSError, ValueError, LipcertError) as error:
        raise DataError(
            f"{path} cannot be read ({error}); certify the model again"
        ) from None
    if len(certificates) == 0:
        raise DataError(f"{path} holds no certificates; certify the model again")
    return certificates


def _attacks(path: Path, certificates: Certificates) -> tuple[Certificates, Tensor]:
    """The certificates of the attacked inputs, and how far the closest images found are."""
    index, distance = read_attacks(path)
    if index[-1] >= len(certificates):
        raise ValueError(
            f"input {int(index[-1])} was attacked, but there are {len(certificates)} certificates"
        )
    attacked = take(certificates, index)
    # Files of different runs in one folder, or a false certificate: neither may be
    # shown side by side.
    if bool((distance < attacked.radius).any()):
        raise ValueError(
            "an image with another prediction lies inside a certified radius"
        )
    return attacked, distance


def _constants(path: Path, fingerprint: str | None) -> dict[str, Any]:
    constants = read_object(path)
    _check_identity(constants["fingerprint"], fingerprint)
    for method in constants["methods"].values():
        for value in (method["mean"], *method["contributions"].values()):
            # Raises here, where it is reported as damage, not in the middle of drawing.
            float(value)
    return constants


def _bound(path: Path, fingerprint: str | None) -> Bound:
    bound = Bound.load(path)
    _check_identity(bound.facts.fingerprint, fingerprint)
    return bound


def _check_identity(stored: object, fingerprint: str | None) -> None:
    if stored != fingerprint:
        raise ValueError("it belongs to other weights than the certificates")


def _gallery(path: Path, examples: Sequence[Example]) -> list[Picture]:
    tensors = load_file(path)
    images, adversarial = tensors["images"], tensors["adversarial"]
    if (
        images.shape != adversarial.shape
        or len(images) != len(examples)
        or images.ndim != 4
    ):
        raise ValueError("its images do not belong to the entries of summary.json")
    return list(map(Picture, examples, images, adversarial))
