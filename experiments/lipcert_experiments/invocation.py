"""`lipcert reproduce`: train what is missing, measure, write the table and the figure; continue where it stopped."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from lipcert import data
from lipcert.display import TextTable, save_figure
from lipcert.display.style import INK
from lipcert.display.text_table import latex_text
from lipcert.errors import LipcertError, check_choice
from lipcert.files import write_text
from lipcert.layout import CONFIG
from lipcert.progress import Progress, no_progress
from lipcert.runs import Run
from lipcert.training import TrainConfig, resume, train
from lipcert_experiments.experiments import EXPERIMENTS, Experiment, Job
from lipcert_experiments.facts import environment
from lipcert_experiments.measures import Subject, measure
from lipcert_experiments.plan import Plan
from lipcert_experiments.results import Failed, Finished, Outcome
from lipcert_experiments.tables import Study

_UNITS = "l2, pixels in [0, 1]"


@dataclass(frozen=True)
class Reproduction:
    """A finished invocation: its folder, what came out, and which configurations failed, with the reasons."""

    experiment: Experiment
    plan: Plan
    folder: Path
    outcome: Outcome
    statement: str
    failed: Mapping[str, str]

    @property
    def notes(self) -> list[str]:
        """Everything that a reader of the table has to know."""
        failures = [
            f"Failed: {key}: {reason.rstrip('.')}."
            for key, reason in self.failed.items()
        ]
        trained = (
            [self.plan.note]
            if self.plan.note and self.experiment.jobs(self.plan)
            else []
        )
        return [*self.outcome.notes, *trained, *failures, self.statement]

    def table(self) -> TextTable:
        """The table of the experiment; in parentheses the published numbers."""
        title = f"{self.experiment.name}: {self.experiment.what}"
        return replace(
            self.outcome.table.as_text(), title=title, caption=" ".join(self.notes)
        )


def reproduce(
    name: str,
    plan: Plan,
    out: str | Path = "runs/reproduce",
    data_dir: str | Path | None = None,
    progress: Progress = no_progress,
) -> Reproduction:
    """Reproduce a table or figure of the paper.

    Runs are shared by all experiments with the same `out`: they are in `out`/runs, and what is measured on them in
    `out`/measures. The result is in `out`/<experiment>-<budget>: results.json, table.md, table.tex, figure.png and
    figure.svg. What is there already is not computed again. A configuration that fails is part of the result.
    """
    check_choice("experiment", name, tuple(EXPERIMENTS))
    experiment, out = EXPERIMENTS[name], Path(out)
    folder = out / f"{name}-{plan.name}"
    jobs = experiment.jobs(plan)
    load = cache(lambda data_name: data.load(data_name, data_dir))
    results: dict[str, Finished | Failed] = {}
    for k, (key, job) in enumerate(jobs.items()):
        shown = _numbered(progress, f"{k + 1}/{len(jobs)} {key}")
        try:
            run = _trained(job.config, out / "runs", data_dir, shown)
            subject = Subject(
                plan,
                job.config,
                run,
                load(job.config.data),
                out / "measures" / job.config.name,
                shown,
            )
            measured = measure(subject, job.measures)
            results[key] = Finished(
                job.config, run.folder, run.summary, run.metrics, measured
            )
        except (LipcertError, MemoryError, torch.OutOfMemoryError) as error:
            results[key] = Failed(job.config, f"{type(error).__name__}: {error}")
    outcome = experiment.outcome(Study(plan, results, folder, progress))
    failed = {
        key: result.reason
        for key, result in results.items()
        if isinstance(result, Failed)
    }
    facts = environment()
    reproduction = Reproduction(
        experiment,
        plan,
        folder,
        outcome,
        _statement(plan, jobs, results, facts),
        failed,
    )
    _write(reproduction, results, facts)
    return reproduction


def _trained(
    config: TrainConfig, runs: Path, data_dir: str | Path | None, progress: Progress
) -> Run:
    folder = runs / config.name
    if (folder / CONFIG).exists():
        return resume(folder, data_dir, progress)
    return train(config, folder, data_dir, progress)


def _numbered(progress: Progress, prefix: str) -> Progress:
    def report(what: str, fraction: float, figures: str = "") -> None:
        progress(f"{prefix}: {what}", fraction, figures)

    return report


def _statement(
    plan: Plan,
    jobs: Mapping[str, Job],
    results: Mapping[str, Finished | Failed],
    facts: Mapping[str, Any],
) -> str:
    """What every output says about itself."""
    parts = [f"Budget {plan.budget}"]
    if jobs:
        configs = [job.config for job in jobs.values()]
        summaries = [
            result.summary
            for result in results.values()
            if isinstance(result, Finished)
        ]
        titles = _listed(summary.data_title for summary in summaries) or _listed(
            config.data for config in configs
        )
        parts += [
            f"data: {titles}",
            f"networks: {_listed(config.model for config in configs)}",
            f"ε: {_listed(_epsilon(config) for config in configs)} ({_UNITS})",
            f"epochs: {_listed(config.epochs for config in configs)}",
            f"seed: {_listed(config.seed for config in configs)}",
            f"guarantee: {_listed(summary.guarantee for summary in summaries) or 'none'}",
        ]
    commit = facts["commit"] or "unknown"
    parts += [
        f"hardware: {facts['hardware']}",
        f"lipcert {facts['lipcert']}, commit {commit}",
        facts["date"],
    ]
    return "; ".join(parts) + "."


def _epsilon(config: TrainConfig) -> str:
    low, high = config.input_range
    own = (
        f", which is {config.epsilons[0] * (high - low):.4g} in [{low:g}, {high:g}]"
        if high - low != 1
        else ""
    )
    return f"{config.epsilons[0]:.4g}{own}"


def _listed(values: Any) -> str:
    return ", ".join(dict.fromkeys(map(str, values)))


def _write(
    done: Reproduction,
    results: Mapping[str, Finished | Failed],
    facts: Mapping[str, Any],
) -> None:
    experiment, outcome, folder = done.experiment, done.outcome, done.folder
    notes = done.notes
    content = {
        "name": experiment.name, "what": experiment.what, "paper": experiment.label,
        "budget": done.plan.budget, "protocol": done.plan.protocol, "units": _UNITS,
        "command": _command(done), "environment": facts, "notes": notes,
        "runs": {key: _run_facts(result) for key, result in results.items()},
        "table": outcome.table.as_dict(), "numbers": outcome.numbers,
    }  # fmt: skip
    _text(folder / "results.json", json.dumps(content, indent=1, ensure_ascii=False))
    table = outcome.table.as_text()
    lines = [
        f"# {experiment.name}: {experiment.what}",
        "",
        table.markdown(),
        *(f"{note}\n" for note in notes),
    ]
    _text(folder / "table.md", "\n".join(lines).rstrip())
    comments = [
        f"% {latex_text(line)}" for note in notes for line in textwrap.wrap(note, 110)
    ]
    _text(folder / "table.tex", "\n".join([*comments, table.latex().rstrip()]))
    if outcome.figure is not None:
        width = round(outcome.figure.get_figwidth() * 16)
        outcome.figure.supxlabel(
            "\n".join(textwrap.wrap(done.statement, width)), fontsize=7, color=INK
        )
        save_figure(outcome.figure, folder / "figure")


def _command(done: Reproduction) -> str:
    """The command that gives this; where data and results were is nobody's business."""
    plan = done.plan
    options = [f"--budget {plan.budget}", f"--protocol {plan.protocol}"]
    options += [f"--epochs {plan.epochs}"] if plan.epochs else []
    options += [f"--seed {plan.seed}"] if plan.seed else []
    return " ".join(["lipcert reproduce", done.experiment.name, *options])


def _run_facts(result: Finished | Failed) -> dict[str, Any]:
    config = result.config
    facts: dict[str, Any] = {
        "run": config.name, "data": config.data, "model": config.model, "epochs": config.epochs,
        "warmup_epochs": config.warmup_epochs, "schedule": config.schedule.model_dump(), "seed": config.seed,
        "loss": config.loss.model_dump(), "estimator": config.estimator.model_dump(),
        "input_range": config.input_range, "epsilon": config.epsilons[0],
    }  # fmt: skip
    if isinstance(result, Failed):
        return {**facts, "failed": result.reason}
    kept = ("data_title", "data_note", "inputs", "method", "target", "guarantee", "mean_constant", "clean",
            "mean_radius", "median_radius", "at", "training_seconds", "certifying_seconds")  # fmt: skip
    summary = result.summary.as_dict()
    measured = {
        name: {
            key: value
            for key, value in found.items()
            if key not in ("folder", "fingerprint")
        }
        for name, found in result.measured.items()
    }
    return {**facts, **{key: summary.get(key) for key in kept}, "measured": measured}


def _text(path: Path, text: str) -> None:
    write_text(path, text + "\n")
