"""Batches whose order depends only on a seed and an epoch."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lipcert.errors import DataError, OptionError


def batch_indices(
    labels: Tensor,
    batch_size: int,
    *,
    seed: int = 0,
    epoch: int = 0,
    classes_per_batch: int | None = None,
) -> list[Tensor]:
    """The indices of every batch of an epoch: each sample once, the last partial batch kept.

    They depend only on the labels, the options, the seed and the epoch, so that any
    process can recompute them, skip batches that are done, or take its share of each.

    Args:
        labels: (N,).
        batch_size: samples per batch.
        classes_per_batch: at most so many classes in a batch, so that fewer pairs of classes need a constant
            (par:reduceTimeComplexity). The classes with the most samples left come first, which keeps all but the last
            few batches full. None for no limit.
    """
    if labels.ndim != 1 or len(labels) == 0:
        raise DataError(f"labels: expected (N,), not empty, got {tuple(labels.shape)}")
    if batch_size < 1:
        raise OptionError(f"batch_size is {batch_size}, expected 1 or more")
    for name, value in (("seed", seed), ("epoch", epoch)):
        if value < 0:
            raise OptionError(f"{name} is {value}, expected 0 or more")
    # numpy's, whose streams do not depend on the version of torch.
    generator = np.random.default_rng((seed, epoch))
    if classes_per_batch is None:
        order = torch.from_numpy(generator.permutation(len(labels)))
        return list(torch.split(order, batch_size))
    if classes_per_batch < 1:
        raise OptionError(
            f"classes_per_batch is {classes_per_batch}, expected 1 or more"
        )
    return _class_batches(
        labels.cpu().numpy(), batch_size, classes_per_batch, generator
    )


def _class_batches(
    labels: NDArray[np.integer],
    batch_size: int,
    limit: int,
    generator: np.random.Generator,
) -> list[Tensor]:
    members = []
    for label in np.unique(labels):
        members.append(generator.permutation(np.flatnonzero(labels == label)))
    left = np.array(list(map(len, members)))
    batches = []
    while left.any():
        # Shuffled first and sorted stably: classes with equally many samples left take
        # turns at random.
        ties = generator.permutation(len(left))
        chosen = ties[np.argsort(-left[ties], kind="stable")][:limit]
        size = min(batch_size, int(left[chosen].sum()))
        # As if the batch were drawn without replacement from all samples of these
        # classes.
        counts = generator.multivariate_hypergeometric(
            left[chosen], size, method="marginals"
        )
        batch = []
        for label, count in zip(chosen, counts, strict=True):
            # Taken from the end: the first left[label] members are those that are left.
            batch.append(members[label][left[label] - count : left[label]])
        left[chosen] -= counts
        batches.append(torch.from_numpy(generator.permutation(np.concatenate(batch))))
    return batches
