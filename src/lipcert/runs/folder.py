"""What a report needs, read from the folders of runs; what is not there is named with the reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lipcert.bounds.bound import Bound
from lipcert.certificate import Certificates
from lipcert.errors import DataError
from lipcert.layout import (
    ATTACKS,
    BOUND,
    CONFIG,
    CONSTANTS,
    ENVIRONMENT,
    GALLERY,
    METRICS,
    SUMMARY,
    TWIN,
)
from lipcert.losses import LOSSES
from lipcert.runs.evidence import attacked_accuracy
from lipcert.runs.folder_parts import (
    OptionalFiles,
    Picture,
    check_local,
    check_rests_on,
    check_weights,
    read_all_certificates,
    read_attacked,
    read_constants,
    read_gallery,
    read_own_bound,
)
from lipcert.runs.metrics import Record, read_metrics
from lipcert.runs.summary import Summary, read_object, read_summary


@dataclass(frozen=True, eq=False)
class RunFolder:
    """The contents of a run folder, or of a folder that `lipcert certify` has written.

    attacked, distance: the attacked inputs, and how far the closest images found with
    another prediction are; None if
        no input was attacked.
    constants: means and contributions by method.
    bound: what the certificates rest on.
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
            methods = self.constants["methods"]
            return {name: found["contributions"] for name, found in methods.items()}
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
            twin = read_run(folder / TWIN)
            runs.append(replace(twin, name=f"{run.name} (standard)", twin=True))
    counts = Counter(run.name for run in runs)
    for k, run in enumerate(runs):
        if counts[run.name] > 1:
            # Names are the keys of tables and legends: two runs called "run" would be
            # one.
            runs[k] = replace(run, name=f"{run.name} ({run.folder})")
    if len({run.name for run in runs}) < len(runs):
        raise DataError(
            f"a run is given twice: {', '.join(run.name for run in runs)}; "
            "name every folder once"
        )
    return runs


def read_run(folder: Path) -> RunFolder:
    """Summary and certificates must be there; of everything else, what is not there or damaged is left out."""
    summary = read_summary(folder)
    certificates = read_all_certificates(folder, summary)
    optional = OptionalFiles(folder)
    attacked, distance = None, None
    read, identity, shown = optional.read, summary.fingerprint, summary.gallery
    attacks = read("attacks", ATTACKS, lambda path: read_attacked(path, certificates))
    if attacks is not None:
        attacked, distance = attacks
    bound = read("bound", f"{BOUND}.json", lambda path: read_own_bound(path, identity))
    if bound is not None:
        check_rests_on(folder, summary, bound)
    check_local(folder, summary)
    check_weights(folder, summary)
    return RunFolder(
        folder,
        summary.name or folder.resolve().name,
        summary,
        certificates,
        attacked,
        distance,
        read("constants", CONSTANTS, lambda path: read_constants(path, summary)),
        bound,
        read("metrics", METRICS, lambda _: read_metrics(folder)) or [],
        read("gallery", GALLERY, lambda path: read_gallery(path, shown, certificates))
        or [],
        read("environment", ENVIRONMENT, read_object),
        read("config", CONFIG, lambda path: path.read_text("utf-8")),
        optional.missing,
    )
