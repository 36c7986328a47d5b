"""The end of a run: the weights for use, and guaranteed certificates of the test split."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from torch import nn

from lipcert.bounds.certified import stored_bound
from lipcert.certificate import Certifier
from lipcert.certificate.stream import certify_to_csv
from lipcert.data import Dataset
from lipcert.files import replace_file
from lipcert.loading import load_model, save_checkpoint
from lipcert.norms.certified import Progress
from lipcert.training.config import TrainConfig

SUMMARY = "summary.json"


def finish(
    config: TrainConfig, model: nn.Module, dataset: Dataset, folder: Path, seconds: float, progress: Progress
) -> dict[str, Any]:
    """Write model.safetensors, read it back, certify what was read; writes bound, certificates.csv and summary.json.

    Goes on where an interrupted one stopped.
    """
    shape, classes = dataset.input_shape, dataset.classes
    path = folder / "model.safetensors"
    save_checkpoint(model, path, config.model, shape, classes, input_range=config.input_range)
    loaded = load_model(str(path))
    began = time.perf_counter()
    method = "rescaled" if config.estimator.method == "rescaled" and config.robust else "liplt"
    bound = stored_bound(loaded.model, loaded.input_shape, folder / "bound", progress, method)
    test = dataset.test
    certificates = certify_to_csv(
        Certifier(loaded.model, bound),
        lambda first, last: (test.pixels(slice(first, last)), test.labels[first:last]),
        len(test),
        folder / "certificates.csv",
        origin=f"{dataset.name} {dataset.checksum} float32",
        progress=progress,
    )
    accuracies = certificates.certified_accuracy(config.epsilons)
    assert isinstance(accuracies, list)
    summary: dict[str, Any] = {
        "name": config.name, "model": config.model, "loss": config.loss.type, "epochs": config.epochs,
        "seed": config.seed, "note": config.note,
        "data": dataset.name, "data_title": dataset.title, "data_note": dataset.note, "inputs": len(test),
        "units": "l2, pixels in [0, 1]",
        "method": bound.method, "target": bound.target, "guarantee": bound.guarantee,
        "mean_constant": bound.mean, "fingerprint": bound.facts.fingerprint,
        "clean": certificates.clean_accuracy,
        "mean_radius": float(certificates.radius.mean()), "median_radius": float(certificates.radius.median()),
        "at": [
            {"epsilon": epsilon, "certified": accuracy, "attacked": None}
            for epsilon, accuracy in zip(config.epsilons, accuracies, strict=True)
        ],
        "training_seconds": seconds, "certifying_seconds": time.perf_counter() - began,
    }  # fmt: skip
    with replace_file(folder / SUMMARY) as temporary:
        temporary.write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    return summary
