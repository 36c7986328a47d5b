"""What a result depends on besides the configuration: command, versions, data, hardware."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from lipcert.data import Dataset

_PACKAGES = (
    "lipcert",
    "torch",
    "numpy",
    "scipy",
    "safetensors",
    "lightning-fabric",
    "kornia",
    "scikit-learn",
)


def environment(
    dataset: Dataset, data_dir: str | Path | None, seed: int | None
) -> dict[str, Any]:
    """The facts that go into environment.json; the seed is that of a training, if there was one."""
    return {
        # Facts that may explain another result. Only the checksum of the data is
        # compared when a run goes on.
        "command": sys.argv, "seed": seed, "versions": _versions(), "python": platform.python_version(),
        "system": platform.system(), "machine": platform.machine(), "processor": _processor(),
        "cores": os.cpu_count(), "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "data": {
            "name": dataset.name, "title": dataset.title, "note": dataset.note, "checksum": dataset.checksum,
            "folder": str(Path(data_dir).absolute()) if data_dir is not None else None,
        },
    }  # fmt: skip


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        # Some come with extras only.
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    """The name of the processor, as the system knows it."""
    try:
        # platform.processor() is empty on many Linux systems.
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    names = (
        line.partition(":")[2].strip()
        for line in lines
        if line.startswith("model name")
    )
    return next(names, platform.processor() or platform.machine())
