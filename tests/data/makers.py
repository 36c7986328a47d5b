"""Small data sets in every format, made on the spot."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

CIFAR10 = (
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


def idx_bytes(array: NDArray[np.uint8]) -> bytes:
    return (
        bytes([0, 0, 8, array.ndim])
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )


def write_mnist(
    folder: Path, train: int = 20, test: int = 10, *, packed: bool = True
) -> dict[str, Path]:
    """Tiny idx files under the canonical names; returns their paths by name."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    paths = {}
    for split, count in (("train", train), ("t10k", test)):
        images = generator.integers(0, 256, (count, 28, 28), np.uint8)
        for name, array in (
            (f"{split}-images-idx3-ubyte", images),
            (f"{split}-labels-idx1-ubyte", (np.arange(count) % 10).astype(np.uint8)),
        ):
            content = idx_bytes(array)
            paths[name] = folder / (f"{name}.gz" if packed else name)
            paths[name].write_bytes(gzip.compress(content) if packed else content)
    return paths


def cifar10_arrays(
    count: int = 3, seed: int = 0
) -> tuple[NDArray[np.uint8], list[int]]:
    rows = np.random.default_rng(seed).integers(0, 256, (count, 3072), np.uint8)
    return rows, [(seed + i) % 10 for i in range(count)]


def write_cifar10_python(folder: Path, protocol: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(
        [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    ):
        rows, labels = cifar10_arrays(seed=seed)
        batch = {
            b"batch_label": b"x",
            b"labels": labels,
            b"data": rows,
            b"filenames": [b"a.png"] * 3,
        }
        (folder / name).write_bytes(pickle.dumps(batch, protocol))


def write_cifar10_binary(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(
        [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    ):
        rows, labels = cifar10_arrays(seed=seed)
        (folder / f"{name}.bin").write_bytes(
            np.c_[np.array(labels, np.uint8), rows].tobytes()
        )


def image_bytes(pixels: NDArray[np.uint8], kind: str = "PNG") -> bytes:
    """A (H, W) or (H, W, 3) array as an image file."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def random_pixels(shape: tuple[int, ...], seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def write_images(
    folder: Path,
    splits: dict[str, int],
    classes: tuple[str, ...] = ("ant", "bee"),
    *,
    shape: tuple[int, ...] = (8, 8, 3),
    kind: str = "PNG",
) -> None:
    """So many images per class and split; the split "" is no folder."""
    for split, count in splits.items():
        for label, name in enumerate(classes):
            target = folder / split / name
            target.mkdir(parents=True, exist_ok=True)
            for i in range(count):
                content = image_bytes(random_pixels(shape, seed=100 * label + i), kind)
                (target / f"{i}.{kind.lower()}").write_bytes(content)


def write_tiny_imagenet(
    folder: Path, per_class: int = 2, classes: int = 3
) -> list[str]:
    """Tiny-ImageNet's layout; the ids are not in order, as in the original. Returns the ids."""
    ids = [f"n{100 - i:08d}" for i in range(classes)]
    for label, name in enumerate(ids):
        (folder / "train" / name / "images").mkdir(parents=True)
        (folder / "train" / name / f"{name}_boxes.txt").write_text("0\t0\t1\t1\n")
        for i in range(per_class):
            content = image_bytes(
                random_pixels((64, 64, 3), seed=10 * label + i), "JPEG"
            )
            (folder / "train" / name / "images" / f"{name}_{i}.JPEG").write_bytes(
                content
            )
    (folder / "val" / "images").mkdir(parents=True)
    annotations = []
    for i in range(2 * classes):
        pixels = random_pixels((64, 64) if i == 0 else (64, 64, 3), seed=1000 + i)
        (folder / "val" / "images" / f"val_{i}.JPEG").write_bytes(
            image_bytes(pixels, "JPEG")
        )
        annotations.append(f"val_{i}.JPEG\t{ids[i % classes]}\t0\t0\t62\t62\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(annotations))
    (folder / "test" / "images").mkdir(parents=True)
    (folder / "test" / "images" / "test_0.JPEG").write_bytes(
        b"unlabelled: never opened"
    )
    (folder / "wnids.txt").write_text("\n".join(ids) + "\n")
    (folder / "words.txt").write_text(
        "".join(f"{name}\tword {name}, synonym\n" for name in ids[:-1])
    )
    return ids


def pack(folder: Path, archive: Path, *, top: str = "") -> Path:
    """The folder as a tar file, compressed as its name says; `top` is a folder put above everything."""
    mode = {"gz": "w:gz", "xz": "w:xz", "tar": "w"}[archive.suffix[1:]]
    with tarfile.open(archive, mode) as tar:  # type: ignore[call-overload]
        tar.add(folder, arcname=top or ".")
    return archive
