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
from lipcert.errors import OptionError, ShapeError
from lipcert.files import replace_file
from lipcert.loading import LoadedModel
from lipcert.progress import Progress as Report
from lipcert.training.environment import ENVIRONMENT, environment
from lipcert.training.evidence import write_evidence
from lipcert.training.finish import SUMMARY, certify_test
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
    method: str | None = None,
    attack: bool,
    limit: int | None,
    progress: Report,
) -> Summary:
    """Bound, certify (continuing an earlier run in the same folder), optionally attack; writes the folder `out`.

    Without a method it is that of the bound stored beside the model, or liplt.
    """
    epsilons = _checked_epsilons(epsilons)
    if (out / CONFIG).exists():
        raise OptionError(f"{out} is the folder of a training, which would be overwritten; choose another --out")
    dataset, test = _test_part(loaded, name, data_dir, limit)
    began = time.perf_counter()
    method = method or (loaded.earlier.method if loaded.earlier is not None else "liplt")
    bound, certificates = certify_test(loaded, dataset, out, method, progress, count=len(test))
    facts: dict[str, Any] = {
        "model": loaded.name, "data": dataset.name, "data_title": dataset.title, "data_note": dataset.note,
        "inputs": len(test), "units": "l2, pixels in [0, 1]", "execution": loaded.execution,
        "method": bound.method, "target": bound.target, "guarantee": bound.guarantee,
        "mean_constant": bound.mean, "fingerprint": bound.facts.fingerprint,
    }  # fmt: skip
    evidence = write_evidence(loaded, bound, dataset, certificates, epsilons, len(test) if attack else 0, out, progress)
    radius = certificates.radius
    facts |= {
        "clean": certificates.clean_accuracy,
        "mean_radius": float(radius.mean()), "median_radius": float(radius.median()), **evidence,
        "seconds": time.perf_counter() - began,
    }  # fmt: skip
    _write_json(out / ENVIRONMENT, environment(dataset, data_dir, None))
    _write_json(out / SUMMARY, facts)
    rows = []
    for at in facts["at"]:
        shown = f"{at['attacked']:.2%}" if at["attacked"] is not None else "–"
        cells = (f"{at['epsilon']:g}", f"{facts['clean']:.2%}", shown, f"{at['certified']:.2%}")
        rows.append((*cells, f"{facts['mean_radius']:.4f}", f"{facts['median_radius']:.4f}"))
    return Summary(
        f"{loaded.name} on {dataset.name}, {len(test)} test inputs",
        f"Certified: {bound.guarantee}; executed in {loaded.execution}, rounding included. {_sentence(dataset.note)}"
        f"Written to {out}.",
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
    epsilons = _checked_epsilons(epsilons)
    dataset, test = _test_part(loaded, name, data_dir, limit)
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
    caption = f"l2 PGD, {settings.steps} iterations, step {settings.step}, {settings.restarts} runs. "
    return Summary(title, caption + _sentence(dataset.note), ("ε (l2)", "clean", "attacked"), rows, facts)


def _test_part(
    loaded: LoadedModel, name: str, data_dir: Path | None, limit: int | None
) -> tuple[data.Dataset, data.Split]:
    """The data set, and the first `limit` test inputs of it."""
    if limit is not None and limit < 1:
        raise OptionError(f"--limit is {limit}, expected 1 or more")
    dataset = data.load(name, data_dir).in_dtype(loaded.dtype)
    if dataset.input_shape != loaded.input_shape:
        raise ShapeError(f"{name} has images of shape {dataset.input_shape}, the model takes {loaded.input_shape}")
    return dataset, dataset.test.take(slice(0, limit)) if limit else dataset.test


def _sentence(note: str) -> str:
    return f"{note.rstrip('.')}. " if note else ""


def _write_json(path: Path, facts: dict[str, Any]) -> None:
    with replace_file(path) as temporary:
        temporary.write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n")


def _checked_epsilons(epsilons: Sequence[float]) -> list[float]:
    """Positive ones, each once."""
    if not epsilons or any(not 0 < epsilon < float("inf") for epsilon in epsilons):
        raise OptionError(f"--eps is {list(epsilons)}, expected positive numbers such as 1.58")
    return list(dict.fromkeys(epsilons))


@torch.no_grad()
def _predict(loaded: LoadedModel, x: Tensor) -> Tensor:
    prediction: Tensor = loaded.model(x).argmax(1)
    return prediction
