"""Data sets by name or by path: embedded, in folders, or downloaded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

import numpy as np

from lipcert.data import cifar10, mnist, tiny_imagenet
from lipcert.data.dataset import Dataset, split_by_seed, split_from_arrays
from lipcert.data.decoded import cache_dir
from lipcert.data.download import fetch
from lipcert.data.files import is_archive
from lipcert.data.image_folder import read_image_folder
from lipcert.data.source import IncompleteError, Source
from lipcert.errors import DataError, OptionError

SOURCES = {source.name: source for source in (mnist.SOURCE, cifar10.SOURCE, tiny_imagenet.SOURCE)}
NAMES = ("digits", *SOURCES)
"""The data sets that have a name."""

_VARIABLE = "LIPCERT_DATA_DIR"


def load(name: str | Path, data_dir: str | Path | None = None, *, seed: int = 0, download: bool = True) -> Dataset:
    """A data set by its name, or the images of a folder or archive by its path.

    A named one is looked for in `data_dir`, in the folder LIPCERT_DATA_DIR, and in the cache (LIPCERT_CACHE or
    ~/.cache/lipcert), each time also in subfolders with its name; then it is downloaded into the cache.

    Args:
        name: "digits" (embedded in scikit-learn), "mnist", "cifar10", "tiny-imagenet", or the path of an image folder
            or archive, absolute, or relative to the current folder or to `data_dir`.
        data_dir: a folder of data.
        seed: of the split into train and test, where the data set has none: the digits and some image folders.
        download: whether missing data may be downloaded.
    """
    if seed < 0:
        raise OptionError(f"seed is {seed}, expected 0 or more")
    folders = _folders(data_dir)
    if name == "digits":
        return _digits(seed)
    if name in SOURCES:
        return _load_source(SOURCES[str(name)], folders, download)
    for path in (Path(name).expanduser(), *(folder / name for folder in folders)):
        if path.is_dir() or is_archive(path):
            return read_image_folder(path, seed)
    if Path(name).exists():
        raise DataError(f"{name} is neither a folder of images nor an archive (.tar, .tar.gz, .tar.xz, .zip)")
    if len(Path(name).parts) > 1:
        raise DataError(f"{name} does not exist; expected a folder or archive of images")
    near = get_close_matches(str(name), NAMES, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise OptionError(f"there is no data set {str(name)!r}, expected {', '.join(NAMES)} or the path of images{hint}")


def _folders(data_dir: str | Path | None) -> list[Path]:
    """The folders to look in; the ones that a user has named have to exist."""
    named = {"data_dir": data_dir, _VARIABLE: os.environ.get(_VARIABLE)}
    folders = []
    for origin, folder in named.items():
        if folder:
            path = Path(folder).expanduser()
            if not path.is_dir():
                raise DataError(f"{origin} is {folder}, which is not a folder")
            folders.append(path)
    return [*folders, cache_dir()]


def _load_source(source: Source, folders: Sequence[Path], download: bool) -> Dataset:
    cache = folders[-1]
    for folder in folders:
        try:
            read = source.find(folder)
        except IncompleteError:
            if folder != cache or not download:
                raise
            read = None  # an interrupted download goes on
        if read is not None:
            return read()
    target = cache / source.name
    reason = "downloading is switched off"
    if download:
        try:
            for remote in source.remotes:
                fetch(remote, target)
        except DataError as error:
            reason = str(error)
        else:
            read = source.find(target)
            if read is not None:
                return read()
            reason = f"{target} does not hold it after the download"
    looked = ", ".join(str(folder) for folder in folders)
    raise DataError(
        f"{source.title} was not found in {looked}: {reason}. "
        f"Put {source.layout} into {target}, or into a folder given as data_dir or {_VARIABLE}"
    )


def _digits(seed: int) -> Dataset:
    """The 1,797 digits of 8×8 pixels with 17 levels of grey that scikit-learn carries."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = bunch.images.astype(np.uint8)[:, None]
    train, test = split_by_seed(split_from_arrays(images, bunch.target, maximum=16), seed)
    note = f"scikit-learn's digits, split by seed {seed} into {len(train):,} to train on and {len(test):,} to test on"
    return Dataset("digits", "digits", train, test, tuple("0123456789"), note)
