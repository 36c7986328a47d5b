"""CIFAR-10 from batches and images."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from makers import (
    CIFAR10,
    cifar10_arrays,
    image_bytes,
    pack,
    random_pixels,
    write_cifar10_binary,
    write_cifar10_python,
    write_images,
)

from lipcert.data import load
from lipcert.data.sources.cifar10 import Cifar10, parse_binary_batch, parse_python_batch
from lipcert.errors import DataError


@pytest.mark.parametrize("kind", ["python", "binary"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("parent", ["", "cifar10"])
def test_batches(tmp_path: Path, kind: str, packed: bool, parent: str) -> None:
    folder = tmp_path / "data" / parent
    batches = (
        folder if not packed else tmp_path
    ) / f"cifar-10-batches-{'py' if kind == 'python' else 'bin'}"
    write_cifar10_python(batches) if kind == "python" else write_cifar10_binary(batches)
    if packed:
        folder.mkdir(parents=True)
        pack(batches, folder / f"cifar-10-{kind}.tar.gz", top=batches.name)
    for _ in range(2):  # the second time from the cache, if packed
        data = load("cifar10", tmp_path / "data")
        assert data.title == "CIFAR-10 (a part: 15 and 3 images)"
        assert data.class_names == CIFAR10
        assert data.input_shape == (3, 32, 32)
        rows, labels = cifar10_arrays(seed=1)
        assert torch.equal(
            data.train.images[3:6], torch.from_numpy(rows.reshape(3, 3, 32, 32))
        )
        assert data.train.labels[3:6].tolist() == labels
        assert data.test.labels.tolist() == cifar10_arrays(seed=5)[1]


def test_the_checksum_does_not_depend_on_the_form(tmp_path: Path) -> None:
    write_cifar10_python(tmp_path / "a")
    write_cifar10_binary(tmp_path / "b")
    assert (
        load("cifar10", tmp_path / "a").checksum
        == load("cifar10", tmp_path / "b").checksum
    )


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_images(tmp_path: Path, packed: bool, kind: str) -> None:
    folder = tmp_path / "data" / "cifar10-jpeg"
    target = folder if not packed else tmp_path / "unpacked"
    write_images(target, {"train": 2, "test": 1}, CIFAR10, shape=(32, 32, 3), kind=kind)
    if packed:
        folder.mkdir(parents=True)
        pack(target, folder / "cifar10-images.tar.xz")
    for _ in range(2):
        data = load("cifar10", tmp_path / "data")
        assert data.title == f"CIFAR-10 ({kind}, a part: 20 and 10 images)"
        assert data.train.labels.tolist() == [
            label for label in range(10) for _ in range(2)
        ]
        if kind == "PNG":
            expected = random_pixels((32, 32, 3), seed=301)
            assert torch.equal(
                data.train.images[7].permute(1, 2, 0), torch.from_numpy(expected)
            )


def test_batches_are_preferred_to_images(tmp_path: Path) -> None:
    write_cifar10_binary(tmp_path / "cifar-10-batches-bin")
    write_images(
        tmp_path / "cifar10-jpeg", {"train": 1, "test": 1}, CIFAR10, shape=(32, 32, 3)
    )
    assert load("cifar10", tmp_path).note == "binary batches"


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4])
def test_pickles_of_every_protocol(protocol: int) -> None:
    rows, labels = cifar10_arrays()
    content = pickle.dumps({b"data": rows, b"labels": labels}, protocol)
    parsed_rows, parsed_labels = parse_python_batch(content, "data_batch_1")
    assert np.array_equal(parsed_rows, rows)
    assert parsed_labels.tolist() == labels


def test_a_pickle_as_python_2_wrote_it() -> None:
    """Protocol 2 with byte strings: what the canonical files are."""
    pixels = bytes(range(256)) * 12
    content = (
        b"\x80\x02}q\x01(U\x06labelsq\x02]q\x03K\x06aU\x04dataq\x04cnumpy.core.multiarray\n_reconstruct\nq\x05"
        b"cnumpy\nndarray\nq\x06K\x00\x85U\x01b\x87Rq\x07(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nq\x08U\x02u1K\x00K\x01"
        b"\x87Rq\x09(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T\x00\x0c\x00\x00"
        + pixels
        + b"tbu."
    )
    rows, labels = parse_python_batch(content, "data_batch_1")
    assert rows.tobytes() == pixels
    assert labels.tolist() == [6]


class Evil:
    """Runs a command when it is unpickled the usual way."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.target}",)


