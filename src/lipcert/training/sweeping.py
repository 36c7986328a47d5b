"""`lipcert sweep`: the same training with several values and seeds; what is finished is not trained again."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, stdev

from lipcert.errors import ConfigError, ResumeError
from lipcert.files import write_json
from lipcert.layout import CONFIG
from lipcert.progress import Progress, no_progress
from lipcert.runs import Run, Summary
from lipcert.training.config import TrainConfig
from lipcert.training.given_objects import Config, Given
from lipcert.training.run import resume, train

SWEEP = "sweep.json"


@dataclass(frozen=True)
class Spread:
    """A mean over seeds and the standard deviation, which is not known of a single one."""

    mean: float
    deviation: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(fmean(values), stdev(values) if len(values) > 1 else None)


@dataclass(frozen=True)
class Cell:
    """The runs with one choice of values: one per seed."""

    values: Mapping[str, str]
    runs: tuple[Run, ...]

    def spreads(self) -> dict[str, Spread]:
        """Accuracies and the median radius over the seeds."""
        summaries: list[Summary] = [run.summary for run in self.runs]
        figures = {"clean": [summary.clean for summary in summaries]}
        for k, epsilon in enumerate(summaries[0].epsilons):
            certified = [summary.at[k].certified for summary in summaries]
            figures[f"certified at {epsilon:.4g}"] = certified
        figures["median radius"] = [summary.median_radius for summary in summaries]
        return {name: Spread.of(values) for name, values in figures.items()}


def sweep(
    config: Config,
    choices: Sequence[str],
    seeds: int,
    folder: str | Path,
    data_dir: str | Path | None = None,
    progress: Progress = no_progress,
) -> list[Cell]:
    """Train with every combination of values and every seed, each in a folder of its own, and write sweep.json.

    A sweep that was interrupted goes on where it was: finished runs are read, the one
    under way is continued.

    Args:
        config: what all runs share, as `lipcert.train` takes it; seeds are counted from its own.
        choices: such as "loss.t=3,5,8".
    """
    if seeds < 1:
        raise ConfigError(f"seeds is {seeds}, expected 1 or more")
    base = Given().configured(config)
    grid = [read_choice(choice) for choice in choices]
    combinations = list(product(*(values for _, values in grid)))
    cells = []
    for place, combination in enumerate(combinations):
        values = {key: value for (key, _), value in zip(grid, combination, strict=True)}
        runs = []
        for k in range(seeds):
            number = place * seeds + k
            # The same seeds in all cells: differences between cells are not those of
            # seeds.
            seed = base.seed + k
            name = _folder_name(values, seed)
            chosen = [f"{key}={value}" for key, value in values.items()]
            own = base.with_overrides([*chosen, f"seed={seed}", f"name={name}"])
            shown = _numbered(progress, number, len(combinations) * seeds, name)
            runs.append(_run(own, Path(folder) / name, data_dir, shown))
        cells.append(Cell(values, tuple(runs)))
    # Last: where it is, all runs are finished.
    write_json(Path(folder) / SWEEP, [_plain(cell) for cell in cells])
    return cells


def read_choice(choice: str) -> tuple[str, list[str]]:
    """The key and the values of "key=a,b"; commas inside brackets or quotes belong to a value."""
    key, separator, text = choice.partition("=")
    # epsilons=[0.1,0.2],[0.3] has two values: commas in brackets are hidden while the
    # text is split.
    apart = re.sub(
        r"\[[^\]]*\]|\"[^\"]*\"|'[^']*'",
        lambda found: found[0].replace(",", "\0"),
        text,
    )
    values = [value.replace("\0", ",").strip() for value in apart.split(",")]
    if not separator or not key.strip() or not values or not all(values):
        raise ConfigError(
            f"--set {choice!r}: expected key=value,value, such as loss.t=3,5,8"
        )
    return key.strip(), list(dict.fromkeys(values))


def _folder_name(values: Mapping[str, str], seed: int) -> str:
    words = [f"{key}-{value}" for key, value in {**values, "seed": str(seed)}.items()]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", ",".join(words)).strip("-._")


def _run(
    config: TrainConfig, folder: Path, data_dir: str | Path | None, progress: Progress
) -> Run:
    if not (folder / CONFIG).exists():
        return train(config, folder, data_dir, progress)
    stored = TrainConfig.from_toml(folder / CONFIG)
    wanted = config
    # A size that was chosen for the data is in the stored configuration, but not in
    # this one.
    if "batch_size" not in config.model_fields_set:
        wanted = config.model_copy(update={"batch_size": stored.batch_size})
    if wanted != stored:
        raise ResumeError(
            f"{folder} was trained with another configuration; choose another "
            "folder for this sweep"
        )
    return resume(folder, data_dir, progress)


def _numbered(progress: Progress, number: int, count: int, name: str) -> Progress:
    """Progress of a run as that of the sweep."""

    def shown(what: str, fraction: float, figures: str = "") -> None:
        which = f"{name} ({number + 1} of {count}), {what}"
        progress(which, (number + fraction) / count, figures)

    return shown


def _plain(cell: Cell) -> dict[str, object]:
    figures = {}
    for name, spread in cell.spreads().items():
        figures[name] = {"mean": spread.mean, "deviation": spread.deviation}
    return {
        "values": dict(cell.values),
        "runs": [str(run.folder) for run in cell.runs],
        "figures": figures,
    }
