"""Tiny-ImageNet in its own layout, as a folder or an archive; its validation images are the test split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from lipcert.data.dataset import Dataset, split_from_arrays
from lipcert.data.decoded import Decoded, cached
from lipcert.data.download import Remote
from lipcert.data.images import DecodedImage, decode_images, stack_images
from lipcert.data.source import Source, only_archive
from lipcert.errors import DataError

_TOP = "tiny-imagenet-200"
_ARCHIVE = f"{_TOP}.zip"
_FOLDERS = ("", "tiny-imagenet", _TOP, f"tiny-imagenet/{_TOP}")
_PER_CLASS = 500


def find(root: Path) -> Callable[[], Dataset] | None:
    """A reader of the folder with wnids.txt, or of the archive whose name begins with tiny-imagenet."""
    for base in (root / name for name in _FOLDERS):
        if (base / "wnids.txt").is_file():
            return partial(_read, base)
        archive = only_archive(base, "tiny-imagenet")
        if archive is not None:
            return partial(_read, archive)
    return None


def _read(source: Path) -> Dataset:
    decoded = cached(source, "tiny-imagenet", partial(_decode, source))
    train, test = decoded.splits["train"], decoded.splits["test"]
    counts = np.bincount(train.labels.numpy(), minlength=len(decoded.class_names))
    few, many = int(counts.min()), int(counts.max())
    per_class = f"{few}" if few == many else f"{few} to {many}"
    remarks = [] if len(counts) == 200 else [f"{len(counts)} classes"]
    if per_class != str(_PER_CLASS):
        remarks.append(f"{per_class} per class")
    title = f"Tiny-ImageNet ({', '.join(remarks)})" if remarks else "Tiny-ImageNet"
    note = f"{per_class} of {_PER_CLASS} training images per class, {len(test):,} validation images, from {source.name}"
    return Dataset("tiny-imagenet", title, train, test, decoded.class_names, note)


def _decode(source: Path) -> Decoded:
    """Classes are counted in the order of their WordNet ids, as readers of image folders do."""
    tops = ("",) if source.is_dir() else ("", f"{_TOP}/")
    parts = ("train/", "val/", "wnids.txt", "words.txt")  # the images of test/ have no labels
    images, texts = decode_images(source, under=[top + part for top in tops for part in parts], colour=True)
    texts = {path.removeprefix(f"{_TOP}/"): content for path, content in texts.items()}
    ids = sorted(_lines(source, texts, "wnids.txt"))
    labels = {name: label for label, name in enumerate(ids)}
    train: list[tuple[int, DecodedImage]] = []
    val: dict[str, DecodedImage] = {}
    for image in sorted(images, key=lambda image: image.path):
        folder, *rest = image.path.removeprefix(f"{_TOP}/").split("/")
        if folder == "val":
            val[rest[-1]] = image
        elif rest[0] in labels:
            train.append((labels[rest[0]], image))
        else:
            raise DataError(f"{source}: {image.path} is of the class {rest[0]!r}, which wnids.txt does not list")
    empty = [name for name in ids if labels[name] not in {label for label, _ in train}]
    if empty:
        raise DataError(f"{source} has no training images of {len(empty)} classes, such as {empty[0]}; fetch it again")
    test = _annotated(source, texts, val, labels)
    stacked = stack_images(source, [image for _, image in (*train, *test)])
    targets = np.array([label for label, _ in (*train, *test)])
    cut = len(train)
    splits = {
        "train": split_from_arrays(stacked[:cut], targets[:cut]),
        "test": split_from_arrays(stacked[cut:], targets[cut:]),
    }
    return Decoded(splits, _names(texts, ids), tuple(sorted({image.format for image in images})))


def _annotated(
    source: Path, texts: dict[str, bytes], images: dict[str, DecodedImage], labels: dict[str, int]
) -> list[tuple[int, DecodedImage]]:
    """Labels and images of val/, in the order of the file names."""
    annotations: dict[str, str] = {}
    for number, line in enumerate(_lines(source, texts, "val/val_annotations.txt"), 1):
        fields = line.split("\t")
        if len(fields) < 2 or fields[1] not in labels:
            raise DataError(f"{source}: line {number} of val_annotations.txt does not name an image and its class")
        annotations[fields[0]] = fields[1]
    for name in sorted(annotations.keys() ^ images.keys()):
        lack = "is not in val_annotations.txt" if name in images else "is named by val_annotations.txt but missing"
        raise DataError(f"{source}: the validation image {name} {lack}; fetch the data set again")
    return [(labels[annotations[name]], images[name]) for name in sorted(images)]


def _lines(source: Path, texts: dict[str, bytes], name: str) -> list[str]:
    lines = [line.strip() for line in texts.get(name, b"").decode("utf-8", errors="replace").splitlines()]
    if not any(lines):
        raise DataError(f"{source} lacks {name} (or it is empty); fetch the data set again")
    return [line for line in lines if line]


def _names(texts: dict[str, bytes], ids: Sequence[str]) -> tuple[str, ...]:
    """The first word for every class, and its id where words.txt does not know it."""
    table = (line.split("\t", 1) for line in texts.get("words.txt", b"").decode("utf-8", errors="replace").splitlines())
    words = {row[0]: row[1].split(",")[0].strip() for row in table if len(row) == 2}
    return tuple(words.get(name, name) for name in ids)


SOURCE = Source(
    name="tiny-imagenet",
    title="Tiny-ImageNet",
    find=find,
    remotes=(
        Remote(
            _ARCHIVE,
            "6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821",
            (f"https://cs231n.stanford.edu/{_ARCHIVE}", f"http://cs231n.stanford.edu/{_ARCHIVE}"),
        ),
    ),
    layout=f"{_ARCHIVE} or its unpacked folder {_TOP}",
)
