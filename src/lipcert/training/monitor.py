"""Figures of a run while it goes: constants and accuracies by estimates, one line of JSON per epoch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lipcert import losses
from lipcert.bounds.estimator import Estimator
from lipcert.data import Split
from lipcert.errors import ConfigError
from lipcert.files import write_text
from lipcert.layout import METRICS
from lipcert.runs.metrics import flat_metrics, read_metrics

if TYPE_CHECKING:
    from lightning_fabric import Fabric

_BATCH = 512


class MetricsLog:
    """metrics.jsonl, one flushed line per epoch, and TensorBoard if asked for.

    What is there of later epochs than `epoch`, complete or not, is cut off.
    """

    def __init__(
        self, folder: Path, epoch: int, tensorboard: bool, *, writes: bool
    ) -> None:
        self.path, self.writes = folder / METRICS, writes
        # A run that was killed behind its checkpoint trains the rest again; lines of it
        # would be there twice.
        known = read_metrics(folder)
        self.records = [record for record in known if record["epoch"] <= epoch]
        if writes:
            lines = [json.dumps(record) + "\n" for record in self.records]
            write_text(self.path, "".join(lines))
        self._board = _tensorboard(folder, epoch) if tensorboard and writes else None

    def append(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        if not self.writes:
            return
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        if self._board is not None:
            for name, value in flat_metrics(record).items():
                self._board.add_scalar(name, value, record["epoch"])
            self._board.flush()

    def accuracies(self) -> list[str]:
        """The latest ones, in words; most epochs measure none."""
        for record in reversed(self.records):
            if "clean" in record:
                words = [f"clean {record['clean']:.1%}"]
                for epsilon, share in record["estimated_certified"].items():
                    words.append(f"est. certified@{epsilon} {share:.1%}")
                return words
        return []


@torch.no_grad()
def mean_constants(estimators: Mapping[str, Estimator]) -> dict[str, float]:
    """The mean pairwise constants by both methods, estimated (fig:lipschitzEvolution)."""
    means = {}
    for method in ("naive", "liplt"):
        contributions = estimators[method].estimate().contributions
        means[f"estimated_mean_{method}"] = float(contributions.sum())
    return means


@torch.no_grad()
def estimate_accuracies(
    fabric: Fabric,
    model: nn.Module,
    estimator: Estimator,
    test: Split,
    epsilons: Sequence[float],
) -> dict[str, Any]:
    """Clean accuracy, and certified accuracy by estimated constants and float32 margins: not guaranteed."""
    constants = estimator.pairwise()
    training = model.training
    model.eval()
    counts = torch.zeros(1 + len(epsilons), dtype=torch.float64, device=fabric.device)
    # Process 1 of 3 takes inputs 1, 4, 7, …
    own = torch.arange(fabric.global_rank, len(test), fabric.world_size)
    for index in torch.split(own, _BATCH):
        x, labels = fabric.to_device((test.pixels(index), test.labels[index]))
        # Signed: positive if and only if the label has the largest logit.
        radii = losses.hard_radius(model(x), labels, constants)
        counts[0] += (radii > 0).sum()
        for k, epsilon in enumerate(epsilons):
            counts[k + 1] += (radii >= epsilon).sum()
    model.train(training)
    total = fabric.all_reduce(counts, reduce_op="sum")
    assert isinstance(total, torch.Tensor)
    shares = (total / len(test)).tolist()
    named = [f"{epsilon:.4g}" for epsilon in epsilons]
    certified = dict(zip(named, shares[1:], strict=True))
    return {"clean": shares[0], "estimated_certified": certified}


@torch.no_grad()
def spread(fabric: Fabric, estimator: Estimator) -> float:
    """The largest difference of a constant between any two processes, at the vectors they have."""
    # Without iterations the vectors stay as they are: measuring must not change the
    # training.
    iterations, estimator.power_iterations = estimator.power_iterations, 0
    constants = estimator.pairwise()
    estimator.power_iterations = iterations
    # max(c) and max(−c) = −min(c) in one reduction; their sum is the spread.
    extremes = fabric.all_reduce(torch.stack([constants, -constants]), reduce_op="max")
    assert isinstance(extremes, torch.Tensor)
    return float(extremes.sum(0).max())


def synchronise(fabric: Fabric, estimators: Mapping[str, Estimator]) -> None:
    """Give every process the vectors of the first one; they only differ if machines round differently."""
    if fabric.world_size == 1:
        return
    for estimator in estimators.values():
        for buffer in estimator.buffers():
            buffer.copy_(fabric.broadcast(buffer))


def summary_writer() -> Any:
    """The class that writes for TensorBoard; an error if it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        remedy = "pip install 'lipcert[tensorboard]', or set tensorboard=false"
        raise ConfigError(
            f"tensorboard is true, but TensorBoard is not installed; {remedy}"
        ) from None
    return SummaryWriter


def _tensorboard(folder: Path, epoch: int) -> Any:
    writer: Any = summary_writer()(folder / "tensorboard", purge_step=epoch + 1)
    return writer
