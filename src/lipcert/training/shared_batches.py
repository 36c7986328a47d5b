"""The batches of a run, augmented and divided among its processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lipcert.data import Augmentation, Dataset, batch_indices
from lipcert.training.config import TrainConfig

if TYPE_CHECKING:
    from lightning_fabric import Fabric


class Asked(Protocol):
    """A teacher."""

    def probabilities(self, x: Tensor) -> Tensor:
        """How probable the classes of inputs are, (B, K)."""


@dataclass(frozen=True)
class Share:
    """What a process has of a global batch.

    labels: of images that are mixed, those of the larger part.
    targets: what the loss is to reach: the labels, or probabilities (B, K).
    count: how many of the inputs count; 0 if there are too few for all processes.
    """

    x: Tensor
    labels: Tensor
    targets: Tensor
    count: int


class SharedBatches:
    """Every process takes every n-th sample of each global batch."""

    def __init__(
        self,
        fabric: Fabric,
        config: TrainConfig,
        dataset: Dataset,
        memory_format: torch.memory_format,
        teacher: Asked | None = None,
    ) -> None:
        self._fabric, self._config, self._train = fabric, config, dataset.train
        self._memory_format, self._teacher = memory_format, teacher
        moves = config.augmentation.model_dump(exclude={"mix"})
        self._augment = Augmentation(**moves)
        self._classes = dataset.classes

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
        labels = targets = self._train.labels[index]
        if self._config.augmentation.mix:
            images, targets = self._mixed(images, labels, generator)
        mine = slice(self._fabric.global_rank, None, self._fabric.world_size)
        count = len(index[mine])
        # Every process has to take part in the averaging, with one input whose loss has
        # the weight 0.
        if count == 0:
            mine = slice(0, 1)
        own = images[mine], labels[mine], targets[mine]
        x, labels, targets = self._fabric.to_device(own)
        x = x.contiguous(memory_format=self._memory_format)
        if self._teacher is not None:
            targets = self._teacher.probabilities(x)
        return Share(x, labels, targets, count)

    def _mixed(
        self, images: Tensor, labels: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """(1 − s)·image + s·another image of the batch, with s between 0 and `mix`, and the classes' shares in it."""
        others = torch.randperm(len(images), generator=generator)
        drawn = torch.rand(len(images), 1, generator=generator)
        share = self._config.augmentation.mix * drawn
        classes = F.one_hot(labels, self._classes).float()
        of_images = share[:, :, None, None]
        mixed = (1 - of_images) * images + of_images * images[others]
        return mixed, (1 - share) * classes + share * classes[others]


def seed_of(*key: int) -> int:
    """A seed for the generators of torch, which take 63 bits, from some numbers."""
    state = np.random.SeedSequence(key).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))
