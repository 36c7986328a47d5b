"""The page: everything a run folder tells, in one file that needs nothing else."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from lipcert.files import replace_file
from lipcert.report import slider as chart
from lipcert.report.folder import RunFolder, read_runs
from lipcert.report.pictures import Drawn, Pictures, data_uri
from lipcert.report.table import NOTHING, compare, duration, percent

PAGE, MARKDOWN, LATEX, FIGURES = "report.html", "table.md", "table.tex", "figures"
_GROUPS = {
    "most robust": "The most robust of the correct predictions",
    "least robust": "The least robust of the correct predictions",
    "wrong": "Wrong predictions with the largest radii",
}


@dataclass(frozen=True)
class Section:
    """The figures of several runs, and for the runs without data the reasons."""

    figures: Sequence[Drawn]
    reasons: Sequence[str]


def write_report(folders: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write report.html, table.md, table.tex and figures/ into `out`, or into the first folder; returns the page.

    A run with a twin inside its folder is compared with it.
    """
    runs = read_runs(folders)
    target = Path(out) if out is not None else Path(folders[0])
    table = compare(runs)
    page = _render(runs, Pictures(target / FIGURES))
    for name, text in ((MARKDOWN, table.markdown()), (LATEX, table.latex()), (PAGE, page)):
        with replace_file(target / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return target / PAGE


def _render(runs: Sequence[RunFolder], pictures: Pictures) -> str:
    environment = Environment(
        loader=PackageLoader("lipcert.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"percent": percent, "svg": Markup}
    pictures.accuracy(runs)
    drawing = chart.slider(runs)
    return environment.get_template("report.html.j2").render(
        runs=runs,
        first=runs[0],
        title=", ".join(run.name for run in runs if not run.twin),
        lead=_lead(runs),
        table=compare(runs),
        chart=drawing,
        layout=chart,
        colours=chart.run_colours(runs),
        numbers=Markup(json.dumps(drawing.numbers).replace("<", "\\u003c")),
        any_attacked=any(run.distance is not None for run in runs),
        unattacked=_reasons(runs, "attacks", lambda run: run.distance is not None),
        radii=pictures.radii(runs),
        contributions=_section(
            runs, "bound", lambda run: bool(run.contributions), lambda r: [pictures.contributions(r)]
        ),
        without_naive=_reasons(runs, "constants", lambda run: run.constants is not None or not run.contributions),
        pairwise=_section(runs, "bound", lambda run: run.pairwise is not None, lambda run: [pictures.pairwise(run)]),
        training=[(run, pictures.training(run)) for run in runs if run.metrics],
        no_training=_reasons(runs, "metrics", lambda run: bool(run.metrics)),
        gallery=[(run, _gallery(run)) for run in runs if run.gallery],
        no_gallery=_reasons(runs, "gallery", lambda run: bool(run.gallery)),
        origins=_origins(runs),
        no_origin=_reasons(runs, "environment", lambda run: run.environment is not None),
    )


def _section(
    runs: Sequence[RunFolder], part: str, there: Callable[[RunFolder], bool], draw: Callable[[RunFolder], list[Drawn]]
) -> Section:
    return Section([drawn for run in runs if there(run) for drawn in draw(run)], _reasons(runs, part, there))


def _reasons(runs: Sequence[RunFolder], part: str, there: Callable[[RunFolder], bool]) -> list[str]:
    """Why some runs lack a part: one sentence for all runs with the same reason."""
    by_reason: dict[str, list[str]] = {}
    for run in runs:
        if not there(run):
            by_reason.setdefault(run.missing.get(part, "the folder holds none"), []).append(run.name)
    return [f"{', '.join(names)}: {reason}" for reason, names in by_reason.items()]


def _lead(runs: Sequence[RunFolder]) -> list[str]:
    """The headline in plain words: what the first run reaches, and how the others compare."""
    run, epsilon = runs[0], runs[0].epsilons[0]
    trained = f" trained by {run.loss}" if run.loss else ""
    median = float(run.certificates.radius.median())
    sentences = [
        f"{run.model}{trained} classifies {percent(run.clean, 1)} of {len(run.certificates):,} test images of "
        f"{run.data} correctly. For {percent(run.certified_at(epsilon), 1)} it is certified that the prediction is "
        f"right and that no change of l2 size up to {epsilon:.4g} alters it. Half of all predictions have a certified "
        f"radius of {median:.3g} or more."
    ]
    if (left := run.attacked_at(epsilon)) is not None and run.distance is not None:
        sentences.append(
            f"Attacks of that size leave {percent(left, 1)} of the {len(run.distance):,} attacked images standing, "
            "and none has succeeded inside a certified radius."
        )
    for other in runs[1:]:
        who = f"The same network trained for accuracy only, {other.name}," if other.twin else other.name
        sentences.append(
            f"{who} is right on {percent(other.clean, 1)} and certified on "
            f"{percent(other.certified_at(epsilon), 1)} at ε = {epsilon:.4g}."
        )
    return sentences


def _gallery(run: RunFolder) -> list[tuple[str, list[dict[str, Any]]]]:
    """The pictures by group, with names instead of numbers of classes."""
    names = run.class_names
    groups = []
    for group, title in _GROUPS.items():
        cards = []
        for picture in run.gallery:
            facts = picture.facts
            if facts["group"] != group:
                continue
            found = facts["distance"] is not None
            cards.append(
                {
                    "idx": facts["idx"], "label": names[facts["label"]], "prediction": names[facts["prediction"]],
                    "radius": f"{facts['radius']:#.3g}", "image": data_uri(picture.image),
                    "adversarial": data_uri(picture.adversarial) if found else None,
                    "other": names[facts["adversarial_prediction"]] if found else None,
                    "distance": f"{facts['distance']:#.3g}" if found else None,
                }
            )  # fmt: skip
        if cards:
            groups.append((title, cards))
    return groups


def _origins(runs: Sequence[RunFolder]) -> list[tuple[RunFolder, dict[str, str]]]:
    """The facts of every run; of a twin, only those in which it differs from the run that it was made with."""
    result: list[tuple[RunFolder, dict[str, str]]] = []
    shared: dict[str, str] = {}
    for run in runs:
        facts = _origin(run)
        if run.twin:
            facts = {name: value for name, value in facts.items() if name != "command" and shared.get(name) != value}
        else:
            shared = facts
        result.append((run, facts))
    return result


def _origin(run: RunFolder) -> dict[str, str]:
    """Everything needed to repeat a run, as far as the folder tells."""
    summary, facts = run.summary, run.environment or {}
    data = facts.get("data", {})
    hardware = [str(facts[key]) for key in ("processor", "gpu", "machine") if facts.get(key)]
    hardware += [f"{key}: {facts[key]}" for key in ("cores", "threads", "processes") if facts.get(key)]
    versions = {"Python": facts.get("python"), **facts.get("versions", {})}
    parts = {"training": "training_seconds", "certifying": "certifying_seconds", "attacking": "attacking_seconds"}
    seconds = [(word, summary.get(key)) for word, key in {**parts, "in all": "seconds"}.items()]
    rows = {
        "command": _command(run),
        "note": summary.get("note"),
        "guarantee": f"{summary.get('guarantee', NOTHING)}; executed in {summary.get('execution', 'float32')}, "
        "rounding included",
        "method": f"{summary.get('method', NOTHING)}, {summary.get('target', NOTHING)}",
        "units": summary.get("units"),
        "data": ", ".join(str(value) for value in (run.data, summary.get("data_note") or data.get("note")) if value),
        "data (SHA-256)": data.get("checksum"),
        "model (SHA-256)": summary.get("fingerprint"),
        "seed": facts.get("seed"),
        "time": ", ".join(f"{word} {duration(value)}" for word, value in seconds if value is not None),
        "hardware": ", ".join(hardware),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
    }
    return {name: str(value) for name, value in rows.items() if value not in (None, "")}


def _command(run: RunFolder) -> str | None:
    """The command that made the folder; for a run started from Python, the one that does the same."""
    program, *arguments = (run.environment or {}).get("command") or [""]
    if Path(program).name in ("lipcert", "__main__.py"):
        return shlex.join(["lipcert", *arguments])
    return f"lipcert train {shlex.quote(str(run.folder / 'config.toml'))}" if run.config else None
