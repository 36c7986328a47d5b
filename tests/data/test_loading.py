"""Names, folders and the order in which they are searched."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from makers import write_images, write_mnist

from lipcert.data import NAMES, cache_dir, load
from lipcert.errors import DataError, OptionError


def test_digits() -> None:
    data = load("digits")
    assert (len(data.train), len(data.test), data.input_shape) == (1438, 359, (1, 8, 8))
    pixels = torch.cat([data.train.pixels(), data.test.pixels()])
    assert (pixels.min(), pixels.max()) == (0.0, 1.0)
    assert len(pixels.unique()) == 17
    assert torch.bincount(data.test.labels).tolist() == [
        36,
        36,
        35,
        37,
        36,
        36,
        36,
        36,
        35,
        36,
    ]
    assert data.class_names == tuple("0123456789")
    assert (
        data.note
        == "scikit-learn's digits, split by seed 0 into 1,438 to train on and 359 to test on"
    )


def test_digits_by_seed() -> None:
    assert load("digits", seed=1).checksum == load("digits", seed=1).checksum
    assert load("digits", seed=1).checksum != load("digits", seed=2).checksum


def test_the_order_of_search(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """data_dir, then LIPCERT_DATA_DIR, then the cache."""
    for size, folder in (
        (21, tmp_path / "argument"),
        (22, tmp_path / "variable"),
        (23, cache / "mnist"),
    ):
        write_mnist(folder, size)
    (tmp_path / "empty").mkdir()
    assert len(load("mnist").train) == 23
    monkeypatch.setenv("LIPCERT_DATA_DIR", str(tmp_path / "variable"))
    assert len(load("mnist").train) == 22
    assert len(load("mnist", str(tmp_path / "argument")).train) == 21
    assert len(load("mnist", tmp_path / "empty").train) == 22
    monkeypatch.setenv("LIPCERT_DATA_DIR", str(tmp_path / "empty"))
    assert len(load("mnist").train) == 23


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LIPCERT_CACHE", "~/somewhere")
    assert cache_dir() == Path.home() / "somewhere"
    monkeypatch.delenv("LIPCERT_CACHE")
    assert cache_dir() == Path.home() / ".cache" / "lipcert"


def test_a_folder_with_the_name_of_a_data_set_does_not_hide_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_images(tmp_path / "digits", {"train": 1, "test": 1})
    monkeypatch.chdir(tmp_path)
    assert load("digits").input_shape == (1, 8, 8)
    assert load("./digits/").input_shape == (3, 8, 8)


def test_folders_that_do_not_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        DataError, match=r"data_dir is .*nowhere, which is not a folder"
    ):
        load("mnist", tmp_path / "nowhere")
    monkeypatch.setenv("LIPCERT_DATA_DIR", str(tmp_path / "gone"))
    with pytest.raises(
        DataError, match=r"LIPCERT_DATA_DIR is .*gone, which is not a folder"
    ):
        load("mnist")


def test_names_that_do_not_exist(tmp_path: Path) -> None:
    assert NAMES == ("digits", "mnist", "cifar10", "tiny-imagenet")
    with pytest.raises(
        OptionError,
        match=r"there is no data set 'minst', expected digits, .* did you mean 'mnist'",
    ):
        load("minst")
    with pytest.raises(
        OptionError,
        match=r"there is no data set 'zzz', expected .* or the path of images$",
    ):
        load("zzz")
    with pytest.raises(
        DataError, match=r"images/of/ants does not exist; expected a folder or archive"
    ):
        load("images/of/ants")
    (tmp_path / "table.csv").write_text("1,2")
    with pytest.raises(
        DataError, match=r"table.csv is no folder of images, no archive"
    ):
        load(tmp_path / "table.csv")
    with pytest.raises(OptionError, match="seed is -1, expected 0 or more"):
        load("digits", seed=-1)
