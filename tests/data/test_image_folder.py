"""Image folders: splits, classes, channels, and everything that is refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from makers import image_bytes, pack, random_pixels, write_images
from PIL import Image

from lipcert.data import load
from lipcert.data.images import decode_image
from lipcert.errors import DataError


def test_train_and_test(tmp_path: Path) -> None:
    write_images(tmp_path / "toy", {"train": 3, "test": 2}, ("bee", "ant"))
    data = load(tmp_path / "toy")
    assert data.title == "toy"
    assert data.class_names == ("ant", "bee")
    assert data.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.test.labels.tolist() == [0, 0, 1, 1]
    assert data.validation is None
    first = random_pixels((8, 8, 3), seed=100)  # bee was written first, ant second
    assert torch.equal(data.train.images[0].permute(1, 2, 0), torch.from_numpy(first))


def test_three_splits_and_validation_for_testing(tmp_path: Path) -> None:
    write_images(tmp_path / "three", {"train": 3, "val": 2, "test": 1})
    three = load(tmp_path / "three")
    assert three.validation is not None
    assert (len(three.train), len(three.validation), len(three.test)) == (6, 4, 2)
    write_images(tmp_path / "two", {"train": 3, "valid": 2})
    two = load(tmp_path / "two")
    assert (len(two.train), len(two.test), two.validation) == (6, 4, None)
    assert two.note == "images of two, tested on its validation split"


@pytest.mark.parametrize("split", ["", "train"])
def test_a_split_by_seed(tmp_path: Path, split: str) -> None:
    write_images(tmp_path / "toy", {split: 10})
    data = load(tmp_path / "toy", seed=3)
    assert (len(data.train), len(data.test)) == (16, 4)
    assert (
        data.note
        == "images of toy, split by seed 3 into 16 to train on and 4 to test on"
    )
    assert data.checksum == load(tmp_path / "toy", seed=3).checksum
    assert data.checksum != load(tmp_path / "toy", seed=4).checksum


def test_archives_and_relative_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_images(tmp_path / "toy", {"train": 2, "test": 1})
    checksum = load(tmp_path / "toy").checksum
    pack(tmp_path / "toy", tmp_path / "flat.tar.gz")
    pack(tmp_path / "toy", tmp_path / "nested.tar.xz", top="toy")
    assert load(tmp_path / "flat.tar.gz").checksum == checksum
    assert load("nested.tar.xz", data_dir=tmp_path).checksum == checksum
    monkeypatch.chdir(tmp_path)
    assert load("toy").checksum == checksum


def test_grey_images_have_one_channel_unless_others_are_in_colour(
    tmp_path: Path,
) -> None:
    write_images(tmp_path / "grey", {"train": 1, "test": 1}, shape=(8, 8))
    assert load(tmp_path / "grey").input_shape == (1, 8, 8)
    (tmp_path / "grey" / "test" / "ant" / "c.png").write_bytes(
        image_bytes(random_pixels((8, 8, 3)))
    )
    mixed = load(tmp_path / "grey")
    assert mixed.input_shape == (3, 8, 8)
    assert torch.equal(mixed.train.images[:, 0], mixed.train.images[:, 2])


def test_a_changed_folder_is_decoded_again(tmp_path: Path, cache: Path) -> None:
    write_images(tmp_path / "toy", {"train": 2, "test": 1})
    load(tmp_path / "toy")
    assert len(list((cache / "decoded").iterdir())) == 1
    (tmp_path / "toy" / "train" / "ant" / "new.png").write_bytes(
        image_bytes(random_pixels((8, 8, 3)))
    )
    assert len(load(tmp_path / "toy").train) == 5


def test_a_damaged_cache_is_replaced(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_images(tmp_path / "toy", {"train": 2, "test": 1})
    checksum = load(tmp_path / "toy").checksum
    (path,) = (cache / "decoded").iterdir()
    good = path.read_bytes()
    flipped = bytearray(good)
    flipped[-1] ^= 1
    for damaged in (b"", good[:100], good[:-10], bytes(flipped), b"x" * 100):
        path.write_bytes(damaged)
        caplog.clear()
        assert load(tmp_path / "toy").checksum == checksum
        assert f"{path} is damaged and will be replaced" in caplog.text
        caplog.clear()
        assert load(tmp_path / "toy").checksum == checksum
        assert "damaged" not in caplog.text
    assert list((cache / "decoded").iterdir()) == [path]


def test_a_cache_that_cannot_be_written_is_only_a_warning(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_images(tmp_path / "toy", {"train": 2, "test": 1})
    cache.write_text("a file where a folder should be")
    assert len(load(tmp_path / "toy").train) == 4
    assert "toy are not cached" in caplog.text


def test_other_files_are_ignored_and_stray_images_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_images(tmp_path / "toy", {"train": 2, "test": 1, "extra": 1})
    (tmp_path / "toy" / "train" / "ant" / "Thumbs.db").write_bytes(b"x")
    (tmp_path / "toy" / "train" / "ant" / ".DS_Store").write_bytes(b"x")
    (tmp_path / "toy" / "README.md").write_bytes(b"x")
    with caplog.at_level(logging.WARNING):
        assert len(load(tmp_path / "toy").train) == 4
    assert (
        "ignored 2 images outside of its splits, such as extra/ant/0.png" in caplog.text
    )


def put(path: str, content: bytes) -> Callable[[Path], None]:
    def write(root: Path) -> None:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)

    return write


PNG = image_bytes(random_pixels((8, 8, 3)))


@pytest.mark.parametrize(
    ("splits", "change", "message"),
    [
        (
            {},
            put("notes.txt", b""),
            r"toy holds no images; expected <class>/<image>, or train/<class>/<image>",
        ),
        (
            {"train": 1, "test": 1},
            put("train/ant/x.png", b""),
            "train/ant/x.png is truncated or not an image",
        ),
        (
            {"train": 1, "test": 1},
            put("train/ant/x.jpg", b"<html>"),
            "train/ant/x.jpg is truncated or not an image",
        ),
        (
            {"train": 1, "test": 1},
            put("test/bee/x.png", PNG[:-60]),
            "test/bee/x.png is truncated or not an image",
        ),
        (
            {"train": 1, "test": 1},
            put("train/bee/x.png", image_bytes(random_pixels((8, 9, 3)))),
            r"train/bee/x.png has 9×8 pixels, expected 8×8 as test/ant/0.png; resize all to one size",
        ),
        (
            {"train": 1, "test": 1},
            put("train/x.png", PNG),
            "train/x.png is in no class folder, expected <split>/<class>",
        ),
        (
            {"": 1},
            put("x.png", PNG),
            "x.png is in no class folder, expected <class>/<image>",
        ),
        ({"test": 1}, put("note.txt", b""), "has images to test on but none in train/"),
        (
            {"train": 1, "test": 1},
            put("test/wasp/x.png", PNG),
            "test/wasp/x.png is of the class 'wasp', which has no training images",
        ),
        ({"": 1}, put("wasp/a.png", PNG), "toy: the class 'ant' has a single image"),
    ],
)
def test_wrong_folders(
    tmp_path: Path, splits: dict[str, int], change: Callable[[Path], None], message: str
) -> None:
    write_images(tmp_path / "toy", splits)
    change(tmp_path / "toy")
    with pytest.raises(DataError, match=message):
        load(tmp_path / "toy")


@pytest.mark.parametrize(
    "splits", [{"train": 2, "test": 1}, {"": 2}], ids=["split", "whole"]
)
def test_a_single_class(tmp_path: Path, splits: dict[str, int]) -> None:
    write_images(tmp_path / "toy", splits, ("ant",))
    with pytest.raises(
        DataError,
        match="has the single class 'ant'; a classifier needs two folders or more",
    ):
        load(tmp_path / "toy")


@pytest.mark.parametrize("parent", ["toy", "toy/train", "toy/top", "toy/top/train"])
def test_a_class_without_images_is_refused(tmp_path: Path, parent: str) -> None:
    """Also after the other images have been decoded; it would come before bee and wasp."""
    write_images(tmp_path / parent, {"": 3}, ("ant", "bee", "wasp"))
    (tmp_path / "toy" / ".git").mkdir()
    assert load(tmp_path / "toy").class_names == ("ant", "bee", "wasp")
    empty = tmp_path / parent / "bat"
    empty.mkdir()
    (empty / "notes.txt").write_text("soon")
    name = empty.relative_to(tmp_path / "toy")
    with pytest.raises(
        DataError,
        match=f"toy: the class folder {name} holds no images; add some or remove it",
    ):
        load(tmp_path / "toy")


def test_folders_outside_of_the_splits_may_hold_no_images(tmp_path: Path) -> None:
    write_images(tmp_path / "toy", {"train": 2, "test": 1})
    (tmp_path / "toy" / "notes").mkdir()
    assert len(load(tmp_path / "toy").train) == 4


def test_pixels_with_more_than_8_bits_are_refused() -> None:
    deep = image_bytes(np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000)  # type: ignore[arg-type]
    with pytest.raises(
        DataError,
        match=r"folder: deep.png has pixels of mode I;16, expected 8 bits; convert it",
    ):
        decode_image(Path("folder"), "deep.png", deep)


def test_palettes_transparency_and_black_and_white(tmp_path: Path) -> None:
    colours = Image.fromarray(random_pixels((4, 4, 3)))
    for mode, channels in (("P", 3), ("RGBA", 3), ("CMYK", 3), ("LA", 1), ("1", 1)):
        path = tmp_path / "image.tif"
        colours.convert("L").convert(mode).save(
            path
        ) if channels == 1 else colours.convert(mode).save(path)
        decoded = decode_image(tmp_path, "image.tif", path.read_bytes())
        assert decoded.pixels.shape == (channels, 4, 4)
        assert decode_image(
            tmp_path, "image.tif", path.read_bytes(), colour=True
        ).pixels.shape == (3, 4, 4)


def test_an_image_too_large_to_be_honest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(DataError, match=r"bomb.png is truncated or not an image"):
        decode_image(Path("folder"), "bomb.png", PNG)
