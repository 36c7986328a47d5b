"""Data sets by name or by path: embedded, in folders, or downloaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lipcert.data.archives import is_archive
from lipcert.data.dataset import Dataset
from lipcert.data.decoded import cache_dir
from lipcert.data.given import read_given, read_npz
from lipcert.data.image_folder import read_image_folder
from lipcert.data.sources import SOURCES
from lipcert.data.sources.source import VARIABLE
from lipcert.errors import DataError, LipcertError, OptionError, nearest

NAMES = tuple(SOURCES)
"""The data sets that have a name."""


def load(
    name: Any,
    data_dir: str | Path | None = None,
    *,
    seed: int = 0,
    download: bool = True,
) -> Dataset:
    """A data set by its name; images in a folder or archive and arrays in an .npz file by the path; or an object.

    A named one is looked for in `data_dir`, in the folder LIPCERT_DATA_DIR, and in the
    cache (LIPCERT_CACHE or ~/.cache/lipcert), each time also in subfolders with its
    name; then it is downloaded into the cache.

    Args:
        name: "digits" (embedded in scikit-learn), "mnist", "cifar10", "tiny-imagenet", or the path of an image folder
            or archive or of an .npz file, absolute, or relative to the current folder or to `data_dir`. Or the data
            themselves: a pair (inputs, labels) of arrays or tensors, a torch.utils.data.Dataset or anything else that
            gives pairs or dictionaries with image and label, a pair (train, test) or a dictionary of these.
        data_dir: a folder of data.
        seed: of the split into train and test, where the data set has none: the digits and some image folders.
        download: whether missing data may be downloaded.
    """
    if seed < 0:
        raise OptionError(f"seed is {seed}, expected 0 or more")
    if not isinstance(name, str | Path):
        return read_given(name, seed=seed)
    folders = _folders(data_dir)
    if name in SOURCES:
        return SOURCES[str(name)].load(folders, seed=seed, download=download)
    for path in (Path(name).expanduser(), *(folder / name for folder in folders)):
        if path.is_dir() or is_archive(path):
            return read_image_folder(path, seed)
        if path.suffix == ".npz" and path.is_file():
            return read_npz(path, seed)
    raise _not_found(name)


def _not_found(name: str | Path) -> LipcertError:
    """What to say of a name or a path that leads to no data."""
    if Path(name).exists():
        return DataError(
            f"{name} is no folder of images, no archive (.tar, .tar.gz, .tar.xz, "
            ".zip), no .npz file"
        )
    if len(Path(name).parts) > 1:
        return DataError(
            f"{name} does not exist; expected a folder or archive of "
            "images, or an .npz file"
        )
    expected = f"{', '.join(SOURCES)} or the path of images"
    return OptionError(
        f"there is no data set {str(name)!r}, expected "
        f"{expected}{nearest(name, SOURCES)}"
    )


def _folders(data_dir: str | Path | None) -> list[Path]:
    """The folders to look in; the ones that a user has named have to exist."""
    folders = []
    named = {"data_dir": data_dir, VARIABLE: os.environ.get(VARIABLE)}
    for origin, folder in named.items():
        if folder:
            path = Path(folder).expanduser()
            if not path.is_dir():
                raise DataError(f"{origin} is {folder}, which is not a folder")
            folders.append(path)
    # The cache is last, which `FileSource.load` relies on: downloads go there.
    return [*folders, cache_dir()]
