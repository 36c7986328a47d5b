"""What a named data set consists of: how it is recognised in a folder, and where it can be had from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lipcert.data.dataset import Dataset
from lipcert.data.download import Remote
from lipcert.data.files import is_archive
from lipcert.errors import DataError


class IncompleteError(DataError):
    """A folder holds some of the files of a data set, but not all."""


@dataclass(frozen=True)
class Source:
    """A named data set.

    find: from a folder to a function that reads the data set from it, or None if the folder does not hold it in any
        known form; an IncompleteError if it plainly holds a part.
    layout: what has to be put into a folder, for the message when nothing is found.
    """

    name: str
    title: str
    find: Callable[[Path], Callable[[], Dataset] | None]
    remotes: tuple[Remote, ...]
    layout: str


def only_archive(folder: Path, start: str) -> Path | None:
    """The archive in the folder whose name begins so, if there is one; several are a DataError."""
    found = sorted(path for path in folder.glob(f"{start}*") if is_archive(path))
    if len(found) > 1:
        listed = ", ".join(path.name for path in found)
        raise DataError(f"{folder} holds several archives, {listed}; keep one of them there")
    return found[0] if found else None
