"""The batches of a run, augmented and divided among its processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lipcert.data import Augmentation, Split, batch_indices
from lipcert.training.config import TrainConfig

if TYPE_CHECKING:
    from lightning_fabric import Fabric


@dataclass(frozen=True)
class Share:
    """What a process has of a global batch.

    targets: what the loss is to reach: the labels, or a teacher's probabilities (B, K).
    count: how many of the inputs count; 0 if there are too few for all processes.
    """

    x: Tensor
    labels: Tensor
    targets: Tensor
    count: int


class SharedBatches:
    """Every process takes every n-th sample of each global batch.

    probabilities: (N, K), what a teacher says of the training inputs, if there is one.
    """

    def __init__(
        self,
        fabric: Fabric,
        config: TrainConfig,
        train: Split,
        memory_format: torch.memory_format,
        probabilities: Tensor | None = None,
    ) -> None:
        self._fabric, self._config, self._train = fabric, config, train
        self._memory_format = memory_format
        self._targets = train.labels if probabilities is None else probabilities
        self._augment = Augmentation(**config.augmentation.model_dump())

    def indices(self, epoch: int) -> list[Tensor]:
        """The indices of the global batches of an epoch."""
        config, labels = self._config, self._train.labels
        limit = config.classes_per_batch or None
        where = {"seed": config.seed, "epoch": epoch}
        return batch_indices(
            labels, config.batch_size, **where, classes_per_batch=limit
        )

    def share(self, index: Tensor, epoch: int, step: int) -> Share:
        """This process's part of a global batch.

        The whole batch is augmented before it is shared, so that every sample moves
        alike on any number of processes.
        """
        seed = seed_of(self._config.seed, epoch, step)
        generator = torch.Generator().manual_seed(seed)
        images = self._augment(self._train.pixels(index), generator)
        mine = slice(self._fabric.global_rank, None, self._fabric.world_size)
        count = len(index[mine])
        # Every process has to take part in the averaging, with one input whose loss has
        # the weight 0.
        if count == 0:
            mine = slice(0, 1)
        labels = self._train.labels[index[mine]]
        targets = self._targets[index[mine]]
        x, labels, targets = self._fabric.to_device((images[mine], labels, targets))
        x = x.contiguous(memory_format=self._memory_format)
        return Share(x, labels, targets, count)


def seed_of(*key: int) -> int:
    """A seed for the generators of torch, which take 63 bits, from some numbers."""
    state = np.random.SeedSequence(key).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))
