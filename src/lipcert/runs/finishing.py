"""From a model to a finished folder: its bound, certificates of the test split, attacks, pictures and the summary."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lipcert.bounds.bound import Bound
from lipcert.bounds.fingerprint import fingerprint
from lipcert.bounds.fit import FitOptions
from lipcert.bounds.stored import stored_bound
from lipcert.certificate import Certificates, Certifier
from lipcert.certificate.inputs import compared
from lipcert.certificate.stream import certify_to_csv, check_continues
from lipcert.data import Dataset
from lipcert.layout import BOUND, CERTIFICATES
from lipcert.models import LoadedModel
from lipcert.processes import sharing_work
from lipcert.progress import Progress
from lipcert.runs.evidence import attack_inputs, write_constants, write_gallery
from lipcert.runs.locally import certify_locally, larger_radii, norm_name
from lipcert.runs.summary import Accuracy, Summary, weights_digest

UNITS = "l2, pixels in [0, 1]"


@dataclass(frozen=True)
class Task:
    """What is to be certified and attacked: `inputs` test inputs from the first, of which some are attacked."""

    dataset: Dataset
    epsilons: Sequence[float]
    inputs: int
    attacked: int
    method: str = "liplt"
    fit: FitOptions | None = None
    local_norm: float | None = None
    """In which norm bounds over balls are wanted, too; None for none."""
    shared: bool = False
    """Whether the processes of `torchrun` divide the norms and the inputs."""


@dataclass(frozen=True)
class Certified:
    """What processes find together: the bound, and certificates of the test inputs.

    local: those by bounds over balls, if they are wanted. Seconds are those of the clock.
    """

    bound: Bound
    certificates: Certificates
    local: Certificates | None
    seconds: float
    local_seconds: float | None


def certify_together(
    loaded: LoadedModel, task: Task, folder: Path, progress: Progress
) -> Certified:
    """The part of `finish_folder` that the processes of `torchrun` divide, if the task is shared.

    All of them call this; the first one writes.
    """
    with sharing_work(task.shared):
        began = time.perf_counter()
        bound, certificates = certify_test(loaded, task, folder, progress)
        certified = time.perf_counter()
        local = local_seconds = None
        if task.local_norm is not None:
            about = task.local_norm, task.epsilons, len(certificates)
            local = certify_locally(
                loaded, task.dataset, bound, *about, folder, progress
            )
            local_seconds = time.perf_counter() - certified
        write_constants(loaded, bound, folder, progress)
    seconds = certified - began
    return Certified(bound, certificates, local, seconds, local_seconds)


def finish_folder(
    loaded: LoadedModel, task: Task, folder: Path, progress: Progress
) -> Summary:
    """Bound, certify and attack a model; writes everything but the summary, which is returned.

    Goes on where an interrupted one stopped: what is in the folder already, and belongs
    to this model, is used again.
    """
    began = time.perf_counter()
    # Certificates first: what follows attacks them or shows them.
    found = certify_together(loaded, task, folder, progress)
    certificates, local = found.certificates, found.local
    certified = time.perf_counter()
    # Only what was certified: the same inputs in the same order.
    test = task.dataset.test.take(slice(0, len(certificates)))
    attacked = min(task.attacked, len(test))
    # The larger the radii that attacks have to respect, the stricter the test.
    judged = larger_radii(certificates, local, task.local_norm or 2)
    # `executed` is what was certified, sums in parts and float64 included, not the
    # model as it was trained.
    standing = attack_inputs(
        loaded.executed, test, judged, task.epsilons, attacked, folder, progress
    )
    gallery = write_gallery(loaded.executed, test, certificates, folder)
    accuracies = _accuracies(task.epsilons, certificates, local, standing)
    # From here on nothing is written. The caller writes the summary last: it says that
    # all else is there.
    summary = _described(loaded, task.dataset, found.bound, certificates, accuracies)
    ended = time.perf_counter()
    return replace(
        summary,
        weights=weights_digest(folder),
        local_norm=None if task.local_norm is None else norm_name(task.local_norm),
        local_seconds=found.local_seconds,
        attacked_inputs=attacked,
        gallery=tuple(gallery),
        certifying_seconds=found.seconds,
        attacking_seconds=ended - certified,
        seconds=ended - began,
    )


def _accuracies(
    epsilons: Sequence[float],
    certificates: Certificates,
    local: Certificates | None,
    standing: Sequence[float | None],
) -> tuple[Accuracy, ...]:
    """At every ε, the shares that are certified, that attacks left standing, and that are certified locally."""
    accuracies = []
    for epsilon, left in zip(epsilons, standing, strict=True):
        share = None if local is None else local.certified_accuracy(epsilon)
        certified = certificates.certified_accuracy(epsilon)
        accuracies.append(Accuracy(epsilon, certified, left, share))
    return tuple(accuracies)


def _described(
    loaded: LoadedModel,
    dataset: Dataset,
    bound: Bound,
    certificates: Certificates,
    accuracies: tuple[Accuracy, ...],
) -> Summary:
    return Summary(
        model=loaded.name,
        data=dataset.name,
        at=accuracies,
        data_title=dataset.title,
        data_note=dataset.note,
        inputs=len(certificates),
        units=UNITS,
        execution=loaded.execution,
        method=bound.method,
        target=bound.target,
        guarantee=bound.guarantee,
        mean_constant=bound.mean,
        fingerprint=bound.facts.fingerprint,
        clean=certificates.clean_accuracy,
        mean_radius=float(certificates.radius.mean()),
        median_radius=float(certificates.radius.median()),
        class_names=tuple(dataset.class_names),
    )


def certify_test(
    loaded: LoadedModel, task: Task, folder: Path, progress: Progress
) -> tuple[Bound, Certificates]:
    """The bound of the model and the certificates of the first test inputs, both in the folder.

    What is there already of both is used again. A folder with certificates of something
    else is refused unchanged.
    """
    path, test = folder / CERTIFICATES, task.dataset.test
    # Everything that rows depend on besides the weights: rows of another method must
    # not be continued.
    data = task.dataset
    origin = f"{data.name} {data.checksum} {loaded.execution} {task.method}"
    # Before the bound, which may take hours: a folder that cannot be continued is
    # refused at once.
    check_continues(path, fingerprint(loaded.network), origin)
    model, network, where = loaded.model, loaded.network, folder / BOUND
    how = task.method, task.fit, loaded.earlier
    bound = stored_bound(model, network, where, progress, *how)
    certifier = Certifier(loaded.network, bound, loaded.longest_sum)
    certificates = certify_to_csv(
        compared(certifier.certify, certifier.captured, model),
        bound,
        lambda first, last: (test.pixels(slice(first, last)), test.labels[first:last]),
        task.inputs,
        path,
        origin=origin,
        progress=progress,
    )
    return bound, certificates
