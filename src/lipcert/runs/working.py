"""Working in a run folder: a new one, one process at a time, always with the same data."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from filelock import FileLock, Timeout

from lipcert.data import Dataset
from lipcert.errors import OptionError, ResumeError
from lipcert.files import leftovers, write_json
from lipcert.layout import CONFIG, ENVIRONMENT, LOCK
from lipcert.runs.environment import environment


def new_folder(name: str, run_dir: str | Path | None) -> Path:
    """The folder of a new run: the one that is asked for, or the first runs/<name>-<n> that does not exist."""
    if run_dir is not None:
        folder = Path(run_dir)
        check_unused(folder)
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    for n in count(1):
        folder = Path("runs") / f"{name}-{n}"
        try:
            # Made without asking: of two processes that start together one makes it,
            # the other takes the next number.
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        break
    return folder


def check_unused(folder: Path) -> None:
    """Refuse a folder in which there is something already."""
    if (folder / CONFIG).exists():
        raise ResumeError(
            f"{folder} already holds a run; continue it with --resume {folder}, or "
            "choose another folder"
        )
    # Half-written files of a process that was killed are no reason to refuse a folder.
    if folder.exists() and (
        not folder.is_dir() or set(folder.iterdir()) - set(leftovers(folder))
    ):
        raise OptionError(
            f"{folder} exists and is not an empty folder; choose another "
            "one for the run"
        )


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Refuse a folder in which another process is working; say how to go on if this one is interrupted.

    The lock of a process that was killed is gone with it.
    """
    try:
        # Two processes that append to one file of certificates would interleave their
        # rows.
        with FileLock(folder / LOCK, timeout=0):
            # Safe only under the lock: elsewhere they may be files that another process
            # is writing.
            for leftover in leftovers(folder):
                leftover.unlink(missing_ok=True)
            yield
    except Timeout:
        raise ResumeError(
            f"another process is working in {folder}; wait until it ends, or stop it"
        ) from None
    except KeyboardInterrupt:
        remedy = (
            f"stopped; continue with: lipcert train --resume {shlex.quote(str(folder))}"
        )
        # The same interruption with a message, so that callers need not know the
        # folder.
        raise KeyboardInterrupt(remedy) from None


def keep_environment(
    folder: Path, dataset: Dataset, data_dir: str | Path | None, seed: int
) -> None:
    """Write what the run depends on; refuse to continue it with other data."""
    path = folder / ENVIRONMENT
    if not path.exists():
        write_json(path, environment(dataset, data_dir, seed))
        return
    if json.loads(path.read_text())["data"]["checksum"] != dataset.checksum:
        raise ResumeError(
            f"{folder} was begun with other data: the checksum of {dataset.name} "
            f"differs from {path}"
        )


def data_folder(folder: Path) -> str | None:
    """Where the data of a run were, if the run says so."""
    path = folder / ENVIRONMENT
    if not path.exists():
        return None
    stored: str | None = json.loads(path.read_text())["data"]["folder"]
    return stored