def test_a_pickle_that_runs_code_is_refused_and_does_not_run(tmp_path: Path) -> None:
    write_cifar10_python(tmp_path)
    rows, labels = cifar10_arrays()
    content = pickle.dumps(
        {b"data": rows, b"labels": labels, b"x": Evil(tmp_path / "ran")}, 2
    )
    (tmp_path / "data_batch_3").write_bytes(content)
    with pytest.raises(
        DataError, match=r"data_batch_3 names posix.system, which no data file needs"
    ):
        load("cifar10", tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is truncated or not a pickle"),
        (b"<html>", "is truncated or not a pickle"),
        (
            pickle.dumps({b"data": cifar10_arrays()[0], b"labels": [1, 2, 3]}, 2)[
                :-2000
            ],
            "is truncated or not a pickle",
        ),
        (pickle.dumps([1, 2]), "holds a list, expected a dictionary"),
        (pickle.dumps({b"labels": [1]}), r"has no data of uint8 \(N, 3072\)"),
        (
            pickle.dumps({b"data": np.zeros((1, 3072)), b"labels": [1]}, 2),
            r"has no data of uint8 \(N, 3072\)",
        ),
        (
            pickle.dumps({b"data": np.zeros((1, 768), np.uint8), b"labels": [1]}, 2),
            r"has no data of uint8",
        ),
        (pickle.dumps({b"data": cifar10_arrays()[0]}, 2), "has no labels from 0 to 9"),
        (
            pickle.dumps({b"data": cifar10_arrays()[0], b"labels": [1, 2, 10]}, 2),
            "has no labels from 0 to 9",
        ),
        (
            pickle.dumps({b"data": cifar10_arrays()[0], b"labels": [1, 2]}, 2),
            "has 2 labels for 3 images",
        ),
        (
            pickle.dumps({b"data": np.zeros((0, 3072), np.uint8), b"labels": []}, 3),
            "has 0 labels for 0 images",
        ),
        (
            b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x05\x85U\x01b\x87R.",
            "not a pickle",
        ),
        (
            b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00rot13\x86R.",
            "not a pickle",
        ),
        (b"\x80\x02X\x01\x00\x00\x00aQ.", "refers to an object outside of the file"),
    ],
)
def test_wrong_python_batches(content: bytes, message: str) -> None:
    with pytest.raises(
        DataError,
        match=f"folder/data_batch_1 {message}|folder/data_batch_1 is .*{message}",
    ):
        parse_python_batch(content, "folder/data_batch_1")


def test_a_whole_batch_has_to_be_the_canonical_one() -> None:
    rows, labels = cifar10_arrays(10_000)
    content = pickle.dumps({b"data": rows, b"labels": labels}, 2)
    with pytest.raises(
        DataError,
        match=r"test_batch is not the batch of CIFAR-10: .* another MD5 than 40351d58",
    ):
        parse_python_batch(content, "test_batch")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"has 0 bytes, expected a multiple of 3,073"),
        (bytes(3072), r"has 3,072 bytes, expected a multiple of 3,073"),
        (b"\x0a" + bytes(3072), "has the label 10, expected 0 to 9"),
    ],
)
def test_wrong_binary_batches(content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=f"data_batch_1.bin {message}"):
        parse_binary_batch(content, "data_batch_1.bin")


def test_missing_batches_are_named(tmp_path: Path) -> None:
    write_cifar10_python(tmp_path)
    (tmp_path / "data_batch_4").unlink()
    (tmp_path / "test_batch").unlink()
    with pytest.raises(DataError, match="lacks data_batch_4, test_batch of CIFAR-10"):
        load("cifar10", tmp_path)


def test_images_that_are_not_cifar10(tmp_path: Path) -> None:
    write_images(
        tmp_path / "small", {"train": 1, "test": 1}, CIFAR10, shape=(16, 16, 3)
    )
    with pytest.raises(
        DataError,
        match=r"is not CIFAR-10: its images are \(3, 16, 16\), expected \(3, 32, 32\)",
    ):
        load("cifar10", tmp_path / "small")
    write_images(tmp_path / "untested", {"train": 1}, CIFAR10, shape=(32, 32, 3))
    with pytest.raises(
        DataError,
        match="is not CIFAR-10: expected train/ and test/ with the classes airplane",
    ):
        load("cifar10", tmp_path / "untested")
    write_images(tmp_path / "other", {"train": 1, "test": 1})
    pack(tmp_path / "other", tmp_path / "cifar.tar")
    with pytest.raises(DataError, match="is not CIFAR-10: expected train/ and test/"):
        load("cifar10", tmp_path)


def test_several_archives_are_ambiguous(tmp_path: Path) -> None:
    for name in ("cifar-a.tar.xz", "cifar-b.tar.xz"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(
        DataError,
        match=r"holds several archives, cifar-a.tar.xz, cifar-b.tar.xz; keep one",
    ):
        load("cifar10", tmp_path)


def test_a_broken_image_is_named_and_nothing_is_cached(
    tmp_path: Path, cache: Path
) -> None:
    write_images(tmp_path / "data", {"train": 1, "test": 1}, CIFAR10, shape=(32, 32, 3))
    broken = tmp_path / "data" / "test" / "dog" / "0.png"
    broken.write_bytes(image_bytes(random_pixels((32, 32, 3)))[:-500])
    with pytest.raises(
        DataError,
        match=r"test/dog/0.png is truncated or not an image; replace or remove it",
    ):
        load("cifar10", tmp_path / "data")
    assert not cache.exists()


def test_the_canonical_address() -> None:
    (remote,) = Cifar10.remotes
    assert remote.urls == ("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",)


@pytest.mark.data
def test_the_real_one_as_jpeg() -> None:
    data = load("cifar10", download=False)
    assert data.title == "CIFAR-10 (JPEG)"
    assert (len(data.train), len(data.test)) == (50_000, 10_000)
    assert torch.bincount(data.train.labels).tolist() == [5000] * 10
    means = data.train.pixels().mean((0, 2, 3))
    torch.testing.assert_close(
        means, torch.tensor([0.4914, 0.4822, 0.4465]), atol=2e-3, rtol=0
    )
