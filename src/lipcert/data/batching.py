"""Batches whose order depends only on a seed and an epoch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lipcert.errors import DataError, OptionError


def batches(
    images: Tensor,
    labels: Tensor,
    batch_size: int,
    *,
    shuffle: bool = True,
    seed: int = 0,
    epoch: int = 0,
    classes_per_batch: int | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Images and labels, batch by batch: the batches of `batch_indices`."""
    if len(images) != len(labels):
        raise DataError(f"{len(images):,} images have {len(labels):,} labels")
    indices = batch_indices(
        labels, batch_size, shuffle=shuffle, seed=seed, epoch=epoch, classes_per_batch=classes_per_batch
    )
    return ((images[index], labels[index]) for index in indices)


def batch_indices(
    labels: Tensor,
    batch_size: int,
    *,
    shuffle: bool = True,
    seed: int = 0,
    epoch: int = 0,
    classes_per_batch: int | None = None,
) -> list[Tensor]:
    """The indices of every batch of an epoch: each sample once, the last partial batch kept.

    They depend only on the labels, the options, the seed and the epoch, so that any process can recompute them, skip
    batches that are done, or take its share of each.

    Args:
        labels: (N,).
        batch_size: samples per batch.
        shuffle: a new order every epoch, or the order of the samples.
        classes_per_batch: at most so many classes in a batch, so that fewer pairs of classes need a constant
            (par:reduceTimeComplexity). The classes with the most samples left come first, which keeps all but the last
            few batches full. None for no limit.
    """
    _check(labels, batch_size, seed, epoch)
    if classes_per_batch is not None and (classes_per_batch < 1 or not shuffle):
        remedy = "1 or more" if shuffle else "None without shuffle, which keeps the order of the samples"
        raise OptionError(f"classes_per_batch is {classes_per_batch}, expected {remedy}")
    generator = np.random.default_rng((seed, epoch))
    if classes_per_batch is not None:
        order = _class_batches(labels.cpu().numpy(), batch_size, classes_per_batch, generator)
        return [torch.from_numpy(index) for index in order]
    index = generator.permutation(len(labels)) if shuffle else np.arange(len(labels))
    return list(torch.split(torch.from_numpy(index), batch_size))


def _class_batches(
    labels: NDArray[np.integer], batch_size: int, limit: int, generator: np.random.Generator
) -> list[NDArray[np.int64]]:
    members = [generator.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    left = np.array([len(indices) for indices in members])
    order = []
    while left.any():
        ties = generator.permutation(len(left))
        chosen = ties[np.argsort(-left[ties], kind="stable")][:limit]
        size = min(batch_size, int(left[chosen].sum()))
        counts = generator.multivariate_hypergeometric(left[chosen], size, method="marginals")
        batch = [members[c][left[c] - n : left[c]] for c, n in zip(chosen, counts, strict=True)]
        left[chosen] -= counts
        order.append(generator.permutation(np.concatenate(batch)))
    return order


def _check(labels: Tensor, batch_size: int, seed: int, epoch: int) -> None:
    if labels.ndim != 1 or len(labels) == 0:
        raise DataError(f"labels: expected (N,), not empty, got {tuple(labels.shape)}")
    if batch_size < 1:
        raise OptionError(f"batch_size is {batch_size}, expected 1 or more")
    for name, value in (("seed", seed), ("epoch", epoch)):
        if value < 0:
            raise OptionError(f"{name} is {value}, expected 0 or more")
