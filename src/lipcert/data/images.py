"""Image files: from bytes to pixels."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lipcert.data.archives import read_files
from lipcert.data.dataset import Split, split_from_arrays
from lipcert.errors import DataError

SUFFIXES = (
    ".jpg",
    ".jpeg",
    ".png",
    ".bmp",
    ".gif",
    ".webp",
    ".ppm",
    ".pgm",
    ".tif",
    ".tiff",
)


@dataclass(frozen=True)
class DecodedImage:
    """Pixels (C, H, W) of an image file, C = 1 for grey and 3 for colour, and its format such as JPEG."""

    path: str
    pixels: NDArray[np.uint8]
    format: str


Labelled = tuple[int, DecodedImage]
"""A label and its image."""


def is_image_name(path: str) -> bool:
    """Whether the path ends like an image file's."""
    return path.lower().endswith(SUFFIXES)


def decode_image(
    source: Path, path: str, content: bytes, *, colour: bool = False
) -> DecodedImage:
    """The pixels of an image file as it is, or in colour; a DataError naming it if it is no image.

    `source` is the folder or archive it was read from. Transparency is dropped. More
    than 8 bits per channel would be cut off: refused.
    """
    try:
        with Image.open(io.BytesIO(content)) as image:
            # 16 bits and floats: convert() would clip them to 255 without a word.
            if image.mode.startswith(("I", "F")):
                raise DataError(
                    f"{source}: {path} has pixels of mode {image.mode}, expected 8 "
                    "bits; convert it"
                )
            format_name = image.format or "unknown"
            if image.mode in ("1", "L", "LA") and not colour:
                pixels = np.asarray(image.convert("L"))[None]
            else:
                pixels = np.moveaxis(np.asarray(image.convert("RGB")), 2, 0)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(
            f"{source}: {path} is truncated or not an image; replace or remove it"
        ) from error
    return DecodedImage(path, pixels, format_name)


def decode_images(
    source: Path, *, under: Sequence[str] = ("",), colour: bool = False
) -> tuple[list[DecodedImage], dict[str, bytes]]:
    """All images of a folder or archive, sorted by path, and its text files; `under` restricts both by their start."""

    def wanted(path: str) -> bool:
        return path.startswith(tuple(under)) and (
            is_image_name(path) or path.endswith(".txt")
        )

    images: list[DecodedImage] = []
    texts: dict[str, bytes] = {}
    for path, content in read_files(source, wanted):
        if is_image_name(path):
            images.append(decode_image(source, path, content, colour=colour))
        else:
            texts[path] = content
    # Archives have an order of their own; labels and splits must not depend on it.
    images.sort(key=lambda image: image.path)
    return images, texts


def stack_splits(
    source: Path, splits: Mapping[str, Sequence[Labelled]]
) -> dict[str, Split]:
    """The images of every split as one tensor; all must have one size.

    Grey images become colour ones where any is in colour, in whatever split.
    """
    everything: list[Labelled] = []
    for labelled in splits.values():
        everything += labelled
    first = everything[0][1]
    height, width = first.pixels.shape[1:]
    channels = max(len(image.pixels) for _, image in everything)
    stacked = np.empty((len(everything), channels, height, width), np.uint8)
    labels = np.empty(len(everything), np.int64)
    for row, (label, image) in enumerate(everything):
        if image.pixels.shape[1:] != (height, width):
            size = f"{image.pixels.shape[2]}×{image.pixels.shape[1]}"
            expected = f"{width}×{height} as {first.path}"
            raise DataError(
                f"{source}: {image.path} has {size} pixels, expected {expected}; "
                "resize all to one size"
            )
        # (1, H, W) is broadcast to three channels.
        stacked[row], labels[row] = image.pixels, label
    # Splits lie behind each other in `stacked`, in the order of `splits`.
    result: dict[str, Split] = {}
    start = 0
    for name, labelled in splits.items():
        stop = start + len(labelled)
        result[name] = split_from_arrays(stacked[start:stop], labels[start:stop])
        start = stop
    return result
