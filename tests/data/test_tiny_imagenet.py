"""Tiny-ImageNet in its own layout."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from makers import image_bytes, pack, random_pixels, write_tiny_imagenet

from lipcert.data import load
from lipcert.errors import DataError


@pytest.mark.parametrize("form", ["folder", "tar.xz", "zip", "flat.tar.gz"])
def test_every_form(tmp_path: Path, form: str) -> None:
    unpacked, data_dir = (
        tmp_path / "tiny-imagenet-200",
        tmp_path / "data" / "tiny-imagenet",
    )
    ids = write_tiny_imagenet(unpacked)
    data_dir.mkdir(parents=True)
    if form == "folder":
        unpacked.rename(data_dir / "tiny-imagenet-200")
    elif form == "zip":
        with zipfile.ZipFile(data_dir / "tiny-imagenet-200.zip", "w") as archive:
            for path in unpacked.rglob("*"):
                archive.write(path, path.relative_to(tmp_path))
    else:
        pack(
            unpacked,
            data_dir / f"tiny-imagenet.{form}",
            top="" if "flat" in form else unpacked.name,
        )
    checksums = set()
    for _ in range(2):  # decoded, then cached
        data = load("tiny-imagenet", tmp_path / "data")
        checksums.add(data.checksum)
        assert data.title == "Tiny-ImageNet (3 classes, 2 per class)"
        assert "2 of 500 training images per class, 6 validation images" in data.note
        assert data.input_shape == (3, 64, 64)
        assert data.class_names == (ids[2], f"word {ids[1]}", f"word {ids[0]}")
        assert data.train.labels.tolist() == [0, 0, 1, 1, 2, 2]
        assert data.test.labels.tolist() == [2, 1, 0, 2, 1, 0]
        assert torch.equal(
            data.test.images[0, 0], data.test.images[0, 2]
        )  # the grey one
    assert len(checksums) == 1


def test_titles(tmp_path: Path) -> None:
    ids = write_tiny_imagenet(tmp_path, classes=200, per_class=1)
    assert load("tiny-imagenet", tmp_path).title == "Tiny-ImageNet (1 per class)"
    extra = tmp_path / "train" / ids[5] / "images" / "extra.JPEG"
    extra.write_bytes(image_bytes(random_pixels((64, 64, 3)), "JPEG"))
    assert load("tiny-imagenet", tmp_path).title == "Tiny-ImageNet (1 to 2 per class)"


def rename(old: str, new: str) -> Callable[[Path], object]:
    return lambda root: (root / old).rename(root / new)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda root: (root / "val" / "val_annotations.txt").unlink(),
            "lacks val/val_annotations.txt",
        ),
        (lambda root: (root / "wnids.txt").write_text("\n"), "lacks wnids.txt"),
        (
            rename("train/n00000099", "train/n00000007"),
            "is of the class 'n00000007', which wnids.txt does not list",
        ),
        (
            lambda root: (root / "wnids.txt").open("a").write("n00000001\n"),
            "has no training images of 1 classes, such as n00000001",
        ),
        (
            lambda root: (root / "val" / "images" / "val_3.JPEG").unlink(),
            "the validation image val_3.JPEG is named by val_annotations.txt but missing",
        ),
        (
            rename("val/images/val_3.JPEG", "val/images/val_30.JPEG"),
            "the validation image val_3.JPEG is named by val_annotations.txt but missing",
        ),
        (
            lambda root: (root / "val" / "images" / "a.JPEG").write_bytes(
                image_bytes(random_pixels((64, 64)), "JPEG")
            ),
            "the validation image a.JPEG is not in val_annotations.txt",
        ),
        (
            lambda root: (
                (root / "val" / "val_annotations.txt")
                .open("a")
                .write("val_9.JPEG n00000099\n")
            ),
            "line 7 of val_annotations.txt does not name an image and its class",
        ),
        (
            lambda root: (root / "val" / "images" / "val_2.JPEG").write_bytes(
                b"GIF89a"
            ),
            "val/images/val_2.JPEG is truncated or not an image",
        ),
        (
            lambda root: (root / "val" / "images" / "val_2.JPEG").write_bytes(
                image_bytes(random_pixels((32, 48)), "JPEG")
            ),
            "val_2.JPEG has 48×32 pixels, expected 64×64",
        ),
    ],
)
def test_wrong_files_are_refused_by_name(
    tmp_path: Path, change: Callable[[Path], object], message: str
) -> None:
    write_tiny_imagenet(tmp_path)
    change(tmp_path)
    with pytest.raises(DataError, match=message):
        load("tiny-imagenet", tmp_path)


def test_nothing_found_names_the_archive(tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match=r"Put tiny-imagenet-200.zip or its unpacked folder tiny-imagenet-200 into",
    ):
        load("tiny-imagenet", tmp_path)


@pytest.mark.data
def test_the_real_part() -> None:
    data = load("tiny-imagenet", download=False)
    assert data.title == "Tiny-ImageNet (100 per class)"
    assert (len(data.train), len(data.test), data.classes) == (20_000, 10_000, 200)
    assert torch.bincount(data.test.labels).tolist() == [50] * 200
    assert data.class_names[0] == "goldfish"
