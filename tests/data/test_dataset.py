"""Splits and data sets: shapes, pixels, checksums, splitting by seed."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lipcert.data import Dataset, Split, load
from lipcert.data.dataset import split_by_seed, split_from_arrays
from lipcert.errors import DataError, OptionError


def random_split(count: int = 6, classes: int = 3, seed: int = 0) -> Split:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(
        256, (count, 1, 2, 3), generator=generator, dtype=torch.uint8
    )
    return Split(images, torch.arange(count) % classes)


def dataset(train: Split, test: Split, validation: Split | None = None) -> Dataset:
    return Dataset("toy", "Toy", train, test, ("a", "b", "c"), "made here", validation)


def test_pixels_are_floats_from_0_to_1() -> None:
    images = torch.tensor([0, 51, 255], dtype=torch.uint8).reshape(3, 1, 1, 1)
    split = Split(images, torch.zeros(3, dtype=torch.long))
    assert split.pixels().dtype == torch.float32
    torch.testing.assert_close(split.pixels().flatten(), torch.tensor([0.0, 0.2, 1.0]))
    torch.testing.assert_close(
        split.pixels(torch.tensor([2, 0])).flatten(), torch.tensor([1.0, 0.0])
    )
    coarse = Split(
        torch.tensor([0, 4, 16], dtype=torch.uint8).reshape(3, 1, 1, 1),
        split.labels,
        maximum=16,
    )
    torch.testing.assert_close(
        coarse.pixels(slice(1, 3)).flatten(), torch.tensor([0.25, 1.0])
    )


def test_take() -> None:
    split = random_split()
    part = split.take(torch.tensor([4, 1]))
    assert torch.equal(part.images, split.images[[4, 1]])
    assert part.labels.tolist() == [1, 1]
    assert len(part) == 2


def test_a_data_set_is_frozen_and_knows_its_shape() -> None:
    data = dataset(random_split(), random_split(3, seed=1))
    assert data.input_shape == (1, 2, 3)
    assert data.classes == 3
    assert list(data.splits) == ["train", "test"]
    with pytest.raises(FrozenInstanceError):
        data.name = "other"  # type: ignore[misc]
    assert repr(data.train) == "Split(6 images of (1, 2, 3))"


def test_the_checksum_is_that_of_the_content() -> None:
    data = dataset(random_split(), random_split(3, seed=1))
    assert data.checksum == dataset(random_split(), random_split(3, seed=1)).checksum
    noncontiguous = Split(
        random_split()
        .images.flip(3)
        .flip(3)
        .transpose(2, 3)
        .contiguous()
        .transpose(2, 3),
        data.train.labels,
    )
    assert not noncontiguous.images.is_contiguous()
    assert dataset(noncontiguous, data.test).checksum == data.checksum
    other_pixel, other_label = data.train.images.clone(), data.train.labels.clone()
    other_pixel[0, 0, 0, 0] ^= 1
    other_label[0] = 1
    others = [
        dataset(Split(other_pixel, data.train.labels), data.test),
        dataset(Split(data.train.images, other_label), data.test),
        dataset(Split(data.train.images, data.train.labels, maximum=16), data.test),
        dataset(data.test, data.train),
        dataset(data.train, data.test, data.test),
    ]
    assert len({data.checksum, *(other.checksum for other in others)}) == 6


def test_arrays_of_numpy_are_not_aliased_when_read_only() -> None:
    read_only = np.frombuffer(bytes(range(24)), np.uint8).reshape(4, 1, 2, 3)
    split = split_from_arrays(read_only, np.array([0, 1, 0, 1], np.uint8))
    split.images[0] = 7
    assert read_only[0, 0, 0, 0] == 0
    assert split.labels.dtype == torch.int64


@given(
    st.integers(2, 60), st.integers(1, 5), st.integers(0, 100), st.floats(0.01, 0.99)
)
def test_a_split_by_seed_is_a_partition_with_every_class_on_both_sides(
    per_class: int, classes: int, seed: int, fraction: float
) -> None:
    count = per_class * classes
    images = torch.arange(count).to(torch.uint8).reshape(count, 1, 1, 1)
    whole = Split(images, torch.arange(count) % classes)
    train, test = split_by_seed(whole, seed, fraction)
    seen = torch.cat([train.images.flatten(), test.images.flatten()])
    assert torch.equal(seen.sort().values, images.flatten().sort().values)
    counts = torch.bincount(test.labels, minlength=classes)
    assert bool(
        (counts == min(max(round(fraction * per_class), 1), per_class - 1)).all()
    )
    again = split_by_seed(whole, seed, fraction)
    assert torch.equal(again[0].images, train.images)


def test_another_seed_is_another_split() -> None:
    whole = random_split(60)
    assert not torch.equal(
        split_by_seed(whole, 0)[1].images, split_by_seed(whole, 1)[1].images
    )


def test_errors() -> None:
    images, labels = (
        torch.zeros(2, 1, 2, 2, dtype=torch.uint8),
        torch.zeros(2, dtype=torch.long),
    )
    with pytest.raises(
        DataError,
        match=r"images: expected uint8 or float32 \(N, C, H, W\), got torch.float64",
    ):
        Split(images.double(), labels)
    with pytest.raises(DataError, match=r"images: expected .* got torch.uint8 \(2,\)"):
        Split(images[:, 0, 0, 0], labels)
    with pytest.raises(
        DataError, match=r"labels: expected int64 \(2,\), got torch.int64 \(1,\)"
    ):
        Split(images, labels[:1])
    with pytest.raises(
        DataError, match="Toy: a label of the test split is 3, expected 0 to 2"
    ):
        dataset(random_split(), random_split(4, classes=4))
    with pytest.raises(
        DataError, match="Toy: a label of the train split is -1, expected 0 to 2"
    ):
        dataset(Split(images, labels - 1), random_split())
    with pytest.raises(DataError, match="class 2 has a single image"):
        split_by_seed(random_split(5), 0)
    with pytest.raises(OptionError, match="seed is -1"):
        split_by_seed(random_split(), -1)


def test_images_kept_aside_for_validation_are_in_neither_of_the_other_splits():
    digits = load("digits")
    held = digits.holding_out(300)
    assert held.validation is not None
    assert abs(len(held.validation) - 300) <= 10
    assert len(held.train) + len(held.validation) == len(digits.train)
    assert torch.equal(held.test.images, digits.test.images)
    counts = held.validation.labels.bincount()
    assert counts.max() - counts.min() <= 3
    assert torch.equal(
        digits.holding_out(300).validation.images, held.validation.images
    )
    assert digits.holding_out(0) is digits
    with pytest.raises(OptionError, match="validation is 5000, expected less than the"):
        digits.holding_out(5000)
