"""`lipcert.train`: a run is a folder that holds everything to repeat, continue and judge it."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock, Timeout

from lipcert import data
from lipcert.errors import OptionError, ResumeError
from lipcert.figures import TextTable, data_frame, draw_lines, new_figure
from lipcert.files import replace_file
from lipcert.progress import Progress, no_progress
from lipcert.training.checkpoint import leftovers, remove_leftovers
from lipcert.training.config import TrainConfig
from lipcert.training.environment import ENVIRONMENT, environment
from lipcert.training.finish import SUMMARY, finish
from lipcert.training.loop import Training
from lipcert.training.monitor import flat_metrics, read_metrics
from lipcert.training.objective import Prepared

if TYPE_CHECKING:
    import pandas
    from lightning_fabric import Fabric
    from matplotlib.figure import Figure
    from rich.table import Table

CONFIG, TWIN, LOCK = "config.toml", "standard", ".lock"
_ESTIMATED = "estimated_certified/"


@dataclass(frozen=True)
class Run:
    """A finished run.

    summary: clean and certified accuracies, by guaranteed bounds. metrics: one record per epoch, with estimates.
    standard: the twin that was trained by cross-entropy alone, if there is one.
    """

    folder: Path
    summary: dict[str, Any]
    metrics: list[dict[str, Any]] = field(repr=False)
    standard: Run | None = None

    def __repr__(self) -> str:
        facts = self.summary
        certified = ", ".join(f"{entry['certified']:.2%} at ε = {entry['epsilon']:.4g}" for entry in facts["at"])
        return (
            f"Run({str(self.folder)!r}, {facts['model']} on {facts['data_title']}, {facts['loss']}, "
            f"clean {facts['clean']:.2%}, certified {certified})"
        )

    def __rich__(self) -> Table:
        return self._table().rich()

    def _repr_html_(self) -> str:
        return self._table().html()

    def _table(self) -> TextTable:
        """Accuracies of the run and of its twin; certified by guaranteed bounds only."""
        facts = self.summary
        columns = ["loss", "clean"]
        attacked = facts.get("attacked_inputs", facts["inputs"])
        share = f" ({attacked:,} inputs)" if attacked < facts["inputs"] else ""
        for entry in facts["at"]:
            columns += [f"attacked at ε = {entry['epsilon']:.4g}{share}"] if entry["attacked"] is not None else []
            columns += [f"certified at ε = {entry['epsilon']:.4g}"]
        rows = []
        for row in (facts, *([self.standard.summary] if self.standard else [])):
            shares = [row["clean"]]
            for entry in row["at"]:
                shares += [share for share in (entry["attacked"], entry["certified"]) if share is not None]
            rows.append((row["loss"], *(f"{share:.2%}" for share in shares), f"{row['median_radius']:.4f}"))
        notes = [facts["note"]] if facts["note"] else []
        if self.standard is not None:
            notes.append("standard: the same network, trained for accuracy only.")
        execution = facts.get("execution", "float32")
        notes.append(
            f"Trained in {facts['training_seconds']:.0f} s. Certified: {facts['guarantee']}; executed in {execution}, "
            f"rounding included; {facts['units']}. Folder: {self.folder}"
        )
        return TextTable(
            f"{facts['name']}: {facts['model']} on {facts['data_title']}, {facts['inputs']:,} test inputs",
            (*columns, "median radius"),
            rows,
            " ".join(notes),
        )

    def plot(self) -> Figure:
        """Losses, accuracies and mean constants over the epochs; constants and certified shares are estimates."""
        columns = self._columns()
        certified = {
            name: f"certified at {name.removeprefix(_ESTIMATED)} (estimate)" for name in columns if _ESTIMATED in name
        }
        panels = {
            "loss": {"loss": "all", "base": "base", "robust": "robust"},
            "accuracy": {"train_accuracy": "training", "clean": "clean", **certified},
            "mean pairwise constant (estimate)": {f"estimated_mean_{name}": name for name in ("naive", "liplt")},
        }
        figure, axes = new_figure(columns=len(panels), size=(4.4, 3.4))
        for place, (what, names) in zip(axes, panels.items(), strict=True):
            series = {}
            for name in (name for name in names if name in columns):
                known = [(x, y) for x, y in zip(columns["epoch"], columns[name], strict=True) if y is not None]
                series[names[name]] = ([x for x, _ in known], [y for _, y in known])
            draw_lines(place, series, "epoch", what, percent=what == "accuracy", logarithmic="constant" in what)
        return figure

    def to_pandas(self) -> pandas.DataFrame:
        """The metrics, one row per epoch."""
        return data_frame(self._columns(), index="epoch")

    def _columns(self) -> dict[str, list[Any]]:
        """The metrics by name, None where an epoch has no value."""
        records = [{**flat_metrics(record), "epoch": record["epoch"]} for record in self.metrics]
        names = dict.fromkeys(name for record in records for name in record)
        return {name: [record.get(name) for record in records] for name in names}


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
    config = config if isinstance(config, TrainConfig) else TrainConfig.named(config)
    if run_dir is not None:
        _check_unused(Path(run_dir))
    with _fabric(config) as fabric:
        # Data that are missing, or that do not fit the network, must not leave a folder behind.
        dataset = _load(fabric, config, data_dir)
        prepared = Prepared.of(config, dataset)
        folder: Path | None = None
        if fabric.is_global_zero:
            folder = _new_folder(config.name, run_dir)
            _write(folder / CONFIG, config.to_toml())
        return _run(fabric, config, fabric.broadcast(folder), dataset, data_dir, progress, prepared)  # type: ignore[arg-type]


def resume(run_dir: str | Path, data_dir: str | Path | None = None, progress: Progress = no_progress) -> Run:
    """Continue a run that was interrupted, at its last checkpoint; a finished one is only read."""
    folder = Path(run_dir)
    if not (folder / CONFIG).is_file():
        raise ResumeError(f"{folder} holds no run: {CONFIG} is missing; start one with lipcert train")
    config = TrainConfig.from_toml(folder / CONFIG)
    if data_dir is None and (folder / ENVIRONMENT).exists():
        data_dir = json.loads((folder / ENVIRONMENT).read_text())["data"]["folder"]
    with _fabric(config) as fabric:
        return _run(fabric, config, folder, _load(fabric, config, data_dir), data_dir, progress)


def _load(fabric: Fabric, config: TrainConfig, data_dir: str | Path | None) -> data.Dataset:
    with fabric.rank_zero_first():
        return data.load(config.data, data_dir)


def _run(
    fabric: Fabric,
    config: TrainConfig,
    folder: Path,
    dataset: data.Dataset,
    data_dir: str | Path | None,
    progress: Progress,
    prepared: Prepared | None = None,
) -> Run:
    """Go on with a folder that has at least its configuration."""
    with _working(fabric, folder):
        if fabric.is_global_zero:
            remove_leftovers(folder)
            _check_environment(folder, config, dataset, data_dir)
        summary: dict[str, Any] = {}
        if fabric.is_global_zero and (folder / SUMMARY).exists():
            summary = json.loads((folder / SUMMARY).read_text())
        summary = fabric.broadcast(summary)
        if not summary:
            prepared = prepared or Prepared.of(config, dataset)
            training = Training(fabric, config, weights_digest(config), dataset, folder, prepared)
            torch.set_flush_denormal(True)  # Adam's moments of weights without gradient end there
            try:
                training.run(progress)
            finally:
                torch.set_flush_denormal(False)
            if fabric.is_global_zero:
                seconds = sum(record["seconds"] for record in training.log.records)
                scales = training.estimators["estimator"].scales
                summary = finish(config, training.model, scales, dataset, folder, seconds, progress)
            summary = fabric.broadcast(summary)
        standard = None
        if config.compare_standard:
            twin = config.standard_twin()
            if fabric.is_global_zero and not (folder / TWIN / CONFIG).exists():
                _write(folder / TWIN / CONFIG, twin.to_toml())
            fabric.barrier()
            standard = _run(fabric, twin, folder / TWIN, dataset, data_dir, progress)
        return Run(folder, summary, read_metrics(folder), standard)


@contextmanager
def _working(fabric: Fabric, folder: Path) -> Iterator[None]:
    """Refuse a folder in which another process is working; say how to go on if this one is interrupted.

    The lock of a process that was killed is gone with it.
    """
    try:
        with FileLock(folder / LOCK, timeout=0) if fabric.is_global_zero else nullcontext():
            yield
    except Timeout:
        raise ResumeError(f"another process is working in {folder}; wait until it ends, or stop it") from None
    except KeyboardInterrupt:
        remedy = f"stopped; continue with: lipcert train --resume {shlex.quote(str(folder))}"
        raise KeyboardInterrupt(remedy) from None


@contextmanager
def _fabric(config: TrainConfig) -> Iterator[Fabric]:
    """The processes that torchrun has started, or this one; the caller's random state is left alone."""
    from lightning_fabric import Fabric
    from lightning_fabric.strategies.ddp import DDPStrategy

    world, local = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # Other processes wait for as long as the first one certifies.
    strategy: Any = DDPStrategy(timeout=timedelta(days=7)) if world > 1 else "auto"
    nodes = max(world // local, 1)
    fabric = Fabric(accelerator=device, strategy=strategy, devices=local, num_nodes=nodes, precision=config.precision)
    fabric.launch()
    with torch.random.fork_rng():
        yield fabric


def _new_folder(name: str, run_dir: str | Path | None) -> Path:
    if run_dir is None:
        for n in count(1):
            folder = Path("runs") / f"{name}-{n}"
            try:
                folder.mkdir(parents=True)
            except FileExistsError:
                continue
            return folder
    folder = Path(run_dir)  # type: ignore[arg-type]
    _check_unused(folder)  # again: another process may have begun since
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _check_unused(folder: Path) -> None:
    if (folder / CONFIG).exists():
        raise ResumeError(f"{folder} already holds a run; continue it with --resume {folder}, or choose another folder")
    if folder.exists() and (not folder.is_dir() or set(folder.iterdir()) - set(leftovers(folder))):
        raise OptionError(f"{folder} exists and is not an empty folder; choose another one for the run")


def _check_environment(folder: Path, config: TrainConfig, dataset: data.Dataset, data_dir: str | Path | None) -> None:
    """Write what the run depends on; refuse to continue it with other data."""
    path = folder / ENVIRONMENT
    if path.exists():
        if json.loads(path.read_text())["data"]["checksum"] != dataset.checksum:
            raise ResumeError(f"{folder} was begun with other data: the checksum of {config.data} differs from {path}")
        return
    facts = environment(dataset, data_dir, config.seed)
    _write(path, json.dumps(facts, indent=2, ensure_ascii=False) + "\n")


def weights_digest(config: TrainConfig) -> str:
    """Of everything that determines the weights."""
    left_out = {"name", "note", "attack_inputs", "execution", "checkpoint_seconds", "tensorboard"}
    relevant = config.model_dump_json(exclude=left_out, exclude_defaults=True)  # so that new fields change nothing
    return hashlib.sha256(relevant.encode()).hexdigest()


def _write(path: Path, text: str) -> None:
    with replace_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
