"""Every table and figure of the paper by name: what is trained, what is measured, what comes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from lipcert.training import TrainConfig
from lipcert_experiments import runtimes, tables
from lipcert_experiments.plan import Plan
from lipcert_experiments.published import published_rows
from lipcert_experiments.results import Outcome
from lipcert_experiments.tables import (
    ABLATIONS,
    COMPONENTS,
    Study,
    component_key,
    setting_key,
)

ACCURACIES = ("attacked", "estimated")


@dataclass(frozen=True)
class Job:
    """A configuration to train, and the measures that the table needs of it."""

    config: TrainConfig
    measures: tuple[str, ...] = ACCURACIES


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper.

    label: its LaTeX label in the paper. minutes: rough times by budget, "hour" on two cores, "paper" on one GPU.
    jobs: what is trained, by the names that `outcome` uses.
    """

    name: str
    what: str
    label: str
    minutes: Mapping[str, str]
    jobs: Callable[[Plan], dict[str, Job]]
    outcome: Callable[[Study], Outcome]


def _l2(plan: Plan) -> dict[str, Job]:
    jobs: dict[str, Job] = {}
    for data in plan.datasets("mnist", "cifar10", "tiny-imagenet"):
        configs = {
            "Standard": plan.standard(data),
            "GloRo": plan.gloro(data),
            "CRM": plan.config(data),
        }
        jobs |= {f"{data} {method}": Job(config) for method, config in configs.items()}
    return jobs


def _lipschitz(plan: Plan) -> dict[str, Job]:
    datasets = plan.datasets("mnist", "cifar10", "tiny-imagenet")
    return {data: Job(plan.config(data), ("constants",)) for data in datasets}


def _power_iterations(plan: Plan) -> dict[str, Job]:
    counts = (1, 10) if plan.budget == "hour" else (1, 2, 5, 10)
    return {
        f"{data} {count}": Job(plan.config(data, f"estimator.power_iterations={count}"))
        for data in plan.datasets("mnist", "cifar10", "tiny-imagenet")
        for count in counts
    }


def _ablation(data: str, plan: Plan) -> dict[str, Job]:
    return {
        setting_key(row): Job(plan.ablation(data, row)) for row in _settings(data, plan)
    }


def _settings(data: str, plan: Plan) -> list[dict[str, Any]]:
    """The (t, λ, r0) that the budget has time for: of every effect all, or the first and the last, or the first."""
    rows = published_rows(ABLATIONS[data])
    if plan.budget == "paper" or (plan.budget == "hour" and data == "mnist"):
        return rows
    if plan.budget == "hour" and data == "tiny-imagenet":
        return rows[:1]
    firsts = {row["effect"]: row for row in reversed(rows)}
    lasts = {row["effect"]: row for row in rows} if plan.budget == "hour" else {}
    return [row for row in rows if row in (*firsts.values(), *lasts.values())]


def _components(plan: Plan) -> dict[str, Job]:
    variants = {
        "soft": "loss.radius=soft",
        "hard": "loss.radius=hard",
        "naive": "estimator.method=naive",
    }
    data = _smaller(plan)
    return {
        component_key(target, variant): Job(
            plan.config(data, f"estimator.target={target}", variants[variant])
        )
        for target, variant in COMPONENTS
        if plan.budget != "hour" or target == "pairwise" or variant == "soft"
    }


def _radii(plan: Plan) -> dict[str, Job]:
    jobs = {}
    for data in plan.datasets("mnist", "cifar10"):
        jobs[f"{data} CRM"] = Job(
            plan.config(data), ("naive-radii",) if data == "mnist" else ()
        )
        jobs[f"{data} Standard"] = Job(plan.standard(data), ())
    return jobs


def _r0(plan: Plan) -> dict[str, Job]:
    return {
        f"{data} {row['r0']}": Job(plan.ablation(data, row), ())
        for data in plan.datasets("mnist", "cifar10")
        for row in sorted(published_rows(ABLATIONS[data]), key=lambda row: row["r0"])
        if row["effect"] in ("original", "r0")
    }


