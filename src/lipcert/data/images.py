"""Image files: from bytes to pixels."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lipcert.data.files import read_files
from lipcert.errors import DataError

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")


@dataclass(frozen=True)
class DecodedImage:
    """Pixels (C, H, W) of an image file, C = 1 for grey and 3 for colour, and its format such as JPEG."""

    path: str
    pixels: NDArray[np.uint8]
    format: str


def is_image_name(path: str) -> bool:
    """Whether the path ends like an image file's."""
    return path.lower().endswith(SUFFIXES)


def decode_image(source: Path, path: str, content: bytes, *, colour: bool | None = None) -> DecodedImage:
    """The pixels of an image file in colour, in grey, or as it is (None); a DataError naming it if it is no image.

    `source` is the folder or archive it was read from. Transparency is dropped. More than 8 bits per channel would
    be cut off: refused.
    """
    try:
        with Image.open(io.BytesIO(content)) as image:
            if image.mode.startswith(("I", "F")):
                raise DataError(f"{source}: {path} has pixels of mode {image.mode}, expected 8 bits; convert it")
            grey = image.mode in ("1", "L", "LA") if colour is None else not colour
            pixels = np.asarray(image.convert("L" if grey else "RGB"))
            kind = image.format or "unknown"
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{source}: {path} is truncated or not an image; replace or remove it") from error
    return DecodedImage(path, pixels[None] if grey else np.moveaxis(pixels, 2, 0), kind)


def decode_images(
    source: Path, *, under: Sequence[str] = ("",), colour: bool | None = None
) -> tuple[list[DecodedImage], dict[str, bytes]]:
    """All images of a folder or archive, and the content of its text files; `under` restricts both by their start."""
    images: list[DecodedImage] = []
    texts: dict[str, bytes] = {}
    for path, content in _read(source, tuple(under)):
        if is_image_name(path):
            images.append(decode_image(source, path, content, colour=colour))
        else:
            texts[path] = content
    return images, texts


def stack_images(source: Path, images: Sequence[DecodedImage]) -> NDArray[np.uint8]:
    """(N, C, H, W); grey images become colour ones where any is in colour. All must have one size."""
    height, width = images[0].pixels.shape[1:]
    channels = max(image.pixels.shape[0] for image in images)
    stacked = np.empty((len(images), channels, height, width), np.uint8)
    for row, image in zip(stacked, images, strict=True):
        if image.pixels.shape[1:] != (height, width):
            size = f"{image.pixels.shape[2]}×{image.pixels.shape[1]}"
            expected = f"{width}×{height} as {images[0].path}"
            raise DataError(f"{source}: {image.path} has {size} pixels, expected {expected}; resize all to one size")
        row[:] = image.pixels
    return stacked


def _read(source: Path, under: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    return read_files(source, lambda path: path.startswith(under) and (is_image_name(path) or path.endswith(".txt")))
