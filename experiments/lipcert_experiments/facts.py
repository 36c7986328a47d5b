"""What a result depends on besides the code: hardware, versions, commit."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import lipcert


def environment() -> dict[str, Any]:
    """Date, commit, hardware and versions."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "lipcert": lipcert.__version__,
        "commit": commit(),
        "hardware": hardware(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def hardware() -> str:
    """The processor that computes, in a few words."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"{_processor()}, {threads} thread{'s' if threads > 1 else ''}"


def commit() -> str:
    """The commit of the checkout that lipcert runs from, "+" if files differ from it; "" if it is not a checkout."""
    folder = Path(lipcert.__file__).parent
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return ""
    changes = _git(
        folder,
        "status",
        "--porcelain",
        "--untracked-files=no",
        "--",
        ":/src",
        ":/experiments",
    )
    return f"{_git(folder, 'rev-parse', '--short', 'HEAD')}{'+' if changes else ''}"


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = (
        line.partition(":")[2].strip()
        for line in lines
        if line.startswith("model name")
    )
    return next(names, platform.processor() or platform.machine())
