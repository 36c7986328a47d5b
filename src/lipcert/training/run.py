"""`lipcert.train`: a run is a folder that holds everything to repeat, continue and judge it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lipcert import data
from lipcert.bounds.fit import FitOptions
from lipcert.errors import ResumeError
from lipcert.files import write_text
from lipcert.layout import CONFIG, MODEL, SUMMARY, TWIN
from lipcert.models import load_model, save_model
from lipcert.progress import Progress, no_progress
from lipcert.runs import Run, Summary, Task, finish_folder, read_summary
from lipcert.runs.metrics import read_metrics
from lipcert.runs.working import check_unused, data_folder, keep_environment, new_folder, working_in
from lipcert.training.config import TrainConfig
from lipcert.training.loop import Training
from lipcert.training.objective import Prepared

if TYPE_CHECKING:
    from lightning_fabric import Fabric


def train(
    config: TrainConfig | str | Path,
    run_dir: str | Path | None = None,
    data_dir: str | Path | None = None,
    progress: Progress = no_progress,
) -> Run:
    """Train and certify; under torchrun, on all its processes, which share the file system.

    Args:
        config: such as `TrainConfig.preset("digits")`; or the name of a preset or of a TOML file.
        run_dir: a new or empty folder; runs/<name>-<n> if not given.
        data_dir: where the data set is, see `lipcert.data.load`.
        progress: called with what is being done, the fraction done and the latest figures.
    """
    if not isinstance(config, TrainConfig):
        config = TrainConfig.named(config)
    if run_dir is not None:
        check_unused(Path(run_dir))
    with _fabric(config) as fabric:
        # Data that are missing, or that do not fit the network, must not leave a folder behind.
        dataset = _load(fabric, config, data_dir)
        prepared = Prepared.of(config, dataset)
        folder: Any = None
        if fabric.is_global_zero:
            folder = new_folder(config.name, run_dir)
            write_text(folder / CONFIG, config.to_toml())
        folder = fabric.broadcast(folder)
        return _Work(fabric, dataset, data_dir, progress).run(config, folder, prepared)


def resume(run_dir: str | Path, data_dir: str | Path | None = None, progress: Progress = no_progress) -> Run:
    """Continue a run that was interrupted, at its last checkpoint; a finished one is only read."""
    folder = Path(run_dir)
    if not (folder / CONFIG).is_file():
        raise ResumeError(f"{folder} holds no run: {CONFIG} is missing; start one with lipcert train")
    config = TrainConfig.from_toml(folder / CONFIG)
    data_dir = data_dir or data_folder(folder)
    with _fabric(config) as fabric:
        dataset = _load(fabric, config, data_dir)
        return _Work(fabric, dataset, data_dir, progress).run(config, folder)


@dataclass(frozen=True)
class _Work:
    """What a run and its standard twin share."""

    fabric: Fabric
    dataset: data.Dataset
    data_dir: str | Path | None
    progress: Progress

    def run(self, config: TrainConfig, folder: Path, prepared: Prepared | None = None) -> Run:
        """Go on with a folder that has at least its configuration."""
        with working_in(folder) if self.fabric.is_global_zero else nullcontext():
            summary: Any = None
            if self.fabric.is_global_zero:
                keep_environment(folder, self.dataset, self.data_dir, config.seed)
                if (folder / SUMMARY).exists():
                    summary = read_summary(folder)
            summary = self.fabric.broadcast(summary)
            if summary is None:
                summary = self.train(config, folder, prepared or Prepared.of(config, self.dataset))
            standard = self.run_twin(config, folder) if config.compare_standard else None
            return Run(folder, summary, read_metrics(folder), standard)

    def train(self, config: TrainConfig, folder: Path, prepared: Prepared) -> Summary:
        """From the last checkpoint, or from the start, to the summary."""
        training = Training(self.fabric, config, weights_digest(config), self.dataset, folder, prepared)
        torch.set_flush_denormal(True)  # Adam's moments of weights without gradient end there
        try:
            training.run(self.progress)
        finally:
            torch.set_flush_denormal(False)
        summary: Any = None
        if self.fabric.is_global_zero:
            summary = _finish(config, training, self.dataset, folder, self.progress)
        summary = self.fabric.broadcast(summary)
        assert isinstance(summary, Summary)
        return summary

    def run_twin(self, config: TrainConfig, folder: Path) -> Run:
        """The same network, trained by cross-entropy alone."""
        twin = config.standard_twin()
        if self.fabric.is_global_zero and not (folder / TWIN / CONFIG).exists():
            write_text(folder / TWIN / CONFIG, twin.to_toml())
        self.fabric.barrier()
        return self.run(twin, folder / TWIN)


def _finish(
    config: TrainConfig, training: Training, dataset: data.Dataset, folder: Path, progress: Progress
) -> Summary:
    """Write the weights, read them back, certify and attack what was read; the summary comes last."""
    path = folder / MODEL
    save_model(training.model, path, config.model, dataset.input_shape, dataset.classes, input_range=config.input_range)
    loaded = load_model(str(path))
    if config.execution == "float64":
        loaded, dataset = loaded.in_float64(), dataset.in_dtype(torch.float64)
    task = Task(dataset, config.epsilons, len(dataset.test), config.attack_inputs)
    scales = training.estimators["estimator"].scales
    if scales is not None and config.robust:  # what training has learned is a good start
        task = replace(task, method="rescaled", fit=FitOptions(start=scales.diagonals()))
    summary = replace(
        finish_folder(loaded, task, folder, progress),
        name=config.name,
        model=config.model,
        loss=config.loss.type,
        epochs=config.epochs,
        seed=config.seed,
        note=config.note,
        training_seconds=sum(record["seconds"] for record in training.log.records),
        seconds=None,
    )
    summary.write(folder)
    return summary


def _load(fabric: Fabric, config: TrainConfig, data_dir: str | Path | None) -> data.Dataset:
    with fabric.rank_zero_first():
        return data.load(config.data, data_dir)


@contextmanager
def _fabric(config: TrainConfig) -> Iterator[Fabric]:
    """The processes that torchrun has started, or this one; the caller's random state is left alone."""
    from lightning_fabric import Fabric
    from lightning_fabric.strategies.ddp import DDPStrategy

    world = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    strategy: Any = "auto"
    if world > 1:  # other processes wait for as long as the first one certifies
        strategy = DDPStrategy(timeout=timedelta(days=7))
    fabric = Fabric(
        accelerator="cuda" if torch.cuda.is_available() else "cpu",
        strategy=strategy,
        devices=local,
        num_nodes=max(world // local, 1),
        precision=config.precision,
    )
    fabric.launch()
    with torch.random.fork_rng():
        yield fabric


def weights_digest(config: TrainConfig) -> str:
    """Of everything that determines the weights."""
    left_out = {"name", "note", "attack_inputs", "execution", "checkpoint_seconds", "tensorboard"}
    relevant = config.model_dump_json(exclude=left_out, exclude_defaults=True)  # so that new fields change nothing
    return hashlib.sha256(relevant.encode()).hexdigest()
