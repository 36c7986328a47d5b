"""MNIST from idx files."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from makers import idx_bytes, write_mnist

from lipcert.data import load
from lipcert.data.download import Remote
from lipcert.data.sources import SOURCES
from lipcert.data.sources.mnist import Mnist
from lipcert.errors import DataError


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("folder", ["", "mnist", "MNIST/raw"])
def test_idx_files(tmp_path: Path, packed: bool, folder: str) -> None:
    write_mnist(tmp_path / "data" / folder, packed=packed)
    data = load("mnist", tmp_path / "data")
    assert data.name == "mnist"
    assert data.title == "MNIST (a part: 20 and 10 images)"
    assert data.input_shape == (1, 28, 28)
    assert (len(data.train), len(data.test), data.classes) == (20, 10, 10)
    expected = np.random.default_rng(0).integers(0, 256, (20, 28, 28), np.uint8)
    assert torch.equal(data.train.images[:, 0], torch.from_numpy(expected))
    assert data.train.labels.tolist() == [*range(10), *range(10)]


def test_the_checksum_does_not_depend_on_the_compression(tmp_path: Path) -> None:
    write_mnist(tmp_path / "a", packed=True)
    write_mnist(tmp_path / "b", packed=False)
    assert (
        load("mnist", tmp_path / "a").checksum == load("mnist", tmp_path / "b").checksum
    )


def test_names_with_a_dot(tmp_path: Path) -> None:
    for name, path in write_mnist(tmp_path, packed=False).items():
        path.rename(tmp_path / name.replace("-idx", ".idx"))
    assert len(load("mnist", tmp_path).train) == 20


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (IMAGES, lambda c: gzip.compress(c)[:-20], r"truncated or not a gzip file"),
        (
            IMAGES,
            lambda c: gzip.compress(c)[:30] + b"0" * 50,
            r"truncated or not a gzip file",
        ),
        (
            IMAGES,
            lambda c: c[:-1],
            r"has 15,695 bytes, expected 15,696 for \(20, 28, 28\)",
        ),
        (IMAGES, lambda c: c + b"x", r"has 15,697 bytes, expected 15,696"),
        (IMAGES, lambda c: c[:7], r"has 7 bytes, expected 16 for"),
        (
            IMAGES,
            lambda c: b"",
            r"is not an idx file: it begins with , expected 00000803",
        ),
        (
            IMAGES,
            lambda c: b"\x89PNG" + c[4:],
            r"is not an idx file: it begins with 89504e47, expected 00000803",
        ),
        (
            IMAGES,
            lambda c: idx_bytes(np.zeros(20, np.uint8)),
            r"begins with 00000801, expected 00000803",
        ),
        (
            IMAGES,
            lambda c: idx_bytes(np.zeros((20, 8, 8), np.uint8)),
            r"images of \(20, 8, 8\), expected \(N, 28, 28\)",
        ),
        (
            LABELS,
            lambda c: idx_bytes(np.zeros(19, np.uint8)),
            r"has 19 labels for 20 images",
        ),
        (
            LABELS,
            lambda c: idx_bytes(np.full(20, 10, np.uint8)),
            r"has the label 10, expected 0 to 9",
        ),
    ],
)
def test_wrong_files_are_refused_by_name(
    tmp_path: Path, name: str, change: Callable[[bytes], bytes], message: str
) -> None:
    path = write_mnist(tmp_path, packed=False)[name]
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=rf"{name}.* {message}|{name} {message}"):
        load("mnist", tmp_path)


def test_another_data_set_under_the_names_of_mnist_is_refused(tmp_path: Path) -> None:
    """As Fashion-MNIST would be: the right size, another content."""
    write_mnist(tmp_path, 60_000, 10, packed=False)
    with pytest.raises(
        DataError,
        match=r"train-images-idx3-ubyte is not the file of MNIST: .* another SHA-256",
    ):
        load("mnist", tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    write_mnist(tmp_path)["t10k-labels-idx1-ubyte"].unlink()
    with pytest.raises(
        DataError,
        match=r"lacks t10k-labels-idx1-ubyte of MNIST \(or the same with .gz\)",
    ):
        load("mnist", tmp_path)


def remotes(folder: Path) -> tuple[Remote, ...]:
    """Tiny MNIST files as addresses with their checksums."""
    paths = write_mnist(folder).values()
    return tuple(
        Remote(
            path.name, hashlib.sha256(path.read_bytes()).hexdigest(), (path.as_uri(),)
        )
        for path in paths
    )


def serve(monkeypatch: pytest.MonkeyPatch, files: tuple[Remote, ...]) -> None:
    monkeypatch.setattr(SOURCES["mnist"], "remotes", files)


def test_download_into_the_cache_once(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(monkeypatch, remotes(tmp_path / "remote"))
    data = load("mnist")
    assert len(data.train) == 20
    assert len(list((cache / "mnist").iterdir())) == 4
    serve(monkeypatch, ())
    assert load("mnist").checksum == data.checksum


def test_an_interrupted_download_goes_on(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(monkeypatch, remotes(tmp_path / "remote"))
    load("mnist")
    (cache / "mnist" / "t10k-images-idx3-ubyte.gz").unlink()
    with pytest.raises(DataError, match="lacks t10k-images-idx3-ubyte"):
        load("mnist", download=False)
    assert len(load("mnist").test) == 10


def test_nothing_found_says_what_to_put_where(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError) as caught:
        load("mnist", tmp_path / "empty")
    message = str(caught.value)
    assert (
        f"MNIST was not found in {tmp_path / 'empty'}, {cache}: train-images-idx3-ubyte.gz could not be"
        in message
    )
    assert "no network in tests" in message
    assert (
        f"t10k-labels-idx1-ubyte.gz into {cache / 'mnist'}, or into a folder given as data_dir"
        in message
    )
    with pytest.raises(DataError, match="downloading is switched off"):
        load("mnist", tmp_path / "empty", download=False)


def test_the_canonical_addresses() -> None:
    assert [remote.file for remote in Mnist.remotes] == [
        "train-images-idx3-ubyte.gz",
        "train-labels-idx1-ubyte.gz",
        "t10k-images-idx3-ubyte.gz",
        "t10k-labels-idx1-ubyte.gz",
    ]
    assert all(
        url.startswith("https://") for remote in Mnist.remotes for url in remote.urls
    )


@pytest.mark.data
def test_the_real_one() -> None:
    data = load("mnist", download=False)
    assert data.title == "MNIST"
    assert (len(data.train), len(data.test)) == (60_000, 10_000)
    assert data.test.labels[:5].tolist() == [7, 2, 1, 0, 4]
    assert torch.bincount(data.test.labels).tolist() == [
        980,
        1135,
        1032,
        1010,
        982,
        892,
        958,
        1028,
        974,
        1009,
    ]
    assert data.train.pixels().mean().item() == pytest.approx(0.1307, abs=1e-4)
