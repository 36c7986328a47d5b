"""`lipcert certify` and `lipcert attack`: accuracies of a model on a data set."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lipcert import attacks, data
from lipcert.bounds.certified import stored_bound
from lipcert.certificate import Certifier
from lipcert.certificate.stream import certify_to_csv
from lipcert.errors import OptionError, ShapeError
from lipcert.files import replace_file
from lipcert.loading import LoadedModel
from lipcert.norms.certified import Progress as Report
from lipcert.training.environment import ENVIRONMENT, environment
from lipcert.training.evidence import write_evidence
from lipcert.training.finish import SUMMARY
from lipcert.training.run import CONFIG

_BATCH = 256


@dataclass(frozen=True)
class Summary:
    """A table of results, with the facts it rests on."""

    title: str
    caption: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    facts: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        return self.facts


@dataclass(frozen=True)
class PgdSettings:
    """How PGD is run."""

    steps: int = 100
    step: str = "relative"
    restarts: int = 2


def certify(
    loaded: LoadedModel,
    name: str,
    data_dir: Path | None,
    epsilons: Sequence[float],
    out: Path,
    *,
    method: str = "liplt",
    attack: bool,
    limit: int | None,
    progress: Report,
) -> Summary:
    """Bound, certify (continuing an earlier run in the same folder), optionally attack; writes the folder `out`."""
    _check_epsilons(epsilons)
    dataset, test = _test_split(loaded, name, data_dir, limit)
    execution = str(loaded.dtype).removeprefix("torch.")
    began = time.perf_counter()
    bound = stored_bound(loaded.model, loaded.input_shape, out / "bound", progress, method)
    certifier = Certifier(loaded.model, bound)
    facts: dict[str, Any] = {
        "model": loaded.name, "data": dataset.name, "data_title": dataset.title, "data_note": dataset.note,
        "inputs": len(test), "units": "l2, pixels in [0, 1]", "execution": execution,
        "method": bound.method, "target": bound.target, "guarantee": bound.guarantee,
        "mean_constant": bound.mean, "fingerprint": bound.facts.fingerprint,
    }  # fmt: skip
    certificates = certify_to_csv(
        certifier,
        lambda first, last: (test.pixels(slice(first, last)), test.labels[first:last]),
        len(test),
        out / "certificates.csv",
        origin=f"{dataset.name} {dataset.checksum} {execution}",
        batch_size=_BATCH,
        progress=progress,
    )
    evidence = write_evidence(loaded, bound, dataset, certificates, epsilons, len(test) if attack else 0, out, progress)
    radius = certificates.radius
    facts |= {
        "clean": certificates.clean_accuracy,
        "mean_radius": float(radius.mean()), "median_radius": float(radius.median()), **evidence,
        "seconds": time.perf_counter() - began,
    }  # fmt: skip
    if not (out / CONFIG).exists():  # a training run has its own
        _write_json(out / ENVIRONMENT, environment(dataset, data_dir, None))
    _write_json(out / SUMMARY, facts)
    rows = []
    for at in facts["at"]:
        shown = f"{at['attacked']:.2%}" if at["attacked"] is not None else "–"
        cells = (f"{at['epsilon']:g}", f"{facts['clean']:.2%}", shown, f"{at['certified']:.2%}")
        rows.append((*cells, f"{facts['mean_radius']:.4f}", f"{facts['median_radius']:.4f}"))
    return Summary(
        f"{loaded.name} on {dataset.name}, {len(test)} test inputs",
        f"Certified: {bound.guarantee}; executed in {execution}, rounding included. {dataset.note} Written to {out}.",
        ("ε (l2)", "clean", "attacked", "certified", "mean radius", "median radius"),
        rows,
        facts,
    )


def attack(
    loaded: LoadedModel,
    name: str,
    data_dir: Path | None,
    epsilons: Sequence[float],
    settings: PgdSettings,
    *,
    limit: int | None,
    progress: Report,
) -> Summary:
    """Clean accuracy and accuracy under PGD."""
    _check_epsilons(epsilons)
    dataset, test = _test_split(loaded, name, data_dir, limit)
    rows, results = [], []
    for epsilon in epsilons:
        clean = survived = 0
        for first in range(0, len(test), _BATCH):
            x, label = test.pixels(slice(first, first + _BATCH)), test.labels[first : first + _BATCH]
            right = _predict(loaded, x) == label
            found = attacks.pgd(loaded.model, x, label, epsilon, **asdict(settings))
            clean += int(right.sum())
            survived += int((right & ~found.success).sum())
            progress(f"attacking, ε = {epsilon:g}", min(1.0, (first + _BATCH) / len(test)))
        results.append({"epsilon": epsilon, "clean": clean / len(test), "attacked": survived / len(test)})
        rows.append((f"{epsilon:g}", f"{clean / len(test):.2%}", f"{survived / len(test):.2%}"))
    facts = {"model": loaded.name, "data": dataset.name, "inputs": len(test), **asdict(settings), "at": results}
    title = f"{loaded.name} on {dataset.name}, {len(test)} test inputs"
    caption = f"l2 PGD, {settings.steps} iterations, step {settings.step}, {settings.restarts} runs. {dataset.note}"
    return Summary(title, caption, ("ε (l2)", "clean", "attacked"), rows, facts)


def _test_split(
    loaded: LoadedModel, name: str, data_dir: Path | None, limit: int | None
) -> tuple[data.Dataset, data.Split]:
    if limit is not None and limit < 1:
        raise OptionError(f"--limit is {limit}, expected 1 or more")
    dataset = data.load(name, data_dir).in_dtype(loaded.dtype)
    if dataset.input_shape != loaded.input_shape:
        raise ShapeError(f"{name} has images of shape {dataset.input_shape}, the model takes {loaded.input_shape}")
    test = dataset.test
    return dataset, test.take(slice(0, limit)) if limit else test


def _write_json(path: Path, facts: dict[str, Any]) -> None:
    with replace_file(path) as temporary:
        temporary.write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n")


def _check_epsilons(epsilons: Sequence[float]) -> None:
    if not epsilons or any(not 0 < epsilon < float("inf") for epsilon in epsilons):
        raise OptionError(f"--eps is {list(epsilons)}, expected positive numbers such as 1.58")


@torch.no_grad()
def _predict(loaded: LoadedModel, x: Tensor) -> Tensor:
    prediction: Tensor = loaded.model(x).argmax(1)
    return prediction
