"""Small runs on the digits for the tests of training."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from lipcert.training import TrainConfig

TINY = (
    "model=mlp-64", "compare_standard=false", "epochs=3", "warmup_epochs=1", "schedule.decay_epoch=1", "batch_size=256",
    "epsilons=[0.25]", "eval_every=2", "attack_inputs=0",
)  # fmt: skip


def tiny(*overrides: str) -> TrainConfig:
    """The digits preset with a small network for three epochs of six steps."""
    return TrainConfig.preset("digits").with_overrides([*TINY, *overrides])


def weights(folder: Path) -> dict[str, Any]:
    return load_file(folder / "model.safetensors")


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run without the times."""
    records = [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    return [
        {name: value for name, value in record.items() if name != "seconds"}
        for record in records
    ]
