"""The end of a run: the weights for use, and guaranteed certificates of the test split."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lipcert.bounds.bound import Bound
from lipcert.bounds.compute import stored_bound
from lipcert.bounds.fingerprint import fingerprint
from lipcert.bounds.fit import FitOptions
from lipcert.bounds.scales import Scales
from lipcert.certificate import Certificates, Certifier
from lipcert.certificate.stream import certify_to_csv, check_continues
from lipcert.data import Dataset
from lipcert.files import replace_file
from lipcert.loading import LoadedModel, load_model, save_checkpoint
from lipcert.progress import Progress
from lipcert.training.config import TrainConfig
from lipcert.training.evidence import write_evidence

SUMMARY = "summary.json"


def finish(
    config: TrainConfig,
    model: nn.Module,
    scales: Scales | None,
    dataset: Dataset,
    folder: Path,
    seconds: float,
    progress: Progress,
) -> dict[str, Any]:
    """Write model.safetensors, read it back, certify and attack what was read.

    Writes the bound, certificates.csv, the evidence for a report and, at the very end, summary.json. Goes on where an
    interrupted one stopped.
    """
    shape, classes = dataset.input_shape, dataset.classes
    path = folder / "model.safetensors"
    save_checkpoint(model, path, config.model, shape, classes, input_range=config.input_range)
    loaded = load_model(str(path))
    if config.execution == "float64":
        loaded, dataset = loaded.in_float64(), dataset.in_dtype(torch.float64)
    began = time.perf_counter()
    method, fit = "liplt", None
    if scales is not None and config.robust:  # what training has learned is a good start
        method, fit = "rescaled", FitOptions(start=scales.diagonals())
    bound, certificates = certify_test(loaded, dataset, folder, method, progress, fit)
    certified = time.perf_counter()
    evidence = write_evidence(
        loaded, bound, dataset, certificates, config.epsilons, config.attack_inputs, folder, progress
    )
    summary: dict[str, Any] = {
        "name": config.name, "model": config.model, "loss": config.loss.type, "epochs": config.epochs,
        "seed": config.seed, "note": config.note,
        "data": dataset.name, "data_title": dataset.title, "data_note": dataset.note, "inputs": len(dataset.test),
        "units": "l2, pixels in [0, 1]", "execution": config.execution,
        "method": bound.method, "target": bound.target, "guarantee": bound.guarantee,
        "mean_constant": bound.mean, "fingerprint": bound.facts.fingerprint,
        "clean": certificates.clean_accuracy,
        "mean_radius": float(certificates.radius.mean()), "median_radius": float(certificates.radius.median()),
        **evidence,
        "training_seconds": seconds, "certifying_seconds": certified - began,
        "attacking_seconds": time.perf_counter() - certified,
    }  # fmt: skip
    with replace_file(folder / SUMMARY) as temporary:
        temporary.write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    return summary


def certify_test(
    loaded: LoadedModel,
    dataset: Dataset,
    folder: Path,
    method: str,
    progress: Progress,
    fit: FitOptions | None = None,
    count: int | None = None,
) -> tuple[Bound, Certificates]:
    """The bound of the model and the certificates of the first `count` test inputs, or of all, both in the folder.

    What is there already of both is used again. A folder with certificates of something else is refused unchanged.
    """
    path, test = folder / "certificates.csv", dataset.test
    origin = f"{dataset.name} {dataset.checksum} {loaded.execution} {method}"
    check_continues(path, fingerprint(loaded.network), origin)
    bound = stored_bound(loaded.model, loaded.network, folder / "bound", progress, method, fit, earlier=loaded.earlier)
    certificates = certify_to_csv(
        Certifier(loaded.network, bound),
        lambda first, last: (test.pixels(slice(first, last)), test.labels[first:last]),
        len(test) if count is None else count,
        path,
        origin=origin,
        progress=progress,
    )
    return bound, certificates
