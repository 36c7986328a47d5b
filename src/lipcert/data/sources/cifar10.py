"""CIFAR-10 from its Python or binary batches, or from image files, in folders or archives."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lipcert.data.archives import is_archive, only_archive, read_files
from lipcert.data.dataset import Dataset, Split, split_from_arrays
from lipcert.data.decoded import Decoded, cached
from lipcert.data.download import Remote
from lipcert.data.image_folder import decode_folder
from lipcert.data.pickles import read_pickle
from lipcert.data.sources.source import (
    FileSource,
    part_remarks,
    register_source,
    with_remarks,
)
from lipcert.errors import DataError

CLASS_NAMES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
_FOLDERS = ("", "cifar10", "cifar-10", "CIFAR10", "cifar10-jpeg")
_PYTHON, _BINARY = "cifar-10-python.tar.gz", "cifar-10-binary.tar.gz"
_ROW = 3 * 32 * 32
_BATCH = 10_000

# MD5 of the canonical Python batches, as on the page of the data set's readers; the
# binary ones have none.
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


@register_source
class Cifar10(FileSource):
    """Batches are preferred to images, which may have been compressed."""

    name = "cifar10"
    title = "CIFAR-10"
    rank = 2
    remotes = (
        Remote(
            _PYTHON,
            "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
            (f"https://www.cs.toronto.edu/~kriz/{_PYTHON}",),
        ),
    )
    layout = (
        f"{_PYTHON}, {_BINARY}, their unpacked batches, or images as "
        "train/<class>/*.png and test/<class>/*.png"
    )

    def read(self, root: Path) -> Dataset | None:
        # From what is certainly CIFAR-10 to what may have been compressed: batches,
        # archives of them, images.
        for subfolder in _FOLDERS:
            base = root / subfolder
            for folder, suffix in (
                ("cifar-10-batches-py", ""),
                ("cifar-10-batches-bin", ".bin"),
            ):
                for place in (base / folder, base):
                    if any((place / f"{name}{suffix}").is_file() for name in _BATCHES):
                        return self._from_batches(
                            _decode_batches(place, suffix), suffix
                        )
            for file, suffix in ((_PYTHON, ""), (_BINARY, ".bin")):
                archive = base / file
                if is_archive(archive):
                    decoded = cached(
                        archive, "cifar10", partial(_decode_batches, archive, suffix)
                    )
                    return self._from_batches(decoded, suffix)
            if all((base / "train" / name).is_dir() for name in CLASS_NAMES):
                return self._from_images(base)
            packed = only_archive(base, "cifar")
            if packed is not None:
                return self._from_images(packed)
        return None

    def _from_batches(self, decoded: Decoded, suffix: str) -> Dataset:
        note = "binary batches" if suffix else "Python batches"
        return self._dataset(decoded, [], note)

    def _from_images(self, source: Path) -> Dataset:
        decoded = cached(
            source, "cifar10-images", partial(decode_folder, source, colour=True)
        )
        if decoded.class_names != CLASS_NAMES or set(decoded.splits) != {
            "train",
            "test",
        }:
            raise DataError(
                f"{source} is not CIFAR-10: expected train/ and test/ with the "
                f"classes {', '.join(CLASS_NAMES)}"
            )
        shape = tuple(decoded.splits["train"].images.shape[1:])
        if shape != (3, 32, 32):
            raise DataError(
                f"{source} is not CIFAR-10: its images are {shape}, "
                "expected (3, 32, 32)"
            )
        formats = ", ".join(decoded.formats)
        return self._dataset(decoded, [formats], f"{formats} images of {source.name}")

    def _dataset(self, decoded: Decoded, remarks: list[str], note: str) -> Dataset:
        train, test = decoded.splits["train"], decoded.splits["test"]
        remarks = remarks + part_remarks(train, test, (5 * _BATCH, _BATCH))
        return Dataset(
            self.name, with_remarks(self.title, remarks), train, test, CLASS_NAMES, note
        )


def parse_python_batch(content: bytes, path: str) -> Batch:
    """Rows and labels of a pickled batch; a whole one has to be the canonical one."""
    values = read_pickle(content, path)
    # Keys are bytes in a pickle of Python 2, as the canonical one is.
    rows, labels = (
        values.get(b"data", values.get("data")),
        values.get(b"labels", values.get("labels")),
    )
    if (
        not isinstance(rows, np.ndarray)
        or rows.dtype != np.uint8
        or rows.ndim != 2
        or rows.shape[1] != _ROW
    ):
        raise DataError(
            f"{path} has no data of uint8 (N, {_ROW}); it is not a batch of CIFAR-10"
        )
    if not isinstance(labels, list) or not all(
        type(label) is int and 0 <= label <= 9 for label in labels
    ):
        raise DataError(
            f"{path} has no labels from 0 to 9; it is not a batch of CIFAR-10"
        )
    if len(labels) != len(rows) or not labels:
        raise DataError(f"{path} has {len(labels):,} labels for {len(rows):,} images")
    expected = _BATCHES[Path(path).name]
    # A part of a batch, as tests have it, cannot be compared; the title then says that
    # it is a part.
    if (
        len(rows) == _BATCH
        and hashlib.md5(content, usedforsecurity=False).hexdigest() != expected
    ):
        raise DataError(
            f"{path} is not the batch of CIFAR-10: its content has another MD5 than "
            f"{expected}; fetch it again"
        )
    return rows, np.array(labels, np.uint8)


def parse_binary_batch(content: bytes, path: str) -> Batch:
    """Rows and labels of a binary batch: a byte of label and 3072 of pixels per image."""
    if len(content) % (_ROW + 1) or not content:
        raise DataError(
            f"{path} has {len(content):,} bytes, expected a multiple of "
            f"{_ROW + 1:,}; fetch it again"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, _ROW + 1)
    if records[:, 0].max() > 9:
        raise DataError(
            f"{path} has the label {records[:, 0].max()}, expected 0 to 9; it is "
            "not a batch of CIFAR-10"
        )
    return records[:, 1:], records[:, 0]


def _decode_batches(source: Path, suffix: str) -> Decoded:
    """The batches of a folder, or of the one folder that an archive of them has."""
    parse = parse_binary_batch if suffix else parse_python_batch
    # cifar-10-batches-py/data_batch_1 in an archive, data_batch_1 in a folder.
    depth = 0 if source.is_dir() else 1
    names = [f"{name}{suffix}" for name in _BATCHES]
    batches: dict[str, Batch] = {}
    for path, content in read_files(
        source, lambda path: path.count("/") <= depth and Path(path).name in names
    ):
        batches[Path(path).name] = parse(content, f"{source}/{path}")
    missing = sorted(set(names) - set(batches))
    if missing:
        raise DataError(
            f"{source} lacks {', '.join(missing)} of CIFAR-10; put them there or "
            f"fetch {_PYTHON} again"
        )
    # In the order of _BATCHES, whatever that of the archive is.
    *training, test = [batches[name] for name in names]
    return Decoded({"train": _join(training), "test": _join([test])}, CLASS_NAMES, ())


def _join(batches: list[Batch]) -> Split:
    rows = np.concatenate([rows for rows, _ in batches])
    labels = np.concatenate([labels for _, labels in batches])
    return split_from_arrays(rows.reshape(-1, 3, 32, 32), labels)
