"""What tables need of a finished run besides its summary; each measure is stored and computed once."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lipcert import attacks, losses
from lipcert.bounds.compute import bound_targets
from lipcert.bounds.estimator import Estimator
from lipcert.certificate.stream import read_certificates
from lipcert.data import Dataset
from lipcert.errors import TooLargeError
from lipcert.files import write_json
from lipcert.models import LoadedModel, load_model
from lipcert.progress import Progress
from lipcert.runs import Run, Task, certify_test
from lipcert.training import TrainConfig
from lipcert_experiments.authors_pgd import authors_pgd
from lipcert_experiments.plan import ATTACKED, RESTARTS, STEPS, Plan

ESTIMATE_ITERATIONS = 100
"""Of every estimate here; the authors' evaluation has as many."""
COMPARED_TARGETS = ("pairwise", "per-class", "network")
_BATCH = 256


@dataclass(frozen=True)
class Subject:
    """A finished run to be measured."""

    plan: Plan
    config: TrainConfig
    run: Run
    dataset: Dataset
    folder: Path
    progress: Progress

    @property
    def epsilon(self) -> float:
        return self.config.epsilons[0]

    @cached_property
    def loaded(self) -> LoadedModel:
        return load_model(str(self.run.folder))


def measure(subject: Subject, names: Sequence[str]) -> dict[str, Any]:
    """The measures of those names; one that is stored in the subject's folder is only read."""
    return {name: _stored(subject, name) for name in names}


def _stored(subject: Subject, name: str) -> dict[str, Any]:
    function, label = _MEASURES[name](subject.plan)
    path = subject.folder / f"{label}.json"
    mark = subject.run.summary.fingerprint
    if path.exists():
        stored: dict[str, Any] = json.loads(path.read_text())
        if stored["fingerprint"] == mark:
            return stored
    found = {"fingerprint": mark, **function(subject)}
    write_json(path, found)
    return found


def attacked(subject: Subject) -> dict[str, Any]:
    """Accuracy under PGD at ε of the first test inputs, beside clean and certified accuracy of the same inputs."""
    budget, model, epsilon = subject.plan.budget, subject.loaded.model, subject.epsilon
    count = min(ATTACKED[budget], len(subject.dataset.test))
    settings: dict[str, Any] = {"steps": STEPS[budget]}
    attack: Callable[..., attacks.Attacked]
    if subject.plan.protocol == "authors":
        low, high = subject.config.input_range
        settings["step"] = attacks.PAPER_STEP / (high - low)
        attack = partial(authors_pgd, **settings)
    else:
        settings["restarts"] = RESTARTS[budget]
        attack = partial(attacks.pgd, **settings)
    survived = torch.zeros(count, dtype=torch.bool)
    certificates = read_certificates(subject.run.folder / "certificates.csv")
    for first in range(0, count, _BATCH):
        part = slice(first, min(count, first + _BATCH))
        x, labels = subject.dataset.test.pixels(part), subject.dataset.test.labels[part]
        survived[part] = ~attack(model, x, labels, epsilon).success
        subject.progress("attacking", part.stop / count)
    correct = certificates.correct[:count]
    certified = correct & (certificates.radius[:count] >= epsilon)
    shares = {"clean": correct, "attacked": correct & survived, "certified": certified}
    return {
        "protocol": subject.plan.protocol, **settings, "inputs": count, "epsilon": epsilon,
        **{name: float(values.double().mean()) for name, values in shares.items()},
    }  # fmt: skip


@torch.no_grad()
def estimated(subject: Subject) -> dict[str, Any]:
    """Certified accuracy by an estimate of the constants that the run was trained with: not guaranteed."""
    loaded, chosen = subject.loaded, subject.config.estimator
    constants = _estimator(loaded, chosen.method, chosen.target).pairwise()
    test, count = subject.dataset.test, 0
    for first in range(0, len(test), _BATCH):
        part = slice(first, first + _BATCH)
        radii = losses.hard_radius(
            loaded.model(test.pixels(part)), test.labels[part], constants
        )
        count += int((radii >= subject.epsilon).sum())
    return {"method": chosen.method, "target": chosen.target, "iterations": ESTIMATE_ITERATIONS,
            "epsilon": subject.epsilon, "certified": count / len(test)}  # fmt: skip


def constants(subject: Subject) -> dict[str, Any]:
    """Mean L_ij, L_i + L_j and √2·L by naive and LipLT: guaranteed where that is feasible, and estimated."""
    loaded = subject.loaded
    found: dict[str, Any] = {"guaranteed": {}, "estimate": {}, "guarantee": {}}
    for method in ("naive", "liplt"):
        with torch.no_grad():
            values = {
                target: _estimator(loaded, method, target)()
                for target in COMPARED_TARGETS
            }
        found["estimate"][method] = {
            target: mean_pair(value, target) for target, value in values.items()
        }
        try:
            bounds = bound_targets(
                loaded.model,
                loaded.input_shape,
                method,
                COMPARED_TARGETS,
                progress=subject.progress,
            )
        except TooLargeError as error:
            found["guarantee"][method] = f"not computed: {error}"
            continue
        found["guaranteed"][method] = {
            target: mean_pair(b.value, target) for target, b in bounds.items()
        }
        found["guarantee"][method] = bounds["network"].guarantee
    return found


def naive_radii(subject: Subject) -> dict[str, Any]:
    """Certificates from naive constants, in certificates.csv beside the measure."""
    loaded, folder = subject.loaded, subject.folder / "naive"
    task = Task(
        subject.dataset, [subject.epsilon], len(subject.dataset.test), 0, method="naive"
    )
    bound, certificates = certify_test(loaded, task, folder, subject.progress)
    return {"folder": str(folder), "guarantee": bound.guarantee, "epsilon": subject.epsilon,
            "certified": certificates.certified_accuracy(subject.epsilon),
            "median_radius": float(certificates.radius.median())}  # fmt: skip


def mean_pair(value: Tensor, target: str) -> float:
    """The mean over pairs of classes of L_ij, of L_i + L_j, or √2·L."""
    if target == "network":
        return sqrt(2) * float(value)
    if target == "per-class":
        return 2 * float(value.double().mean())
    classes = value.shape[0]
    return float(value.double().sum()) / (classes * (classes - 1))


def _estimator(loaded: LoadedModel, method: str, target: str) -> Estimator:
    return Estimator(
        loaded.model, loaded.input_shape, method, target, ESTIMATE_ITERATIONS
    )


_MEASURES: dict[
    str, Callable[[Plan], tuple[Callable[[Subject], dict[str, Any]], str]]
] = {
    "attacked": lambda plan: (
        attacked,
        f"attacked-{plan.protocol}-{ATTACKED[plan.budget]}",
    ),
    "estimated": lambda plan: (estimated, "estimated"),
    "constants": lambda plan: (constants, "constants"),
    "naive-radii": lambda plan: (naive_radii, "naive-radii"),
}
