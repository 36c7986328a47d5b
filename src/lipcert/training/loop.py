"""The training loop: one step after the other, on one process or many, from any checkpoint."""

from __future__ import annotations

import time
from collections import defaultdict
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lipcert.data import Dataset
from lipcert.errors import DivergenceError, NonFiniteError
from lipcert.layout import CHECKPOINT
from lipcert.progress import Progress
from lipcert.training.checkpoint import (
    Position,
    TrainingState,
    read_checkpoint,
    write_checkpoint,
)
from lipcert.training.config import TrainConfig
from lipcert.training.monitor import (
    MetricsLog,
    estimate_accuracies,
    mean_constants,
    spread,
    synchronise,
)
from lipcert.training.objective import Prepared, build_estimators, objective
from lipcert.training.optimizers import build_optimizers
from lipcert.training.schedule import learning_rate
from lipcert.training.shared_batches import Asked, SharedBatches, seed_of

if TYPE_CHECKING:
    from lightning_fabric import Fabric

_TOLERANCE = 1e-3


class Training:
    """A run in its folder, at its last checkpoint if there is one.

    Every process has the whole model and the same constants and takes every n-th sample
    of each global batch. Its loss is weighted such that the averaged gradient is that
    of the mean loss over the global batch.
    """

    def __init__(
        self,
        fabric: Fabric,
        config: TrainConfig,
        digest: str,
        dataset: Dataset,
        folder: Path,
        prepared: Prepared,
        teacher: Asked | None = None,
    ) -> None:
        self.fabric, self.config, self.digest = fabric, config, digest
        self.dataset, self.path = dataset, folder / CHECKPOINT
        self.model, layout = prepared.model, prepared.memory_format
        self.batches = SharedBatches(fabric, config, dataset, layout, teacher)
        self.estimators = build_estimators(config, prepared)
        # Learned coordinates or multipliers; empty for the methods "naive" and "liplt".
        self.scales = list(self.estimators["estimator"].parameters())
        optimizers = build_optimizers(config, self.model, self.scales)
        self.forward, *self.optimizers = fabric.setup(self.model, *optimizers)
        self.state = TrainingState(self.model, optimizers, self.estimators)
        self.position = Position()
        # The first process reads, all restore: their disks may differ, their states
        # must not.
        checkpoint: Any = None
        if fabric.is_global_zero and self.path.exists():
            checkpoint = read_checkpoint(self.path, digest)
        checkpoint = fabric.broadcast(checkpoint)
        self.fresh = checkpoint is None
        if checkpoint is not None:
            tensors, self.position = checkpoint
            self.state.restore(tensors, self.path)
        epoch, writes = self.position.epoch, fabric.is_global_zero
        self.log = MetricsLog(folder, epoch, config.tensorboard, writes=writes)
        self.saved_at = time.monotonic()

    def run(self, progress: Progress) -> None:
        """Train to the last epoch."""
        config = self.config
        # So that a run that is killed in its first minute can be resumed, too.
        if self.fresh:
            self.save(self.position)
        for epoch in range(self.position.epoch, config.epochs):
            began = time.perf_counter()
            batches = self.batches.indices(epoch)
            steps = len(batches)
            lr = learning_rate(config.schedule, epoch, config.epochs)
            # A checkpoint has the sums over all processes: they must count only once.
            known = self.position.sums if self.fabric.is_global_zero else {}
            sums = defaultdict(float, known)
            first = self.position.step if epoch == self.position.epoch else 0
            self.forward.train()
            synchronise(self.fabric, self.estimators)
            for step in range(first, steps):
                lr = self.set_learning_rate(epoch, step, steps)
                self.step(batches[step], epoch, step, lr, sums)
                if step + 1 < steps:
                    done = (epoch + (step + 1) / steps) / config.epochs
                    progress("training", done, self.figures(epoch, sums))
                    if self.checkpoint_is_due():
                        self.save(Position(epoch, step + 1, self.total(sums)))
            # The line first, then the checkpoint: if only the line is there, resuming
            # cuts it off and trains it again.
            self.log.append(self.measure(epoch, lr, self.total(sums), began))
            self.save(Position(epoch + 1))
            progress("training", (epoch + 1) / config.epochs, self.figures(epoch, sums))

    def set_learning_rate(self, epoch: int, step: int, steps: int) -> float:
        """The learning rate of the schedule, for all groups of parameters at their pace."""
        lr = learning_rate(self.config.schedule, epoch, self.config.epochs, step, steps)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group["pace"]
        return lr

    def step(
        self, index: Tensor, epoch: int, step: int, lr: float, sums: dict[str, float]
    ) -> None:
        """One step of the optimizers on a global batch."""
        fabric = self.fabric
        # For dropout: a function of where the run is, so that a resumed one draws the
        # same. Ranks begin at 1: the key (s, e, t, 0) would give the seed of (s, e, t),
        # which is that of the augmentation.
        key = (self.config.seed, epoch, step, fabric.global_rank + 1)
        torch.manual_seed(seed_of(*key))
        share = self.batches.share(index, epoch, step)
        try:
            logits = self.forward(share.x)
            constants = self.constants(epoch)
            # In the warm-up, by cross-entropy, classes are certain.
            targets = share.labels if constants is None else share.targets
            loss = objective(self.config, logits, targets, constants)
        except NonFiniteError as error:
            raise self.diverged(str(error), epoch, step, lr) from error
        terms = (loss.loss, loss.base, loss.robust)
        value, base, robust = (float(term.detach()) for term in terms)
        if not isfinite(value):
            what = f"the loss is {value:g} (base {base:g}, robust {robust:g})"
            raise self.diverged(what, epoch, step, lr)
        # Processes average their gradients: Σ_p (share_p·n/B)·loss_p / n is the mean
        # over the global batch of B.
        weight = share.count * fabric.world_size / len(index)
        fabric.backward(loss.loss * weight)
        self.move()
        sums["loss"] += value * share.count
        sums["base"] += base * share.count
        sums["robust"] += robust * share.count
        if share.count:
            sums["correct"] += int((logits.argmax(1) == share.labels).sum())
        sums["count"] += share.count

    def constants(self, epoch: int) -> Tensor | None:
        """The constants of the loss; none during the warm-up and for a loss without them."""
        if not self.config.robust or epoch < self.config.warmup_epochs:
            return None
        return self.estimators["estimator"].pairwise()

    def move(self) -> None:
        """Let the optimizers move the weights along their gradients."""
        if self.fabric.world_size > 1:
            for scale in self.scales:  # not part of the model, so not averaged with it
                if scale.grad is not None:
                    scale.grad = self.reduce(scale.grad, "mean")
        if self.config.clip_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def measure(
        self, epoch: int, lr: float, sums: dict[str, float], began: float
    ) -> dict[str, Any]:
        """The figures of a finished epoch; certified accuracies are estimates and named so."""
        config, dataset, count = self.config, self.dataset, sums["count"]
        record: dict[str, Any] = {"epoch": epoch + 1, "lr": lr}
        record |= {name: sums[name] / count for name in ("loss", "base", "robust")}
        record["train_accuracy"] = sums["correct"] / count
        try:
            record |= mean_constants(self.estimators)
            if (epoch + 1) % config.eval_every == 0 or epoch + 1 == config.epochs:
                constants = self.estimators["estimator" if self.scales else "liplt"]
                watched = dataset.validation if config.validation else dataset.test
                assert watched is not None
                record |= estimate_accuracies(
                    self.fabric, self.model, constants, watched, config.epsilons
                )
        except NonFiniteError as error:
            steps = len(self.batches.indices(epoch))
            raise self.diverged(str(error), epoch, steps, lr) from error
        if self.fabric.world_size > 1:
            difference = spread(self.fabric, self.estimators["estimator"])
            record["constants_spread"] = difference
            if difference > _TOLERANCE * record["estimated_mean_liplt"]:
                what = f"the constants of the processes differ by {difference:g}; their machines compute differently"
                raise self.diverged(what, epoch, len(self.batches.indices(epoch)), lr)
        return record | {"seconds": time.perf_counter() - began}

    def checkpoint_is_due(self) -> bool:
        due = time.monotonic() - self.saved_at >= self.config.checkpoint_seconds
        if self.fabric.world_size == 1:
            return due
        # Clocks differ, and saving waits for all processes: all have to decide alike.
        return bool(self.reduce(torch.tensor(float(due)), "max"))

    def save(self, position: Position) -> None:
        """Replace the checkpoint, unless the weights have become infinite or NaN."""
        tensors = self.state.tensors()
        # Nobody could go on from it, and the last good checkpoint would be lost.
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                epoch = min(position.epoch, self.config.epochs - 1)
                lr = learning_rate(self.config.schedule, epoch, self.config.epochs)
                what = f"{name} contains NaN or infinity"
                raise self.diverged(what, position.epoch, position.step, lr)
        if self.fabric.is_global_zero:
            write_checkpoint(self.path, tensors, position, self.digest)
        self.fabric.barrier()
        self.position, self.saved_at = position, time.monotonic()

    def total(self, sums: dict[str, float]) -> dict[str, float]:
        """The sums over all processes."""
        if self.fabric.world_size == 1:
            return dict(sums)
        names = ("loss", "base", "robust", "correct", "count")
        own = torch.tensor([sums[name] for name in names], dtype=torch.float64)
        return dict(zip(names, self.reduce(own, "sum").tolist(), strict=True))

    def reduce(self, values: Tensor, operation: str) -> Tensor:
        values = self.fabric.to_device(values)
        result: Tensor = self.fabric.all_reduce(values, reduce_op=operation)  # type: ignore[assignment]
        return result

    def diverged(self, what: str, epoch: int, step: int, lr: float) -> DivergenceError:
        good = f"epoch {self.position.epoch + 1}, step {self.position.step + 1}"
        return DivergenceError(
            f"training diverged in epoch {epoch + 1}, step {step + 1}, at learning rate {lr:g}: {what}. Lower "
            f"schedule.lr0 or set clip_norm; the last good checkpoint, before {good}, is {self.path}"
        )

    def figures(self, epoch: int, sums: dict[str, float]) -> str:
        """One line on how it goes."""
        words = [f"epoch {epoch + 1}/{self.config.epochs}"]
        if sums["count"]:
            words.append(f"loss {sums['loss'] / sums['count']:.3f}")
            words.append(f"train {sums['correct'] / sums['count']:.1%}")
        return "  ".join([*words, *self.log.accuracies()])
