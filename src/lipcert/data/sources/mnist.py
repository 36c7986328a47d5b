"""MNIST from its idx files, compressed by gzip or not."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lipcert.data.archives import read_bytes
from lipcert.data.dataset import Dataset, Split, split_from_arrays
from lipcert.data.download import Remote
from lipcert.data.sources.source import (
    FileSource,
    IncompleteError,
    part_remarks,
    register_source,
    with_remarks,
)
from lipcert.errors import DataError

_FOLDERS = ("", "mnist", "MNIST", "MNIST/raw", "mnist/MNIST/raw")
_SIZES = {"train": 60_000, "t10k": 10_000}
_MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist",
    "https://storage.googleapis.com/cvdf-datasets/mnist",
)

# SHA-256 of the canonical files without and with compression.
_CHECKSUMS = {
    "train-images-idx3-ubyte": (
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    ),
    "train-labels-idx1-ubyte": (
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    ),
    "t10k-images-idx3-ubyte": (
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    ),
    "t10k-labels-idx1-ubyte": (
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    ),
}


def read_idx(path: Path, dimensions: int) -> tuple[NDArray[np.uint8], bytes]:
    """The array of an idx file of unsigned bytes with so many dimensions, and the file's content without compression.

    The format: 0, 0, the type 8, the number of dimensions, each dimension as a
    big-endian 32-bit number, the bytes.
    """
    content = read_bytes(path)
    # By the first bytes, not by the name: browsers unpack .gz files and keep their
    # names.
    if content[:2] == b"\x1f\x8b":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(
                f"{path} is truncated or not a gzip file ({error}); fetch it again"
            ) from error
    magic = bytes([0, 0, 8, dimensions])
    if content[:4] != magic:
        raise DataError(
            f"{path} is not an idx file: it begins with {content[:4].hex()}, "
            f"expected {magic.hex()}"
        )
    start = 4 + 4 * dimensions
    # A header that is cut short is filled up with zeros; the length below then refuses
    # it.
    shape = tuple(
        int(size)
        for size in np.frombuffer(content[4:start].ljust(4 * dimensions, b"\0"), ">u4")
    )
    if len(content) != start + prod(shape):
        raise DataError(
            f"{path} has {len(content):,} bytes, expected {start + prod(shape):,} "
            f"for {shape}; fetch it again"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape), content


def _read_split(split: str, files: dict[str, Path]) -> Split:
    images_name, labels_name = (
        f"{split}-images-idx3-ubyte",
        f"{split}-labels-idx1-ubyte",
    )
    images, image_content = read_idx(files[images_name], 3)
    labels, label_content = read_idx(files[labels_name], 1)
    if images.shape[1:] != (28, 28) or len(images) == 0:
        raise DataError(
            f"{files[images_name]} has images of {images.shape}, expected (N, 28, 28)"
        )
    if len(images) != len(labels):
        raise DataError(
            f"{files[labels_name]} has {len(labels):,} labels for "
            f"{len(images):,} images"
        )
    if labels.max() > 9:
        raise DataError(
            f"{files[labels_name]} has the label {labels.max()}, expected 0 to 9"
        )
    # A part of MNIST has no checksum to compare with; its title says that it is a part.
    if len(images) == _SIZES[split]:
        _check_content(files[images_name], image_content, _CHECKSUMS[images_name][0])
        _check_content(files[labels_name], label_content, _CHECKSUMS[labels_name][0])
    return split_from_arrays(images[:, None], labels)


def _check_content(path: Path, content: bytes, sha256: str) -> None:
    """Other data sets, such as Fashion-MNIST, use the same names, sizes and format."""
    if hashlib.sha256(content).hexdigest() != sha256:
        raise DataError(
            f"{path} is not the file of MNIST: its content has another "
            "SHA-256; fetch it again"
        )


def _remotes() -> tuple[Remote, ...]:
    remotes = []
    for name, (_, packed) in _CHECKSUMS.items():
        urls = tuple(f"{mirror}/{name}.gz" for mirror in _MIRRORS)
        remotes.append(Remote(f"{name}.gz", packed, urls))
    return tuple(remotes)


def _present(folder: Path) -> dict[str, Path]:
    """The idx files in a folder, by their names: "train-images-idx3-ubyte", also with a dot before idx, or .gz."""
    present: dict[str, Path] = {}
    for name in _CHECKSUMS:
        dotted = name.replace("-idx", ".idx")
        for file in (name, f"{name}.gz", dotted, f"{dotted}.gz"):
            if (folder / file).is_file():
                present.setdefault(name, folder / file)
    return present


@register_source
class Mnist(FileSource):
    """Four idx files; a part of MNIST may be in them."""

    name = "mnist"
    title = "MNIST"
    rank = 1
    remotes = _remotes()
    layout = ", ".join(f"{name}.gz" for name in _CHECKSUMS)

    def read(self, root: Path) -> Dataset | None:
        for subfolder in _FOLDERS:
            folder = root / subfolder
            files = _present(folder)
            missing = [name for name in _CHECKSUMS if name not in files]
            if files and missing:
                listed = ", ".join(missing)
                raise IncompleteError(
                    f"{folder} lacks {listed} of MNIST (or the same with .gz); "
                    "put them there"
                )
            if files:
                return self._read_files(files)
        return None

    def _read_files(self, files: dict[str, Path]) -> Dataset:
        train, test = _read_split("train", files), _read_split("t10k", files)
        title = with_remarks(
            self.title, part_remarks(train, test, (_SIZES["train"], _SIZES["t10k"]))
        )
        return Dataset(self.name, title, train, test, tuple("0123456789"), "idx files")
