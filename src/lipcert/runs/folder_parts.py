"""The files of a run folder, each read and checked against the certificates that it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
from lipcert.certificate.stream import read_certificates, read_origin
from lipcert.errors import DataError, LipcertError
from lipcert.layout import CERTIFICATES, LOCAL, MODEL
from lipcert.runs.evidence import read_attacks
from lipcert.runs.summary import (
    Example,
    Summary,
    read_object,
    weights_digest,
)

T = TypeVar("T")
_SAME = 1e-9
"""Shares of the same certificates differ by less, in any order of summation."""


@dataclass(frozen=True)
class Picture:
    """An image of the test split with the closest one found that is classified differently."""

    example: Example
    image: NDArray[np.float32]
    adversarial: NDArray[np.float32]


@dataclass(frozen=True)
class OptionalFiles:
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


def read_all_certificates(folder: Path, summary: Summary) -> Certificates:
    """The certificates of a folder, of which there has to be one at least, and which are those of its summary."""
    path = folder / CERTIFICATES
    try:
        certificates = read_certificates(path, summary.guarantee)
        origin = read_origin(path)
    except (OSError, ValueError, LipcertError) as error:
        raise DataError(
            f"{path} cannot be read ({error}); certify the model again"
        ) from None
    if len(certificates) == 0:
        raise DataError(f"{path} holds no certificates; certify the model again")
    # Without a fingerprint in either, nothing says whose they are.
    known = origin.get("fingerprint") is not None
    belongs = known and origin["fingerprint"] == summary.fingerprint
    # "cifar10 <checksum> float64 liplt", as `lipcert certify` writes it.
    came = origin.get("origin", "")
    belongs = belongs and came.startswith(f"{summary.data} ")
    belongs = belongs and f" {summary.execution} " in came
    if not belongs or not _states(summary, certificates):
        raise DataError(
            f"{folder}: the summary is not about the certificates beside it, or one of "
            "them was edited; certify the model again"
        )
    return certificates


def _states(summary: Summary, certificates: Certificates) -> bool:
    """Whether the figures of the summary are those of the certificates."""
    stated = [summary.clean]
    found = [certificates.clean_accuracy]
    for entry in summary.at:
        stated.append(entry.certified)
        found.append(certificates.certified_accuracy(entry.epsilon))
    return bool(np.allclose(stated, found, rtol=0.0, atol=_SAME))


def read_attacked(
    path: Path, certificates: Certificates
) -> tuple[Certificates, Tensor]:
    """The certificates of the attacked inputs, and how far the closest images found are."""
    index, distance = read_attacks(path)
    if index[-1] >= len(certificates):
        raise ValueError(
            f"input {int(index[-1])} was attacked, but there are "
            f"{len(certificates)} certificates"
        )
    attacked = take(certificates, index)
    # Files of different runs in one folder, or a false certificate: neither may be
    # shown side by side.
    if bool((distance < attacked.radius).any()):
        problem = "an image with another prediction lies inside a certified radius"
        raise ValueError(problem)
    return attacked, distance


def read_constants(path: Path, summary: Summary) -> dict[str, Any]:
    """Means and contributions by method, of the weights of a summary."""
    constants = read_object(path)
    _check_identity(constants["fingerprint"], summary.fingerprint)
    if not {*constants["methods"]} <= {"naive", summary.method}:
        raise ValueError("it has a method that is neither naive nor that of the bound")
    for name, method in constants["methods"].items():
        # Raises here, where it is reported as damage, not in the middle of drawing.
        mean = float(method["mean"])
        parts = sum(map(float, method["contributions"].values()))
        stated = summary.mean_constant if name == summary.method else None
        if not np.allclose([parts, stated or mean], mean, rtol=1e-6, atol=0.0):
            raise ValueError(f"the mean constant of {name} is not {mean:.6g}")
    return constants


def check_rests_on(folder: Path, summary: Summary, bound: Bound) -> None:
    """Refuse a summary that says something else about its bound than the bound does."""
    stated = (summary.guarantee, summary.method, summary.target)
    found = (bound.guarantee, bound.method, bound.target)
    constant = summary.mean_constant
    same_mean = constant is None or np.isclose(constant, bound.mean)
    if stated != found or not same_mean:
        raise DataError(
            f"{folder}: the summary says {stated}, mean constant {constant}, its bound "
            f"{found}, {bound.mean}; certify the model again"
        )


def check_weights(folder: Path, summary: Summary) -> None:
    """Refuse weights that are not those that were certified; a folder without any keeps its results."""
    found = weights_digest(folder)
    if None not in (found, summary.weights) and found != summary.weights:
        raise DataError(
            f"{folder / MODEL} is not the file whose certificates are in the folder; "
            "put it back, or certify the model again"
        )


def check_local(folder: Path, summary: Summary) -> None:
    """Refuse shares of local certificates that those in the folder do not have."""
    stated = [entry for entry in summary.at if entry.local is not None]
    if not stated:
        return
    path = folder / LOCAL
    try:
        local, origin = read_certificates(path), read_origin(path).get("origin", "")
    except (OSError, ValueError, LipcertError) as error:
        raise DataError(
            f"{path} cannot be read ({error}); certify the model again"
        ) from None
    same = f"local {summary.local_norm} " in origin
    for entry in stated:
        found = local.certified_accuracy(entry.epsilon)
        same = same and abs(found - (entry.local or 0.0)) <= _SAME
    if not same:
        raise DataError(
            f"{folder}: the summary is not about the local certificates in {path.name}; "
            "certify the model again"
        )


def read_own_bound(path: Path, fingerprint: str | None) -> Bound:
    """A bound of the weights with this fingerprint."""
    bound = Bound.load(path)
    _check_identity(bound.facts.fingerprint, fingerprint)
    return bound


def _check_identity(stored: object, fingerprint: str | None) -> None:
    if stored != fingerprint:
        raise ValueError("it belongs to other weights than the certificates")


def read_gallery(
    path: Path, examples: Sequence[Example], certificates: Certificates
) -> list[Picture]:
    """The images of these entries of the summary, which say what the certificates and the images do."""
    tensors = load_file(path)
    images, adversarial = tensors["images"], tensors["adversarial"]
    fits = images.shape == adversarial.shape and len(images) == len(examples)
    if not fits or images.ndim != 4:
        raise ValueError("its images do not belong to the entries of summary.json")
    moved = (adversarial.astype(np.float64) - images).reshape(len(images), -1)
    for example, distance in zip(examples, np.linalg.norm(moved, axis=1), strict=True):
        given = (example.prediction, example.radius, example.distance or distance)
        k = example.idx
        radius = float(certificates.radius[k])
        found = (int(certificates.prediction[k]), radius, distance)
        if not np.allclose(given, found, rtol=1e-6, atol=0.0):
            raise ValueError(f"summary.json says something else about input {k}")
    return list(map(Picture, examples, images, adversarial))
