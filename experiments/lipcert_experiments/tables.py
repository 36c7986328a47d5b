"""From finished runs to tables and figures, the published number beside ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lipcert.certificate import Certificates
from lipcert.certificate.stream import read_certificates
from lipcert_experiments import pictures
from lipcert_experiments.plan import ATTACKED, DATA, Plan
from lipcert_experiments.published import published_row, published_rows
from lipcert_experiments.results import Cell, Failed, Finished, Outcome, Row, Table

ABLATIONS = {
    "mnist": "tab:ablationMnist",
    "cifar10": "tab:ablationCifar10",
    "tiny-imagenet": "tab:ablationTinyImagenet",
}
COMPONENTS = [(target, variant) for target in ("pairwise", "per-class", "network")
              for variant in ("soft", "hard", "naive")]  # fmt: skip
_ACCURACIES = ("clean", "attacked", "certified", "estimate")
_NOTE = (
    "Percent; in parentheses the published number. Certified: by guaranteed bounds, rounding included. Estimate: by "
    "power iteration on the constants that the network was trained with, as the published certified accuracies are."
)


@dataclass(frozen=True)
class Study:
    """What an outcome is made of: the results by the names of their jobs, and a folder for measurements."""

    plan: Plan
    results: Mapping[str, Finished | Failed]
    folder: Path
    progress: Callable[[str, float], None]

    @property
    def finished(self) -> dict[str, Finished]:
        return {
            key: result
            for key, result in self.results.items()
            if isinstance(result, Finished)
        }


def table_l2(study: Study) -> Outcome:
    """tab:l2Accuracies: our rows and, below each data set, those of methods that are only published."""
    rows = []
    for data in study.plan.datasets("mnist", "cifar10", "tiny-imagenet"):
        for row in published_rows("tab:l2Accuracies"):
            if row["data"] == data:
                result = study.results.get(f"{data} {row['method']}")
                model = result.config.model if result else row["model"]
                title = study.plan.title(data) if result else DATA[data]
                rows.append(_accuracies((title, row["method"], model), result, row))
    return Outcome(
        Table(("data", "method", "model"), _ACCURACIES, rows), _accuracy_notes(study)
    )


def table_power_iterations(study: Study) -> Outcome:
    """tab:numberOfPowerIterations."""
    rows = []
    for key, result in study.results.items():
        data, count = key.split()
        row = published_row(
            "tab:numberOfPowerIterations", data=data, iterations=int(count)
        )
        rows.append(_accuracies((study.plan.title(data), count), result, row))
    return Outcome(
        Table(("data", "iterations"), _ACCURACIES, rows), _accuracy_notes(study)
    )


def table_ablation(data: str, study: Study) -> Outcome:
    """tab:ablation…: the effects of λ, r0 and t; settings are named by the paper's values."""
    rows = [
        _accuracies(
            (row["effect"], setting_key(row)), study.results[setting_key(row)], row
        )
        for row in published_rows(ABLATIONS[data])
        if setting_key(row) in study.results
    ]
    notes = _accuracy_notes(study)
    if study.plan.budget == "tiny" or study.plan.protocol == "authors":
        notes.append(
            "Settings have the paper's values; they were changed in proportion to the units trained in."
        )
    return Outcome(Table(("effect", "setting"), _ACCURACIES, rows), notes)


def table_components(study: Study) -> Outcome:
    """tab:effectOfEachComponent; the published numbers are those of CIFAR-10."""
    rows = []
    for target, variant in COMPONENTS:
        if (result := study.results.get(component_key(target, variant))) is not None:
            row = published_row(
                "tab:effectOfEachComponent", target=target, variant=variant
            )
            rows.append(_accuracies((target, variant), result, row))
    notes = [
        *_accuracy_notes(study),
        "soft, hard: the radius in the loss, with LipLT; naive: soft, with naive constants.",
    ]
    if study.plan.budget != "paper":
        notes.append("The published numbers are those of CIFAR-10.")
    return Outcome(Table(("constants", "variant"), _ACCURACIES, rows), notes)


