"""Folders and archives of images in the form split/class/image or class/image."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lipcert.data.dataset import Dataset, Split, split_by_seed, split_from_arrays
from lipcert.data.decoded import Decoded, cached
from lipcert.data.files import read_files
from lipcert.data.images import DecodedImage, decode_images, is_image_name, stack_images
from lipcert.errors import DataError

_LOG = logging.getLogger(__name__)
_SPLITS = {"train": "train", "test": "test", "val": "validation", "valid": "validation", "validation": "validation"}
_WHOLE = "whole"  # the only split of a folder that is not split

Placed = tuple[str, str, DecodedImage]
"""Split, class and image."""


def read_image_folder(source: Path, seed: int) -> Dataset:
    """The data set of an image folder or archive; without a test split, one is cut off by the seed.

    With train and val only, val is the test split; with all three, val is the validation split.
    """
    _refuse_empty_classes(source)
    decoded = cached(source, "images", lambda: decode_folder(source))
    splits = dict(decoded.splits)
    note = f"images of {source.name}"
    if len(splits) == 1:
        (only,) = splits.values()
        for name, count in zip(decoded.class_names, only.labels.bincount().tolist(), strict=True):
            if count == 1:
                raise DataError(f"{source}: the class {name!r} has a single image; add another one to test on")
        splits["train"], splits["test"] = split_by_seed(only, seed)
        note += (
            f", split by seed {seed} into {len(splits['train']):,} to train on and {len(splits['test']):,} to test on"
        )
    elif "test" not in splits:
        splits["test"] = splits.pop("validation")
        note += ", tested on its validation split"
    return Dataset(
        name=str(source),
        title=source.name,
        train=splits["train"],
        test=splits["test"],
        class_names=decoded.class_names,
        note=note,
        validation=splits.get("validation"),
    )


def decode_folder(source: Path, *, colour: bool | None = None) -> Decoded:
    """All images of a folder or archive, sorted by path. Classes are counted in the order of their folders' names."""
    images, _ = decode_images(source, colour=colour)
    if not images:
        forms = "<class>/<image>, or train/<class>/<image> and test/<class>/<image>"
        raise DataError(f"{source} holds no images; expected {forms}")
    placed = _place(source, sorted(images, key=lambda image: image.path))
    names = sorted({split for split, _, _ in placed})
    first = "train" if _WHOLE not in names else _WHOLE
    if first not in names:
        raise DataError(f"{source} has images to test on but none in train/; add them or remove the folder test/")
    class_names = tuple(sorted({name for split, name, _ in placed if split == first}))
    if len(class_names) < 2:
        raise DataError(f"{source} has the single class {class_names[0]!r}; a classifier needs two folders or more")
    for _, name, image in placed:
        if name not in class_names:
            raise DataError(f"{source}: {image.path} is of the class {name!r}, which has no training images")
    formats = tuple(sorted({image.format for image in images}))
    return Decoded(_split(source, placed, names, class_names), class_names, formats)


def _refuse_empty_classes(source: Path) -> None:
    """Without images a class would be left out, and the labels of the classes after it would shift."""
    top = _folders(source)
    root = top[0] if len(top) == 1 and top[0].name not in _SPLITS else source
    train = root / "train"
    for folder in _folders(train if train.is_dir() else root):
        if next(read_files(folder, is_image_name), None) is None:
            name = folder.relative_to(source)
            raise DataError(f"{source}: the class folder {name} holds no images; add some or remove it")


def _folders(source: Path) -> list[Path]:
    """The folders in a folder; an archive has none that could be empty."""
    if not source.is_dir():
        return []
    return sorted(path for path in source.iterdir() if path.is_dir() and not path.name.startswith((".", "__MACOSX")))


def _place(source: Path, images: Sequence[DecodedImage]) -> list[Placed]:
    paths = [image.path.split("/") for image in images]
    one_folder = len({path[0] for path in paths}) == 1 and paths[0][0] not in _SPLITS
    if one_folder and any(len(path) > 2 for path in paths):  # what archives usually have at the top, no class
        paths = [path[1:] for path in paths]
    split_up = any(path[0] in _SPLITS for path in paths if path)
    placed: list[Placed] = []
    ignored: list[str] = []
    for image, path in zip(images, paths, strict=True):
        if split_up and path[0] not in _SPLITS:
            ignored.append(image.path)
            continue
        folders = path[1:-1] if split_up else path[:-1]
        if not folders:
            form = "<split>/<class>/<image>" if split_up else "<class>/<image>"
            raise DataError(f"{source}: {image.path} is in no class folder, expected {form}")
        placed.append((_SPLITS[path[0]] if split_up else _WHOLE, folders[0], image))
    if ignored:
        _LOG.warning("%s: ignored %d images outside of its splits, such as %s", source, len(ignored), ignored[0])
    return placed


def _split(
    source: Path, placed: Sequence[Placed], names: Sequence[str], class_names: Sequence[str]
) -> dict[str, Split]:
    """The images of every split, stacked; all splits at once, so that they agree in size and channels."""
    placed = sorted(placed, key=lambda item: names.index(item[0]))
    stacked = stack_images(source, [image for _, _, image in placed])
    index = {name: label for label, name in enumerate(class_names)}
    labels = np.array([index[name] for _, name, _ in placed])
    origins = np.array([names.index(split) for split, _, _ in placed])
    bounds = np.searchsorted(origins, np.arange(len(names) + 1))
    return {
        name: split_from_arrays(stacked[start:stop], labels[start:stop])
        for name, start, stop in zip(names, bounds[:-1], bounds[1:], strict=True)
    }
