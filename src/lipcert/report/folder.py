"""What a report needs, read from the folders of runs; what is not there is named with the reason."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file
from torch import Tensor

from lipcert.attacks import take
from lipcert.bounds.bound import Bound
from lipcert.certificate import Certificates
from lipcert.certificate.stream import read_certificates
from lipcert.errors import DataError, LipcertError
from lipcert.losses import LOSSES
from lipcert.training.environment import ENVIRONMENT
from lipcert.training.evidence import ATTACKS, CONSTANTS, GALLERY, attacked_accuracy, read_attacks
from lipcert.training.finish import SUMMARY
from lipcert.training.monitor import METRICS, read_metrics
from lipcert.training.run import CONFIG, TWIN

T = TypeVar("T")
CERTIFICATES = "certificates.csv"


@dataclass(frozen=True)
class Picture:
    """An image of the test split with the closest one found that is classified differently."""

    facts: dict[str, Any]
    image: NDArray[np.float32]
    adversarial: NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class RunFolder:
    """The contents of a run folder, or of a folder that `lipcert certify` has written.

    attacked, distance: the attacked inputs, and how far the closest images found with another prediction are; None if
        no input was attacked.
    constants: means and contributions by method. bound: what the certificates rest on.
    missing: the parts that are not there, by name, each with the reason.
    twin: whether it is the standard twin of the run before it.
    """

    folder: Path
    name: str
    summary: dict[str, Any]
    certificates: Certificates
    attacked: Certificates | None
    distance: Tensor | None
    constants: dict[str, Any] | None
    bound: Bound | None
    metrics: list[dict[str, Any]]
    gallery: list[Picture]
    environment: dict[str, Any] | None
    config: str | None
    missing: dict[str, str]
    twin: bool = False

    @property
    def epsilons(self) -> list[float]:
        return [entry["epsilon"] for entry in self.summary["at"]]

    @property
    def loss(self) -> str | None:
        """What it was trained by, in words; None if the folder does not say."""
        loss = self.summary.get("loss")
        if loss in LOSSES:
            return LOSSES[loss].label
        return loss or None

    @property
    def data(self) -> str:
        return str(self.summary.get("data_title") or self.summary["data"])

    @property
    def model(self) -> str:
        """The name of the network; of one that was loaded from a file, the end of its path."""
        name = str(self.summary["model"])
        return "/".join(Path(name).parts[-2:]) if name.endswith(".safetensors") else name

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
            return {method: found["contributions"] for method, found in self.constants["methods"].items()}
        return {self.bound.method: self.bound.contributions} if self.bound is not None else {}

    @property
    def class_names(self) -> list[str]:
        names = self.summary.get("class_names")
        classes = len(self.pairwise) if self.pairwise is not None else 1 + int(self.certificates.prediction.max())
        return list(names) if names else [str(k) for k in range(classes)]

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
        run = _read_run(folder)
        runs.append(run)
        if (folder / TWIN / SUMMARY).exists():
            runs.append(replace(_read_run(folder / TWIN), name=f"{run.name} (standard)", twin=True))
    counts = Counter(run.name for run in runs)
    runs = [run if counts[run.name] == 1 else replace(run, name=f"{run.name} ({run.folder})") for run in runs]
    if len({run.name for run in runs}) < len(runs):
        raise DataError(f"a run is given twice: {', '.join(run.name for run in runs)}; name every folder once")
    return runs


def _read_run(folder: Path) -> RunFolder:
    """Summary and certificates must be there; of everything else, what is not there or damaged is left out."""
    summary = _summary(folder)
    certificates = _certificates(folder, str(summary.get("guarantee", "")))
    missing: dict[str, str] = {}

    def part(name: str, file: str, read: Callable[[], T]) -> T | None:
        try:
            if (folder / file).exists():
                return read()
            missing[name] = f"there is no {file}"
        except LipcertError as error:
            missing[name] = str(error)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            missing[name] = f"{folder / file} is damaged ({type(error).__name__}: {error})"
        return None

    mark = summary.get("fingerprint")
    attacked, distance = part("attacks", ATTACKS, lambda: _attacks(folder / ATTACKS, certificates)) or (None, None)
    return RunFolder(
        folder,
        str(summary.get("name") or folder.resolve().name),
        summary,
        certificates,
        attacked,
        distance,
        part("constants", CONSTANTS, lambda: _constants(folder / CONSTANTS, mark)),
        part("bound", "bound.json", lambda: _bound(folder / "bound", mark)),
        part("metrics", METRICS, lambda: read_metrics(folder)) or [],
        part("gallery", GALLERY, lambda: _gallery(folder / GALLERY, summary["gallery"])) or [],
        part("environment", ENVIRONMENT, lambda: _object(folder / ENVIRONMENT)),
        part("config", CONFIG, lambda: (folder / CONFIG).read_text("utf-8")),
        missing,
    )


def _summary(folder: Path) -> dict[str, Any]:
    path = folder / SUMMARY
    if not path.exists():
        remedy = (
            f"finish it with lipcert train --resume {folder}" if (folder / CONFIG).exists() else "give a run folder"
        )
        raise DataError(f"{folder} holds no finished run: {SUMMARY} is missing; {remedy}")
    try:
        summary = _object(path)
        entries = [(float(entry["epsilon"]), float(entry["certified"])) for entry in summary["at"]]
        if not entries or not all(isfinite(value) for entry in entries for value in entry):
            raise ValueError("it has no accuracies")
        _ = summary["model"], summary["data"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged ({type(error).__name__}: {error}); certify the model again") from None
    return summary


def _certificates(folder: Path, guarantee: str) -> Certificates:
    path = folder / CERTIFICATES
    try:
        certificates = read_certificates(path, guarantee)
    except (OSError, ValueError, LipcertError) as error:
        raise DataError(f"{path} cannot be read ({error}); certify the model again") from None
    if len(certificates) == 0:
        raise DataError(f"{path} holds no certificates; certify the model again")
    return certificates


def _object(path: Path) -> dict[str, Any]:
    value = json.loads(path.read_text("utf-8"))
    if not isinstance(value, dict):
        raise ValueError("expected a JSON object")
    return value


def _attacks(path: Path, certificates: Certificates) -> tuple[Certificates, Tensor]:
    index, distance = read_attacks(path)
    if index[-1] >= len(certificates):
        raise ValueError(f"input {int(index[-1])} was attacked, but there are {len(certificates)} certificates")
    return take(certificates, index), distance


def _constants(path: Path, mark: object) -> dict[str, Any]:
    facts = _object(path)
    _check_mark(facts["fingerprint"], mark)
    for method in facts["methods"].values():
        _ = float(method["mean"]), [float(value) for value in method["contributions"].values()]
    return facts


def _bound(path: Path, mark: object) -> Bound:
    bound = Bound.load(path)
    _check_mark(bound.facts.fingerprint, mark)
    return bound


def _check_mark(found: object, mark: object) -> None:
    if found != mark:
        raise ValueError("it belongs to other weights than the certificates")


def _gallery(path: Path, entries: list[dict[str, Any]]) -> list[Picture]:
    tensors = load_file(path)
    images, adversarial = tensors["images"], tensors["adversarial"]
    if images.shape != adversarial.shape or len(images) != len(entries) or images.ndim != 4:
        raise ValueError("its images do not belong to the entries of summary.json")
    return [Picture(facts, image, other) for facts, image, other in zip(entries, images, adversarial, strict=True)]
