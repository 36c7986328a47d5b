"""The page: everything a run folder tells, in one file that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from lipcert.files import write_text
from lipcert.layout import FIGURES, LATEX, MARKDOWN, PAGE
from lipcert.report.drawing import Drawings
from lipcert.report.sections import SECTIONS, Material
from lipcert.report.side_by_side import around_attacked, compare, percent
from lipcert.report.slider import slider
from lipcert.runs import RunFolder, read_runs


def write_report(folders: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write report.html, table.md, table.tex and figures/ into `out`, or into the first folder; returns the page.

    A run with a twin inside its folder is compared with it.
    """
    # Folders are read before anything is written; the page is written last, when its
    # figures are there.
    runs = read_runs(folders)
    target = Path(folders[0] if out is None else out)
    drawings = Drawings(target / FIGURES)
    drawings.accuracy(runs)
    table = compare(runs)
    write_text(target / MARKDOWN, table.markdown())
    write_text(target / LATEX, table.latex())
    write_text(target / PAGE, _render(Material(runs, drawings, slider(runs))))
    return target / PAGE


def _render(material: Material) -> str:
    """The headline and, one after the other, all sections."""
    environment = Environment(
        loader=PackageLoader("lipcert.report"),
        # Names of runs, classes and data come from files, and are text, not HTML.
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["percent"] = percent
    environment.filters["svg"] = Markup
    # Nothing is escaped inside <script>: no text of the JSON may end the element.
    numbers = json.dumps(material.chart.numbers).replace("<", "\\u003c")
    return environment.get_template("report.html.j2").render(
        title=", ".join(run.name for run in material.runs if not run.twin),
        lead=_lead(material.runs),
        sections=[(section, section.content(material)) for section in SECTIONS],
        runs=material.runs,
        many=material.many,
        numbers=Markup(numbers),
    )


def _lead(runs: Sequence[RunFolder]) -> list[str]:
    """The headline in plain words: what the first run reaches, and how the others compare."""
    # All sentences are about one ε, also those on other runs, so that figures can be
    # compared.
    run, epsilon = runs[0], runs[0].summary.epsilons[0]
    trained = f" trained by {run.loss}" if run.loss else ""
    median = float(run.certificates.radius.median())
    sentences = [
        f"{run.model}{trained} classifies {percent(run.clean, 1)} of {len(run.certificates):,} test images of "
        f"{run.data} correctly. For {percent(run.certified_at(epsilon), 1)} it is certified that the prediction is "
        f"right and that no change of l2 size up to {epsilon:.4g} alters it. Half of all predictions have a certified "
        f"radius of {median:.3g} or more."
    ]
    if run.distance is not None:
        standing, around = (
            percent(run.attacked_at(epsilon), 1),
            around_attacked(run, epsilon),
        )
        same = ""
        # Shares of different inputs do not compare: beside a part stand the figures of
        # the same part.
        if around is not None and len(run.distance) < len(run.certificates):
            same = f" ({percent(around[0], 1)} of these are certified, {percent(around[1], 1)} right)"
        sentences.append(
            f"Attacks of that size leave {standing} of the {len(run.distance):,} attacked images standing{same}, "
            "and none has succeeded inside a certified radius."
        )
    for other in runs[1:]:
        who = other.name
        if other.twin:
            who = f"The same network trained for accuracy only, {other.name},"
        sentences.append(
            f"{who} is right on {percent(other.clean, 1)} and certified on "
            f"{percent(other.certified_at(epsilon), 1)} at ε = {epsilon:.4g}."
        )
    return sentences