def table_lipschitz(study: Study) -> Outcome:
    """tab:lipschitzComparison: guaranteed constants, estimates, and how many times smaller LipLT is."""
    columns = {"L_ij": "pairwise", "L_i + L_j": "per-class", "√2·L": "network"}
    rows, notes = (
        [],
        [
            "Means over all pairs of classes; in parentheses the published number, an estimate."
        ],
    )
    for data, result in study.results.items():
        title, label = study.plan.title(data), "tab:lipschitzComparison"
        theirs = {
            method: published_row(label, data=data, method=method)
            for method in ("naive", "liplt")
        }
        if isinstance(result, Failed):
            rows.append(Row((title, "naive, LipLT", ""), {}, result.reason))
            continue
        measured = result.measured["constants"]
        for kind in ("guaranteed", "estimate"):
            ours = measured[kind]
            for method, name in (("naive", "naive"), ("liplt", "LipLT")):
                if method in ours:
                    cells = {
                        c: Cell(ours[method][t], theirs[method].get(t), 3)
                        for c, t in columns.items()
                    }
                    rows.append(Row((title, name, kind), cells))
            if len(ours) == 2:
                cells = {c: Cell(ours["naive"][t] / ours["liplt"][t], theirs["naive"][t] / theirs["liplt"][t], 3)
                         for c, t in columns.items()}  # fmt: skip
                rows.append(Row((title, "naive / LipLT", kind), cells))
        notes += [
            f"{title}, {method}: {words}."
            for method, words in measured["guarantee"].items()
        ]
    return Outcome(Table(("data", "method", "kind"), tuple(columns), rows), notes)


def figure_radii(study: Study) -> Outcome:
    """fig:certifiedRadiusHistograms: LipLT against naive, then CRM against standard training per data set."""
    rows: list[Row] = []
    panels: dict[str, dict[str, Certificates]] = {}
    for key, result in study.results.items():
        data, method = key.split()
        title = study.plan.title(data)
        published = published_row("tab:l2Accuracies", data=data, method=method)
        if isinstance(result, Failed):
            rows.append(Row((title, method, "LipLT"), {}, result.reason))
            continue
        by_liplt = read_certificates(result.folder / "certificates.csv")
        panels.setdefault(f"{title}: training", {})[method] = by_liplt
        rows.append(
            _radius_row(
                (title, method, "LipLT"),
                by_liplt,
                result.config.epsilons[0],
                published["certified"],
            )
        )
        if (naive := result.measured.get("naive-radii")) is not None:
            by_naive = read_certificates(Path(naive["folder"]) / "certificates.csv")
            panels = {
                f"{title}: bound (CRM)": {"LipLT": by_liplt, "naive": by_naive},
                **panels,
            }
            said = published_row("fig:certifiedRadiusImprovedVsNaive", data=data)[
                "certified"
            ]
            rows.append(
                _radius_row(
                    (title, method, "naive"), by_naive, result.config.epsilons[0], said
                )
            )
    table = Table(
        ("data", "training", "bound"),
        ("certified", "median radius", "mean radius"),
        rows,
    )
    notes = [
        f"Certified at ε in percent, in parentheses the published number. Radii: {_UNITS}."
    ]
    return Outcome(table, notes, pictures.radii(panels) if panels else None)


def figure_r0(study: Study) -> Outcome:
    """fig:r0Effect; r0 is named by the paper's value."""
    rows: list[Row] = []
    panels: dict[str, dict[str, Certificates]] = {}
    for key, result in study.results.items():
        data, r0 = key.split()
        title = study.plan.title(data)
        if isinstance(result, Failed):
            rows.append(Row((title, r0), {}, result.reason))
            continue
        found = read_certificates(result.folder / "certificates.csv")
        row = next(row for row in published_rows(ABLATIONS[data])
                   if row["effect"] in ("original", "r0") and row["r0"] == float(r0))  # fmt: skip
        panels.setdefault(title, {})[f"r0 = {r0}"] = found
        rows.append(
            _radius_row((title, r0), found, result.config.epsilons[0], row["certified"])
        )
    table = Table(("data", "r0"), ("certified", "median radius", "mean radius"), rows)
    notes = [
        f"Certified at ε in percent, in parentheses the published number. Radii: {_UNITS}."
    ]
    return Outcome(table, notes, pictures.radii(panels) if panels else None)


