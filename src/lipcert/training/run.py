"""`lipcert.train`: a run is a folder that holds everything to repeat, continue and judge it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lipcert.bounds.fit import FitOptions
from lipcert.data import Dataset
from lipcert.errors import ResumeError
from lipcert.files import write_text
from lipcert.layout import CONFIG, MODEL, SUMMARY, TWIN
from lipcert.models import save_model
from lipcert.models.reading import load_trained
from lipcert.progress import Progress, no_progress
from lipcert.resources import reused_memory
from lipcert.runs import Run, Summary, Task, finish_folder, read_summary
from lipcert.runs.metrics import read_metrics
from lipcert.runs.working import (
    check_unused,
    data_folder,
    keep_environment,
    new_folder,
    working_in,
)
from lipcert.training.config import TrainConfig
from lipcert.training.given_objects import Config, Given
from lipcert.training.launching import launched
from lipcert.training.loop import Training
from lipcert.training.monitor import summary_writer
from lipcert.training.objective import Prepared
from lipcert.training.teacher import Teacher, check_teacher, trained_teacher

if TYPE_CHECKING:
    from lightning_fabric import Fabric


def train(
    config: Config,
    run_dir: str | Path | None = None,
    data_dir: str | Path | None = None,
    progress: Progress = no_progress,
    *,
    model: nn.Module | None = None,
    data: object = None,
    loss: Callable[..., Any] | None = None,
) -> Run:
    """Train and certify; under torchrun, on all its processes, which share the file system.

    Args:
        config: such as `TrainConfig.preset("digits")`; the name of a preset or of a TOML file; or a dictionary, such as
            {"epochs": 10} with a model and data that are given.
        run_dir: a new or empty folder; runs/<name>-<n> if not given.
        data_dir: where the data set is, see `lipcert.data.load`.
        progress: called with what is being done, the fraction done and the latest figures.
        model: in place of the configured one; it is trained itself, from the weights that it has.
        data: in place of the configured ones: whatever `lipcert.data.load` takes, such as a pair (inputs, labels).
        loss: in place of the configured one: a function of logits, labels and constants, see `losses.OwnLoss`.
    """
    given = Given.of(model, data, loss)
    config = given.configured(config)
    if run_dir is not None:
        check_unused(Path(run_dir))
    if config.tensorboard:
        summary_writer()
    with launched(config) as fabric:
        # Data that are missing, or that do not fit the network, must not leave a folder
        # behind.
        dataset = _load(fabric, config, given, data_dir)
        config = config.for_inputs(len(dataset.train))
        check_teacher(config)
        prepared = Prepared.of(config, dataset, given.model)
        folder = _begin_folder(fabric, config, run_dir)
        work = _Work(fabric, dataset, data_dir, progress, given)
        return work.run(config, folder, prepared)


def _begin_folder(
    fabric: Fabric, config: TrainConfig, run_dir: str | Path | None
) -> Path:
    """A new folder with its configuration, which all processes know."""
    folder: Any = None
    if fabric.is_global_zero:
        folder = new_folder(config.name, run_dir)
        # With the batch size that the data gave it: resuming must not choose another.
        write_text(folder / CONFIG, config.to_toml())
    return Path(fabric.broadcast(folder))


def resume(
    run_dir: str | Path,
    data_dir: str | Path | None = None,
    progress: Progress = no_progress,
    *,
    model: nn.Module | None = None,
    data: object = None,
    loss: Callable[..., Any] | None = None,
) -> Run:
    """Continue a run that was interrupted, at its last checkpoint; a finished one is only read.

    What was given to `train` as an object has to be given again.
    """
    folder = Path(run_dir)
    if not (folder / CONFIG).is_file():
        raise ResumeError(
            f"{folder} holds no run: {CONFIG} is missing; start one with lipcert train"
        )
    given = Given.of(model, data, loss)
    config = given.continued(TrainConfig.from_toml(folder / CONFIG))
    # Where the data were when the run was begun.
    data_dir = data_dir or data_folder(folder)
    with launched(config) as fabric:
        dataset = _load(fabric, config, given, data_dir)
        return _Work(fabric, dataset, data_dir, progress, given).run(config, folder)


@dataclass(frozen=True)
class _Work:
    """What a run and its standard twin share."""

    fabric: Fabric
    dataset: Dataset
    data_dir: str | Path | None
    progress: Progress
    given: Given

    def run(
        self, config: TrainConfig, folder: Path, prepared: Prepared | None = None
    ) -> Run:
        """Go on with a folder that has at least its configuration."""
        with working_in(folder) if self.fabric.is_global_zero else nullcontext():
            summary: Any = None
            if self.fabric.is_global_zero:
                keep_environment(folder, self.dataset, self.data_dir, config.seed)
                # The summary is written last: where it is, everything else is complete.
                if (folder / SUMMARY).exists():
                    summary = read_summary(folder)
            summary = self.fabric.broadcast(summary)
            if summary is None:
                model = self.given.model
                prepared = prepared or Prepared.of(config, self.dataset, model)
                # If training is done but not this: its checkpoint is at the last epoch,
                # and certifying goes on.
                summary = self.train(config, folder, prepared)
            standard = None
            if config.compare_standard:
                standard = self.run_twin(config, folder)
            return Run(folder, summary, read_metrics(folder), standard)

    def train(self, config: TrainConfig, folder: Path, prepared: Prepared) -> Summary:
        """From the last checkpoint, or from the start, to the summary."""
        dataset, digest = self.dataset, config.weights_digest()
        # Adam's moments of weights without gradient end there.
        torch.set_flush_denormal(True)
        try:
            with reused_memory():
                teacher = self.teacher(config, folder)
                training = Training(
                    self.fabric, config, digest, dataset, folder, prepared, teacher
                )
                training.run(self.progress)
        finally:
            torch.set_flush_denormal(False)
        summary: Any = None
        if self.fabric.is_global_zero:
            summary = _finish(config, training, self, folder)
        summary = self.fabric.broadcast(summary)
        assert isinstance(summary, Summary)
        return summary

    def teacher(self, config: TrainConfig, folder: Path) -> Teacher | None:
        """Whoever says how probable the classes of training images are, trained; None if labels are all there is."""
        if not config.teacher:
            return None
        about = self.fabric, config, self.dataset, folder, self.progress
        return trained_teacher(*about)

    def run_twin(self, config: TrainConfig, folder: Path) -> Run:
        """The same network, trained by cross-entropy alone."""
        twin = config.standard_twin()
        if self.fabric.is_global_zero and not (folder / TWIN / CONFIG).exists():
            write_text(folder / TWIN / CONFIG, twin.to_toml())
        self.fabric.barrier()
        return replace(self, given=self.given.for_twin()).run(twin, folder / TWIN)


def _finish(
    config: TrainConfig, training: Training, work: _Work, folder: Path
) -> Summary:
    """Write the weights, read them back, certify and attack what was read; the summary comes last."""
    path, dataset = folder / MODEL, work.dataset
    name, shape, pixels = config.model, dataset.input_shape, config.input_range
    classes = dataset.classes
    # Models of users may have another type than float32, which stays.
    dtype = torch.float16 if config.stored == "float16" else None
    save_model(
        training.model, path, name, shape, classes, input_range=pixels, dtype=dtype
    )
    training.model.eval()
    # What is certified is what a reader of the folder gets, not what is in the memory.
    loaded = load_trained(path, given=deepcopy(work.given.model), imports=True)
    loaded = loaded.executed_in(config.execution)
    dataset = dataset.in_dtype(loaded.dtype)
    task = Task(dataset, config.epsilons, len(dataset.test), config.attack_inputs)
    learned = training.estimators["estimator"].diagonals()
    if learned and config.robust:  # what training has learned is a good start
        fit = FitOptions(start=learned)
        task = replace(task, method=config.estimator.method, fit=fit)
    summary = replace(
        finish_folder(loaded, task, folder, work.progress),
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


def _load(
    fabric: Fabric, config: TrainConfig, given: Given, data_dir: str | Path | None
) -> Dataset:
    # The first process downloads and unpacks, the others find the files.
    with fabric.rank_zero_first():
        return given.load(config, data_dir).holding_out(config.validation)
