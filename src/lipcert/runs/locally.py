"""Local certificates of a run folder: bounds over balls of the sizes that were asked for."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from pathlib import Path

import torch
from torch import Tensor

from lipcert.bounds.bound import Bound
from lipcert.certificate import Certificates
from lipcert.certificate.inputs import compared
from lipcert.certificate.stream import certify_to_csv
from lipcert.data import Dataset
from lipcert.layout import LOCAL
from lipcert.local.certify_local import LocalCertifier
from lipcert.models import LoadedModel
from lipcert.progress import Progress

_BATCH = 32


def norm_name(norm: float) -> str:
    """As it is written in summaries and tables."""
    return "l∞" if norm == inf else "l2"


def certify_locally(
    loaded: LoadedModel,
    dataset: Dataset,
    bound: Bound,
    norm: float,
    epsilons: Sequence[float],
    count: int,
    folder: Path,
    progress: Progress,
) -> Certificates:
    """Local certificates of the first test inputs, in the folder; continued where they stopped."""
    test = dataset.test
    # Radii depend on the sizes that were tried, so that they are part of what rows are
    # of.
    sizes = ",".join(f"{epsilon!r}" for epsilon in sorted(epsilons))
    origin = (
        f"{dataset.name} {dataset.checksum} {loaded.execution} {bound.method} "
        f"local {norm_name(norm)} {sizes}"
    )
    certifier = LocalCertifier(loaded.network, tuple(loaded.input_shape), norm, bound)

    def certify(x: Tensor, first: int, label: Tensor | None) -> Certificates:
        # Smaller ε first: where one fails, larger ones are not tried.
        return certifier.certify_at(x, sorted(epsilons), first, label)

    return certify_to_csv(
        compared(certify, certifier.captured, loaded.model),
        bound,
        lambda first, last: (test.pixels(slice(first, last)), test.labels[first:last]),
        count,
        folder / LOCAL,
        origin=origin,
        batch_size=_BATCH,
        progress=progress,
    )


def larger_radii(
    certificates: Certificates, local: Certificates | None, norm: float
) -> Certificates:
    """What l2 attacks are to judge: the local radii where they are in l2, which are never below the others."""
    if local is None or norm != 2:
        return certificates
    # Both are of the same execution; otherwise distances would be compared with radii
    # of other predictions.
    assert torch.equal(certificates.prediction, local.prediction)
    return local
