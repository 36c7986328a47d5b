"""Batches: every sample once, an order that depends on seed and epoch only, at most k classes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lipcert.data import batch_indices
from lipcert.errors import DataError, OptionError


@given(
    labels=st.lists(st.integers(0, 6), min_size=1, max_size=80),
    batch_size=st.integers(1, 30),
    limit=st.none() | st.integers(1, 8),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 10),
)
def test_every_sample_comes_once(
    labels: list[int], batch_size: int, limit: int | None, seed: int, epoch: int
) -> None:
    targets = torch.tensor(labels)
    indices = batch_indices(
        targets, batch_size, seed=seed, epoch=epoch, classes_per_batch=limit
    )
    assert torch.cat(indices).sort().values.tolist() == list(range(len(labels)))
    assert all(1 <= len(index) <= batch_size for index in indices)
    if limit is None:
        assert all(len(index) == batch_size for index in indices[:-1])
    else:
        assert all(len(targets[index].unique()) <= limit for index in indices)
    again = batch_indices(
        targets, batch_size, seed=seed, epoch=epoch, classes_per_batch=limit
    )
    assert all(torch.equal(a, b) for a, b in zip(indices, again, strict=True))


@pytest.mark.parametrize("limit", [None, 3])
def test_seed_and_epoch_change_the_order_and_torchs_random_numbers_do_not(
    limit: int | None,
) -> None:
    labels = torch.arange(200) % 10

    def order(seed: int, epoch: int) -> list[int]:
        return torch.cat(
            batch_indices(labels, 16, seed=seed, epoch=epoch, classes_per_batch=limit)
        ).tolist()

    reference = order(1, 2)
    torch.manual_seed(99)
    assert order(1, 2) == reference
    assert order(1, 3) != reference
    assert order(2, 2) != reference
    assert order(2, 1) != reference


def test_the_order_of_a_seed_is_fixed() -> None:
    """A changed order would silently change every run that is resumed or repeated."""
    assert torch.cat(batch_indices(torch.zeros(8), 3, seed=3, epoch=5)).tolist() == [
        4,
        0,
        2,
        6,
        5,
        1,
        3,
        7,
    ]


def test_class_subsets_leave_few_partial_batches_and_mix_classes() -> None:
    """200 classes as in Tiny-ImageNet: all batches but the last few are full and use the classes allowed."""
    labels = torch.arange(20_000) % 200
    indices = batch_indices(labels, 256, classes_per_batch=32)
    partial = [len(index) for index in indices if len(index) < 256]
    assert len(indices) <= 20_000 / 256 + 10
    assert len(partial) <= 12
    assert all(
        28 <= len(labels[index].unique()) <= 32 for index in indices[: -len(partial)]
    )
    companions = {
        int(c)
        for index in indices
        if 0 in labels[index]
        for c in labels[index].unique()
    }
    assert len(companions) > 100
    first = [
        set(
            labels[
                batch_indices(labels, 256, epoch=e, classes_per_batch=32)[0]
            ].tolist()
        )
        for e in range(3)
    ]
    assert all(len(first[i] & first[j]) < 16 for i in range(3) for j in range(i))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0, expected 1 or more"),
        ({"seed": -1}, "seed is -1, expected 0 or more"),
        ({"epoch": -1}, "epoch is -1, expected 0 or more"),
        ({"classes_per_batch": 0}, "classes_per_batch is 0, expected 1 or more"),
    ],
)
def test_bad_options(options: dict[str, int], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        batch_indices(torch.zeros(4), **{"batch_size": 2, **options})


def test_bad_labels() -> None:
    with pytest.raises(
        DataError, match=r"labels: expected \(N,\), not empty, got \(0,\)"
    ):
        batch_indices(torch.zeros(0), 2)
    with pytest.raises(
        DataError, match=r"labels: expected \(N,\), not empty, got \(2, 2\)"
    ):
        batch_indices(torch.zeros(2, 2), 2)
