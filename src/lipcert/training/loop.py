"""The training loop: one step after the other, on one process or many, from any checkpoint."""

from __future__ import annotations

import time
from collections import defaultdict
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from lipcert.data import Dataset, augmentation, batch_indices
from lipcert.errors import DivergenceError, NonFiniteError
from lipcert.progress import Progress
from lipcert.training.checkpoint import Parts, Position, read_checkpoint, write_checkpoint
from lipcert.training.config import TrainConfig
from lipcert.training.monitor import MetricsLog, estimate_accuracies, mean_constants, spread, synchronise
from lipcert.training.objective import Prepared, build_estimators, has_convolutions, objective
from lipcert.training.optimizers import build_optimizers
from lipcert.training.schedule import learning_rate

if TYPE_CHECKING:
    from lightning_fabric import Fabric

CHECKPOINT = "checkpoint.safetensors"
_TOLERANCE = 1e-3


class Training:
    """A run in its folder, at its last checkpoint if there is one.

    Every process has the whole model and the same constants and takes every n-th sample of each global batch. Its loss
    is weighted such that the averaged gradient is that of the mean loss over the global batch.
    """

    def __init__(
        self, fabric: Fabric, config: TrainConfig, digest: str, dataset: Dataset, folder: Path, prepared: Prepared
    ) -> None:
        self.fabric, self.config, self.digest, self.dataset = fabric, config, digest, dataset
        self.path = folder / CHECKPOINT
        self.model = prepared.model
        self.channels_last = has_convolutions(self.model)
        self.estimators = build_estimators(config, prepared)
        self.scales = list(self.estimators["estimator"].parameters())
        optimizers = build_optimizers(config, self.model, self.scales)
        self.forward, *self.optimizers = fabric.setup(self.model, *optimizers)
        self.parts = Parts(self.model, optimizers, self.estimators)
        self.augment = augmentation(**config.augmentation.model_dump())
        self.position = Position()
        found = read_checkpoint(self.path, digest) if fabric.is_global_zero and self.path.exists() else None
        found = fabric.broadcast(found)
        self.fresh = found is None
        if found is not None:
            tensors, self.position = found
            self.parts.restore(tensors, self.path)
        self.log = MetricsLog(folder, self.position.epoch, config.tensorboard, writes=fabric.is_global_zero)
        self.saved_at = time.monotonic()

    def run(self, progress: Progress) -> None:
        """Train to the last epoch."""
        config = self.config
        if self.fresh:
            self.save(self.position)
        for epoch in range(self.position.epoch, config.epochs):
            began = time.perf_counter()
            lr = learning_rate(config.schedule, epoch, config.epochs)
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = lr * group["pace"]
            batches = self.batches(epoch)
            steps = len(batches)
            sums = defaultdict(float, self.position.sums if self.fabric.is_global_zero else {})
            first = self.position.step if epoch == self.position.epoch else 0
            self.forward.train()
            synchronise(self.fabric, self.estimators)
            for step in range(first, steps):
                self.step(batches[step], epoch, step, lr, sums)
                if step + 1 < steps:
                    progress("training", (epoch + (step + 1) / steps) / config.epochs, self.figures(epoch, sums))
                    if self.checkpoint_is_due():
                        self.save(Position(epoch, step + 1, self.total(sums)))
            self.log.append(self.measure(epoch, lr, self.total(sums), began))
            self.save(Position(epoch + 1))
            progress("training", (epoch + 1) / config.epochs, self.figures(epoch, sums))

    def step(self, index: Tensor, epoch: int, step: int, lr: float, sums: dict[str, float]) -> None:
        """One step of the optimizer on a global batch."""
        config, fabric = self.config, self.fabric
        torch.manual_seed(_seed(config.seed, epoch, step, fabric.global_rank + 1))
        x, labels, share = self.share(index, epoch, step)
        try:
            logits = self.forward(x)
            robust = config.robust and epoch >= config.warmup_epochs
            constants = self.estimators["estimator"].pairwise() if robust else None
            loss = objective(config, logits, labels, constants)
        except NonFiniteError as error:
            raise self.diverged(str(error), epoch, step, lr) from error
        value = float(loss.loss.detach())
        if not isfinite(value):
            parts = f"base {float(loss.base.detach()):g}, robust {float(loss.robust.detach()):g}"
            raise self.diverged(f"the loss is {value:g} ({parts})", epoch, step, lr)
        fabric.backward(loss.loss * (share * fabric.world_size / len(index)))
        if fabric.world_size > 1:
            for scale in self.scales:  # not part of the model, so not averaged with it
                if scale.grad is not None:
                    scale.grad = self.reduce(scale.grad, "mean")
        if config.clip_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), config.clip_norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        correct = int((logits.argmax(1) == labels).sum()) if share else 0
        amounts = (value, float(loss.base.detach()), float(loss.robust.detach()))
        for name, amount in zip(("loss", "base", "robust"), amounts, strict=True):
            sums[name] += amount * share
        sums["correct"] += correct
        sums["count"] += share

    def batches(self, epoch: int) -> list[Tensor]:
        """The indices of the global batches of an epoch."""
        config = self.config
        limit = config.classes_per_batch or None
        labels = self.dataset.train.labels
        return batch_indices(labels, config.batch_size, seed=config.seed, epoch=epoch, classes_per_batch=limit)

    def share(self, index: Tensor, epoch: int, step: int) -> tuple[Tensor, Tensor, int]:
        """This process's inputs and labels of a global batch, and how many count: 0 if there are too few for all.

        The whole batch is augmented before it is shared, so that every sample moves alike on any number of processes.
        """
        generator = torch.Generator().manual_seed(_seed(self.config.seed, epoch, step))
        images, labels = self.augment(self.dataset.train.pixels(index), generator), self.dataset.train.labels[index]
        mine = slice(self.fabric.global_rank, None, self.fabric.world_size)
        share = len(labels[mine])
        if share == 0:
            mine = slice(0, 1)
        x, y = self.fabric.to_device((images[mine], labels[mine]))
        return x.contiguous(memory_format=torch.channels_last) if self.channels_last else x.contiguous(), y, share

    def measure(self, epoch: int, lr: float, sums: dict[str, float], began: float) -> dict[str, Any]:
        """The figures of a finished epoch; certified accuracies are estimates and named so."""
        config = self.config
        count = sums["count"]
        record: dict[str, Any] = {"epoch": epoch + 1, "lr": lr}
        record |= {name: sums[name] / count for name in ("loss", "base", "robust")}
        record["train_accuracy"] = sums["correct"] / count
        try:
            record |= mean_constants(self.estimators)
            if (epoch + 1) % config.eval_every == 0 or epoch + 1 == config.epochs:
                constants = self.estimators["estimator" if self.scales else "liplt"]
                record |= estimate_accuracies(self.fabric, self.model, constants, self.dataset.test, config.epsilons)
        except NonFiniteError as error:
            raise self.diverged(str(error), epoch, len(self.batches(epoch)), lr) from error
        if self.fabric.world_size > 1:
            record["constants_spread"] = difference = spread(self.fabric, self.estimators["estimator"])
            if difference > _TOLERANCE * record["estimated_mean_liplt"]:
                what = f"the constants of the processes differ by {difference:g}; their machines compute differently"
                raise self.diverged(what, epoch, len(self.batches(epoch)), lr)
        return record | {"seconds": time.perf_counter() - began}

    def checkpoint_is_due(self) -> bool:
        due = time.monotonic() - self.saved_at >= self.config.checkpoint_seconds
        return bool(self.reduce(torch.tensor(float(due)), "max")) if self.fabric.world_size > 1 else due

    def save(self, position: Position) -> None:
        """Replace the checkpoint, unless the weights have become infinite or NaN."""
        tensors = self.parts.tensors()
        bad = next((n for n, t in tensors.items() if t.is_floating_point() and not bool(t.isfinite().all())), None)
        if bad is not None:
            lr = learning_rate(self.config.schedule, min(position.epoch, self.config.epochs - 1), self.config.epochs)
            raise self.diverged(f"{bad} contains NaN or infinity", position.epoch, position.step, lr)
        if self.fabric.is_global_zero:
            write_checkpoint(self.path, tensors, position, self.digest)
        self.fabric.barrier()
        self.position, self.saved_at = position, time.monotonic()

    def total(self, sums: dict[str, float]) -> dict[str, float]:
        """The sums over all processes."""
        if self.fabric.world_size == 1:
            return dict(sums)
        names = ("loss", "base", "robust", "correct", "count")
        values = self.reduce(torch.tensor([sums[name] for name in names], dtype=torch.float64), "sum")
        return dict(zip(names, values.tolist(), strict=True))

    def reduce(self, values: Tensor, operation: str) -> Tensor:
        result: Tensor = self.fabric.all_reduce(self.fabric.to_device(values), reduce_op=operation)  # type: ignore[assignment]
        return result

    def diverged(self, what: str, epoch: int, step: int, lr: float) -> DivergenceError:
        good = f"epoch {self.position.epoch + 1}, step {self.position.step + 1}"
        return DivergenceError(
            f"training diverged in epoch {epoch + 1}, step {step + 1}, at learning rate {lr:g}: {what}. Lower "
            f"schedule.lr0 or set clip_norm; the last good checkpoint, before {good}, is {self.path}"
        )

    def figures(self, epoch: int, sums: dict[str, float]) -> str:
        """One line on how it goes."""
        parts = [f"epoch {epoch + 1}/{self.config.epochs}"]
        if sums["count"]:
            parts += [f"loss {sums['loss'] / sums['count']:.3f}", f"train {sums['correct'] / sums['count']:.1%}"]
        if (last := self.log.latest("clean")) is not None:
            parts.append(f"clean {last['clean']:.1%}")
            parts += [f"est. certified@{eps} {value:.1%}" for eps, value in last["estimated_certified"].items()]
        return "  ".join(parts)


def _seed(*key: int) -> int:
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1))
