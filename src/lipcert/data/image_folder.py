"""Folders and archives of images in the form split/class/image or class/image."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from lipcert.data.archives import read_files
from lipcert.data.dataset import SPLITS, Dataset, split_by_seed, split_note
from lipcert.data.decoded import Decoded, cached
from lipcert.data.images import (
    DecodedImage,
    Labelled,
    decode_images,
    is_image_name,
    stack_splits,
)
from lipcert.errors import DataError

_LOG = logging.getLogger(__name__)
_WHOLE = "whole"  # the only split of a folder that is not split

Placed = dict[str, list[tuple[str, DecodedImage]]]
"""By split: the class of every image."""


def read_image_folder(source: Path, seed: int) -> Dataset:
    """The data set of an image folder or archive; without a test split, one is cut off by the seed.

    With train and val only, val is the test split; with all three, val is the
    validation split.
    """
    _refuse_empty_classes(source)
    # Before it is split by seed: one cache file serves all seeds.
    decoded = cached(source, "images", lambda: decode_folder(source))
    splits = dict(decoded.splits)
    note = f"images of {source.name}"
    if len(splits) == 1:
        (only,) = splits.values()
        for name, count in zip(
            decoded.class_names, only.labels.bincount().tolist(), strict=True
        ):
            if count == 1:
                raise DataError(
                    f"{source}: the class {name!r} has a single image; add "
                    "another one to test on"
                )
        splits["train"], splits["test"] = split_by_seed(only, seed)
        note += f", {split_note(seed, splits['train'], splits['test'])}"
    elif "test" not in splits:
        splits["test"] = splits.pop("validation")
        note += ", tested on its validation split"
    validation = splits.get("validation")
    return Dataset(
        str(source),
        source.name,
        splits["train"],
        splits["test"],
        decoded.class_names,
        note,
        validation,
    )


def decode_folder(source: Path, *, colour: bool = False) -> Decoded:
    """All images of a folder or archive, sorted by path. Classes are counted in the order of their folders' names."""
    images, _ = decode_images(source, colour=colour)
    if not images:
        forms = "<class>/<image>, or train/<class>/<image> and test/<class>/<image>"
        raise DataError(f"{source} holds no images; expected {forms}")
    placed = _place(source, images)
    training = placed.get("train") or placed.get(_WHOLE)
    if training is None:
        raise DataError(
            f"{source} has images to test on but none in train/; add them or "
            "remove the folder test/"
        )
    # Of the training images: a class that is only tested cannot be learned.
    class_names = tuple(sorted({name for name, _ in training}))
    if len(class_names) < 2:
        raise DataError(
            f"{source} has the single class {class_names[0]!r}; a classifier "
            "needs two folders or more"
        )
    splits: dict[str, list[Labelled]] = {}
    for split in sorted(placed):
        splits[split] = []
        for name, image in placed[split]:
            if name not in class_names:
                raise DataError(
                    f"{source}: {image.path} is of the class {name!r}, which has "
                    "no training images"
                )
            splits[split].append((class_names.index(name), image))
    formats = {image.format for image in images}
    return Decoded(stack_splits(source, splits), class_names, tuple(sorted(formats)))


def _refuse_empty_classes(source: Path) -> None:
    """Without images a class would be left out, and the labels of the classes after it would shift."""
    top = _folders(source)
    root = source
    # A single folder that holds everything, as archives leave it when they are
    # unpacked.
    if len(top) == 1 and top[0].name not in SPLITS:
        root = top[0]
    if (root / "train").is_dir():
        root = root / "train"
    for folder in _folders(root):
        if next(read_files(folder, is_image_name), None) is None:
            name = folder.relative_to(source)
            raise DataError(
                f"{source}: the class folder {name} holds no images; add "
                "some or remove it"
            )


def _folders(source: Path) -> list[Path]:
    """The folders in a folder; an archive has none that could be empty."""
    if not source.is_dir():
        return []
    return sorted(
        path
        for path in source.iterdir()
        if path.is_dir() and not path.name.startswith((".", "__MACOSX"))
    )


def _place(source: Path, images: Sequence[DecodedImage]) -> Placed:
    """The split and the class of every image, from its path: train/ant/1.png, ant/1.png, top/ant/1.png, …"""
    paths = [image.path.split("/") for image in images]
    tops = {path[0] for path in paths}
    if (
        len(tops) == 1
        and tops.isdisjoint(SPLITS)
        and any(len(path) > 2 for path in paths)
    ):
        paths = [
            path[1:] for path in paths
        ]  # what archives usually have at the top, no class
    # One folder called train is enough: what lies beside it is then no class.
    split_up = any(path[0] in SPLITS for path in paths)
    placed: Placed = {}
    ignored: list[str] = []
    for image, path in zip(images, paths, strict=True):
        split, form = _WHOLE, "<class>/<image>"
        if split_up:
            if path[0] not in SPLITS:
                ignored.append(image.path)
                continue
            split, form = SPLITS[path.pop(0)], "<split>/<class>/<image>"
        if len(path) < 2:
            raise DataError(
                f"{source}: {image.path} is in no class folder, expected {form}"
            )
        placed.setdefault(split, []).append((path[0], image))
    if ignored:
        _LOG.warning(
            "%s: ignored %d images outside of its splits, such as %s",
            source,
            len(ignored),
            ignored[0],
        )
    return placed