def _evolution(plan: Plan) -> dict[str, Job]:
    data = _smaller(plan)
    return {
        "CRM + naive": Job(plan.config(data, "estimator.method=naive"), ()),
        "CRM + LipLT": Job(plan.config(data), ()),
        "Standard": Job(plan.standard(data), ()),
    }


def _smaller(plan: Plan) -> str:
    """The paper's CIFAR-10; an hour is only enough for MNIST."""
    return "mnist" if plan.budget == "hour" else "cifar10"


def _nothing(plan: Plan) -> dict[str, Job]:
    return {}


def _times(tiny: str, hour: str, paper: str) -> dict[str, str]:
    return {"tiny": tiny, "hour": hour, "paper": paper}


EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (
        Experiment(
            "table-l2", "Standard, GloRo and CRM: clean, attacked and certified accuracy, beside the published rows",
            "tab:l2Accuracies", _times("10 s", "10 min", "days"), _l2, tables.table_l2,
        ),
        Experiment(
            "table-lipschitz", "mean L_ij, L_i + L_j and √2·L of CRM-trained networks, naive and LipLT",
            "tab:lipschitzComparison", _times("5 s", "5 min", "a day"), _lipschitz, tables.table_lipschitz,
        ),
        Experiment(
            "table-power-iterations", "accuracies over the number of power iterations in training",
            "tab:numberOfPowerIterations", _times("10 s", "6 min", "days"), _power_iterations,
            tables.table_power_iterations,
        ),
        Experiment(
            "table-ablation-mnist", "accuracies over t, λ and r0 on MNIST", "tab:ablationMnist",
            _times("10 s", "30 min", "days"), partial(_ablation, "mnist"), partial(tables.table_ablation, "mnist"),
        ),
        Experiment(
            "table-ablation-cifar10", "accuracies over t, λ and r0 on CIFAR-10", "tab:ablationCifar10",
            _times("10 s", "40 min", "days"), partial(_ablation, "cifar10"), partial(tables.table_ablation, "cifar10"),
        ),
        Experiment(
            "table-ablation-tiny", "accuracies over t, λ and r0 on Tiny-ImageNet", "tab:ablationTinyImagenet",
            _times("10 s", "2 h", "weeks"), partial(_ablation, "tiny-imagenet"),
            partial(tables.table_ablation, "tiny-imagenet"),
        ),
        Experiment(
            "table-components", "pairwise, per class, per network × soft, hard, naive",
            "tab:effectOfEachComponent", _times("15 s", "15 min", "days"), _components, tables.table_components,
        ),
        Experiment(
            "fig-radii", "distribution of certified radii: LipLT against naive, CRM against standard training",
            "fig:certifiedRadiusHistograms", _times("5 s", "8 min", "days"), _radii, tables.figure_radii,
        ),
        Experiment(
            "fig-r0", "distribution of certified radii for several r0", "fig:r0Effect",
            _times("10 s", "12 min", "days"), _r0, tables.figure_r0,
        ),
        Experiment(
            "fig-evolution", "mean pairwise constants over training: CRM + naive, CRM + LipLT, standard",
            "fig:lipschitzEvolution", _times("5 s", "8 min", "a day"), _evolution, tables.figure_evolution,
        ),
        Experiment(
            "fig-depth", "run time over depth", "fig:lipschitzRunTime", _times("20 s", "4 min", "1 min"),
            _nothing, runtimes.figure_depth,
        ),
        Experiment(
            "fig-iterations", "run time over power iterations", "fig:effectOfPowerIteration",
            _times("10 s", "15 min", "1 min"), _nothing, runtimes.figure_iterations,
        ),
        Experiment(
            "fig-input-size", "run time over the size of inputs", "fig:effectOfDataset",
            _times("10 s", "4 min", "1 min"), _nothing, runtimes.figure_input_size,
        ),
    )
}  # fmt: skip
