"""Tiny-ImageNet in its own layout, as a folder or an archive; its validation images are the test split."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from lipcert.data.archives import only_archive
from lipcert.data.dataset import Dataset
from lipcert.data.decoded import Decoded, cached
from lipcert.data.download import Remote
from lipcert.data.images import DecodedImage, Labelled, decode_images, stack_splits
from lipcert.data.sources.source import FileSource, register_source, with_remarks
from lipcert.errors import DataError

_TOP = "tiny-imagenet-200"
_ARCHIVE = f"{_TOP}.zip"
_FOLDERS = ("", "tiny-imagenet", _TOP, f"tiny-imagenet/{_TOP}")
_READ = (
    "train/",
    "val/",
    "wnids.txt",
    "words.txt",
)  # the images of test/ have no labels
_CLASSES, _PER_CLASS = 200, 500


@register_source
class TinyImageNet(FileSource):
    """The folder with wnids.txt, or an archive whose name begins with tiny-imagenet; a part of it may be there."""

    name = "tiny-imagenet"
    title = "Tiny-ImageNet"
    rank = 3
    remotes = (
        Remote(
            _ARCHIVE,
            "6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821",
            (
                f"https://cs231n.stanford.edu/{_ARCHIVE}",
                f"http://cs231n.stanford.edu/{_ARCHIVE}",
            ),
        ),
    )
    layout = f"{_ARCHIVE} or its unpacked folder {_TOP}"

    def read(self, root: Path) -> Dataset | None:
        for subfolder in _FOLDERS:
            base = root / subfolder
            if (base / "wnids.txt").is_file():
                return self._read_source(base)
            archive = only_archive(base, "tiny-imagenet")
            if archive is not None:
                return self._read_source(archive)
        return None

    def _read_source(self, source: Path) -> Dataset:
        decoded = cached(source, "tiny-imagenet", partial(_decode, source))
        train, test = decoded.splits["train"], decoded.splits["test"]
        classes = len(decoded.class_names)
        counts = np.bincount(train.labels.numpy(), minlength=classes)
        per_class = " to ".join(map(str, np.unique([counts.min(), counts.max()])))
        remarks = []
        if classes != _CLASSES:
            remarks.append(f"{classes} classes")
        if per_class != str(_PER_CLASS):
            remarks.append(f"{per_class} per class")
        images = (
            f"{per_class} of {_PER_CLASS} training images per class, "
            f"{len(test):,} validation images"
        )
        note = f"{images}, from {source.name}"
        return Dataset(
            self.name,
            with_remarks(self.title, remarks),
            train,
            test,
            decoded.class_names,
            note,
        )


def _decode(source: Path) -> Decoded:
    """Classes are counted in the order of their WordNet ids, as readers of image folders do."""
    # Without test/: ten thousand images without labels need not be decoded.
    under = list(_READ)
    if not source.is_dir():
        under += [f"{_TOP}/{name}" for name in _READ]
    images, contents = decode_images(source, under=under, colour=True)
    texts = {}
    for path, content in contents.items():
        texts[path.removeprefix(f"{_TOP}/")] = content.decode("utf-8", errors="replace")
    # The file itself is in no order; sorted ids are what torchvision counts by.
    ids = sorted(_lines(source, texts, "wnids.txt"))
    labels = {name: label for label, name in enumerate(ids)}
    train: list[Labelled] = []
    validation: dict[str, DecodedImage] = {}
    for image in images:
        folder, *rest = image.path.removeprefix(f"{_TOP}/").split("/")
        if folder == "val":
            validation[rest[-1]] = image
        elif rest[0] in labels:
            train.append((labels[rest[0]], image))
        else:
            raise DataError(
                f"{source}: {image.path} is of the class {rest[0]!r}, which "
                "wnids.txt does not list"
            )
    empty = sorted(set(range(len(ids))) - {label for label, _ in train})
    if empty:
        culprit = ids[empty[0]]
        raise DataError(
            f"{source} has no training images of {len(empty)} classes, such as "
            f"{culprit}; fetch it again"
        )
    test = _annotated(source, texts, validation, labels)
    splits = stack_splits(source, {"train": train, "test": test})
    formats = {image.format for image in images}
    return Decoded(splits, _class_names(texts, ids), tuple(sorted(formats)))


def _annotated(
    source: Path,
    texts: dict[str, str],
    images: dict[str, DecodedImage],
    labels: dict[str, int],
) -> list[Labelled]:
    """Labels and images of val/, in the order of the file names."""
    annotations: dict[str, int] = {}
    for number, line in enumerate(_lines(source, texts, "val/val_annotations.txt"), 1):
        fields = line.split("\t")
        if len(fields) < 2 or fields[1] not in labels:
            raise DataError(
                f"{source}: line {number} of val_annotations.txt does not name an "
                "image and its class"
            )
        annotations[fields[0]] = labels[fields[1]]
    # The first name that only one side has.
    for name in sorted(annotations.keys() ^ images.keys()):
        lack = (
            "is not in val_annotations.txt"
            if name in images
            else "is named by val_annotations.txt but missing"
        )
        raise DataError(
            f"{source}: the validation image {name} {lack}; fetch the data set again"
        )
    return [(annotations[name], images[name]) for name in sorted(images)]


def _lines(source: Path, texts: dict[str, str], name: str) -> list[str]:
    lines = [line.strip() for line in texts.get(name, "").splitlines() if line.strip()]
    if not lines:
        raise DataError(
            f"{source} lacks {name} (or it is empty); fetch the data set again"
        )
    return lines


def _class_names(texts: dict[str, str], ids: list[str]) -> tuple[str, ...]:
    """The first word for every class, and its id where words.txt does not know it."""
    words = {}
    for line in texts.get("words.txt", "").splitlines():
        name, _, synonyms = line.partition("\t")
        words[name] = synonyms.split(",")[0].strip()
    return tuple(words.get(name) or name for name in ids)
