"""CIFAR-10 from its Python or binary batches, or from image files, in folders or archives."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lipcert.data.dataset import Dataset, Split, split_from_arrays
from lipcert.data.decoded import Decoded, cached
from lipcert.data.download import Remote
from lipcert.data.files import is_archive, read_files
from lipcert.data.image_folder import decode_folder
from lipcert.data.pickles import read_pickle
from lipcert.data.source import Source, only_archive
from lipcert.errors import DataError

CLASS_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_FOLDERS = ("", "cifar10", "cifar-10", "CIFAR10", "cifar10-jpeg")
_PYTHON, _BINARY = "cifar-10-python.tar.gz", "cifar-10-binary.tar.gz"
_ROW = 3 * 32 * 32
_BATCH = 10_000

# MD5 of the canonical Python batches, as on the page of the data set's readers; the binary ones have none.
_BATCHES = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}

Batch = tuple[NDArray[np.uint8], NDArray[np.uint8]]
"""Rows of red, green and blue planes (N, 3072), and labels (N,)."""


def find(root: Path) -> Callable[[], Dataset] | None:
    """A reader of the first form of CIFAR-10 in the folder or its usual subfolders: batches, then images."""
    for base in (root / name for name in _FOLDERS):
        for folder, suffix in ((base / "cifar-10-batches-py", ""), (base / "cifar-10-batches-bin", ".bin")):
            for place in (folder, base):
                if any((place / f"{name}{suffix}").is_file() for name in _BATCHES):
                    return partial(_from_batches, place, suffix)
        for archive, suffix in ((base / _PYTHON, ""), (base / _BINARY, ".bin")):
            if is_archive(archive):
                return partial(_from_batches, archive, suffix)
        if all((base / "train" / name).is_dir() for name in CLASS_NAMES):
            return partial(_from_images, base)
        packed = only_archive(base, "cifar")
        if packed is not None:
            return partial(_from_images, packed)
    return None


def parse_python_batch(content: bytes, path: str) -> Batch:
    """Rows and labels of a pickled batch; a whole one has to be the canonical one."""
    values = read_pickle(content, path)
    rows, labels = values.get(b"data", values.get("data")), values.get(b"labels", values.get("labels"))
    if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != _ROW:
        raise DataError(f"{path} has no data of uint8 (N, {_ROW}); it is not a batch of CIFAR-10")
    if not isinstance(labels, list) or not all(type(label) is int and 0 <= label <= 9 for label in labels):
        raise DataError(f"{path} has no labels from 0 to 9; it is not a batch of CIFAR-10")
    if len(labels) != len(rows) or not labels:
        raise DataError(f"{path} has {len(labels):,} labels for {len(rows):,} images")
    expected = _BATCHES[Path(path).name]
    if len(rows) == _BATCH and hashlib.md5(content, usedforsecurity=False).hexdigest() != expected:
        raise DataError(
            f"{path} is not the batch of CIFAR-10: its content has another MD5 than {expected}; fetch it again"
        )
    return rows, np.array(labels, np.uint8)


def parse_binary_batch(content: bytes, path: str) -> Batch:
    """Rows and labels of a binary batch: a byte of label and 3072 of pixels per image."""
    if len(content) % (_ROW + 1) or not content:
        raise DataError(f"{path} has {len(content):,} bytes, expected a multiple of {_ROW + 1:,}; fetch it again")
    records = np.frombuffer(content, np.uint8).reshape(-1, _ROW + 1)
    if records[:, 0].max() > 9:
        raise DataError(f"{path} has the label {records[:, 0].max()}, expected 0 to 9; it is not a batch of CIFAR-10")
    return records[:, 1:], records[:, 0]


def _from_batches(source: Path, suffix: str) -> Dataset:
    decode = partial(_decode_batches, source, suffix)
    decoded = cached(source, "cifar10", decode) if source.is_file() else decode()
    kind = "binary batches" if suffix else "Python batches"
    return _dataset(decoded, "", kind)


def _decode_batches(source: Path, suffix: str) -> Decoded:
    parse = parse_binary_batch if suffix else parse_python_batch
    batches: dict[str, Batch] = {}
    names = {f"{name}{suffix}" for name in _BATCHES}
    depth = 0 if source.is_dir() else 1
    for path, content in read_files(source, lambda path: path.count("/") <= depth and path.split("/")[-1] in names):
        batches[path.split("/")[-1]] = parse(content, f"{source}/{path}")
    missing = sorted(names - set(batches))
    if missing:
        raise DataError(f"{source} lacks {', '.join(missing)} of CIFAR-10; put them there or fetch {_PYTHON} again")
    train = [batches[f"{name}{suffix}"] for name in _BATCHES if name != "test_batch"]
    splits = {"train": _join(train), "test": _join([batches[f"test_batch{suffix}"]])}
    return Decoded(splits, CLASS_NAMES, ())


def _join(batches: list[Batch]) -> Split:
    rows, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    return split_from_arrays(rows.reshape(-1, 3, 32, 32), labels)


def _from_images(source: Path) -> Dataset:
    decoded = cached(source, "cifar10-images", partial(decode_folder, source, colour=True))
    if decoded.class_names != CLASS_NAMES or set(decoded.splits) != {"train", "test"}:
        raise DataError(
            f"{source} is not CIFAR-10: expected train/ and test/ with the classes {', '.join(CLASS_NAMES)}"
        )
    shape = tuple(decoded.splits["train"].images.shape[1:])
    if shape != (3, 32, 32):
        raise DataError(f"{source} is not CIFAR-10: its images are {shape}, expected (3, 32, 32)")
    formats = ", ".join(decoded.formats)
    return _dataset(decoded, formats, f"{formats} images of {source.name}")


def _dataset(decoded: Decoded, formats: str, note: str) -> Dataset:
    train, test = decoded.splits["train"], decoded.splits["test"]
    whole = (len(train), len(test)) == (5 * _BATCH, _BATCH)
    remarks = [formats] if formats else []
    if not whole:
        remarks.append(f"a part: {len(train):,} and {len(test):,} images")
    title = f"CIFAR-10 ({', '.join(remarks)})" if remarks else "CIFAR-10"
    return Dataset("cifar10", title, train, test, CLASS_NAMES, note)


SOURCE = Source(
    name="cifar10",
    title="CIFAR-10",
    find=find,
    remotes=(
        Remote(
            _PYTHON,
            "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
            (f"https://www.cs.toronto.edu/~kriz/{_PYTHON}",),
        ),
    ),
    layout=f"{_PYTHON}, {_BINARY}, their unpacked batches, or images as train/<class>/*.png and test/<class>/*.png",
)