def figure_evolution(study: Study) -> Outcome:
    """fig:lipschitzEvolution: estimates after every epoch."""
    columns = (
        "naive at most",
        "naive at the end",
        "LipLT at the end",
        "naive / LipLT at the end",
    )
    rows, panels = [], {}
    for name, result in study.results.items():
        if isinstance(result, Failed):
            rows.append(Row((name,), {}, result.reason))
            continue
        epochs = [record["epoch"] for record in result.metrics]
        naive, liplt = (
            [record[f"estimated_mean_{m}"] for record in result.metrics]
            for m in ("naive", "liplt")
        )
        panels[name] = {"LipLT": (epochs, liplt), "naive": (epochs, naive)}
        numbers = (max(naive), naive[-1], liplt[-1], naive[-1] / liplt[-1])
        rows.append(
            Row(
                (name,),
                {c: Cell(v, digits=3) for c, v in zip(columns, numbers, strict=True)},
            )
        )
    notes = [
        "Estimates of the mean pairwise constants after every epoch; the paper shows CIFAR-10 and no numbers."
    ]
    curves = {
        name: {m: {"epochs": e, "values": v} for m, (e, v) in panel.items()}
        for name, panel in panels.items()
    }
    figure = pictures.evolution(panels) if panels else None
    return Outcome(Table(("training",), columns, rows), notes, figure, curves)


def setting_key(row: Mapping[str, Any]) -> str:
    """(t, λ, r0) in words."""
    return f"t = {row['t']}, λ = {row['weight']}, r0 = {row['r0']}"


def component_key(target: str, variant: str) -> str:
    return f"{target} {variant}"


_UNITS = "l2, pixels in [0, 1]"


def _accuracies(
    heads: tuple[str, ...],
    result: Finished | Failed | None,
    published: Mapping[str, Any],
) -> Row:
    theirs = {name: published.get(name) for name in ("clean", "attacked", "certified")}
    theirs["estimate"] = theirs["certified"]
    ours: dict[str, float] = {}
    if isinstance(result, Finished):
        ours = {
            "clean": result.summary.clean, "certified": result.summary.at[0].certified,
            "attacked": result.measured["attacked"]["attacked"], "estimate": result.measured["estimated"]["certified"],
        }  # fmt: skip
    cells = {
        name: Cell(100 * ours[name] if name in ours else None, theirs[name])
        for name in _ACCURACIES
    }
    return Row(heads, cells, result.reason if isinstance(result, Failed) else "")


def _radius_row(
    heads: tuple[str, ...], found: Certificates, epsilon: float, published: float | None
) -> Row:
    certified = found.certified_accuracy(epsilon)
    assert isinstance(certified, float)
    median, mean = float(found.radius.median()), float(found.radius.mean())
    cells = {
        "certified": Cell(100 * certified, published),
        "median radius": Cell(median, digits=4),
        "mean radius": Cell(mean, digits=4),
    }
    return Row(heads, cells)


def _accuracy_notes(study: Study) -> list[str]:
    pgd = (
        "the authors' PGD (signs, scaled to the sphere)"
        if study.plan.protocol == "authors"
        else "l2 PGD"
    )
    settings: Sequence[Any] = [
        result.measured["attacked"] for result in study.finished.values()
    ]
    steps, count = (
        (settings[0]["steps"], settings[0]["inputs"])
        if settings
        else (0, ATTACKED[study.plan.budget])
    )
    notes = [
        _NOTE,
        f"Attacked: {pgd}, {steps} steps, on the first {count:,} test inputs; the rest on all.",
    ]
    if study.plan.budget == "tiny":
        notes.append(
            "The digits stand in for the paper's data: the published numbers are not comparable."
        )
    return notes
