"""The sections of the page, in their order: an anchor, a title, a template, and what the template shows.

A section is a function of the material that returns what its template needs. To add
one, write that function here and, unless "figures.html.j2" draws it already, a template
in the folder beside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lipcert.report.drawing import Drawings, Drawn, data_uri
from lipcert.report.origin import origins
from lipcert.report.side_by_side import compare
from lipcert.report.slider import FRAME, Slider, run_colours
from lipcert.runs import RunFolder
from lipcert.runs.folder_parts import Picture

Content = Mapping[str, Any]
_GROUPS = {
    "most robust": "The most robust of the correct predictions",
    "least robust": "The least robust of the correct predictions",
    "wrong": "Wrong predictions with the largest radii",
}


@dataclass(frozen=True)
class Material:
    """What sections are made of."""

    runs: Sequence[RunFolder]
    drawings: Drawings
    chart: Slider

    @property
    def many(self) -> bool:
        """Whether runs are compared."""
        return len(self.runs) > 1

    @property
    def any_attacked(self) -> bool:
        return any(run.distance is not None for run in self.runs)

    def absent(
        self, what: str, name: str, there: Callable[[RunFolder], bool]
    ) -> list[str]:
        """Sentences on why some runs lack something: one for all runs with the same reason."""
        by_reason: dict[str, list[str]] = {}
        for run in self.runs:
            if not there(run):
                reason = run.missing.get(name, "the folder holds none")
                # Reasons are keys: ten runs without attacks are one sentence.
                by_reason.setdefault(reason, []).append(run.name)
        sentences = []
        for reason, names in by_reason.items():
            sentences.append(f"{what} left out for {', '.join(names)}: {reason}.")
        return sentences


@dataclass(frozen=True)
class Section:
    """A part of the page."""

    anchor: str
    title: str
    template: str
    content: Callable[[Material], Content]


SECTIONS: list[Section] = []


def section(
    anchor: str, title: str, template: str = "figures.html.j2"
) -> Callable[..., Any]:
    """Decorator: the function is the content of the next section of the page."""

    def register(
        content: Callable[[Material], Content],
    ) -> Callable[[Material], Content]:
        # The order of the page is that of the functions in this file.
        SECTIONS.append(Section(anchor, title, template, content))
        return content

    return register


def _figures(
    text: str, groups: Sequence[tuple[str, Sequence[Drawn]]], absent: Sequence[str] = ()
) -> Content:
    """What figures.html.j2 shows: a paragraph, groups of figures with their titles, and what is left out."""
    return {
        "text": text,
        "groups": [group for group in groups if group[1]],
        "absent": absent,
    }


@section("runs", "The runs", "runs.html.j2")
def runs_section(material: Material) -> Content:
    return {
        "table": compare(material.runs),
        "colours": run_colours(material.runs),
        "any_attacked": material.any_attacked,
    }


@section("accuracy", "Certified accuracy", "accuracy.html.j2")
def accuracy_section(material: Material) -> Content:
    local = []
    for run in material.runs:
        shares = run.summary.local_shares()
        if shares:
            local.append(f"{run.name}: {shares}.")
    return {
        "chart": material.chart,
        "frame": FRAME,
        "colours": run_colours(material.runs),
        "any_attacked": material.any_attacked,
        "local": local,
        "absent": material.absent(
            "Accuracy under attack is", "attacks", lambda run: run.distance is not None
        ),
    }


@section("radii", "Certified radii")
def radii_section(material: Material) -> Content:
    text = (
        "How far each test input is from being classified differently, provably. The line is the share of inputs that "
        "are classified correctly and reach a radius."
    )
    return _figures(text, [("", material.drawings.radii(material.runs))])


@section("contributions", "Where the bound comes from")
def contributions_section(material: Material) -> Content:
    text = (
        "What each layer adds to the mean Lipschitz constant of the differences between two classes, guaranteed. The "
        "naive bound multiplies norms, so that all of it passes through the last nonlinearity; LipLT also lets the "
        "linear part of every nonlinearity pass."
    )
    drawn = [
        material.drawings.contributions(run)
        for run in material.runs
        if run.contributions
    ]
    absent = material.absent(
        "The contributions are", "bound", lambda run: bool(run.contributions)
    )
    # Runs without any contributions have their sentence already.
    absent += material.absent(
        "The naive method is",
        "constants",
        lambda run: run.constants is not None or not run.contributions,
    )
    return _figures(text, [("", drawn)], absent)


@section("pairwise", "Constants between classes")
def pairwise_section(material: Material) -> Content:
    text = (
        "How fast the difference between two logits can change, guaranteed. A margin divided by this constant is a "
        "radius."
    )
    drawn = [
        material.drawings.pairwise(run)
        for run in material.runs
        if run.pairwise is not None
    ]
    absent = material.absent(
        "The constants are", "bound", lambda run: run.pairwise is not None
    )
    return _figures(text, [("", drawn)], absent)


@section("training", "Training")
def training_section(material: Material) -> Content:
    text = (
        "Over the epochs. Constants and certified accuracies are estimates here, by power iteration: only the figures "
        "above are certified."
    )
    groups = [
        (run.name, material.drawings.training(run))
        for run in material.runs
        if run.metrics
    ]
    absent = material.absent(
        "The training is", "metrics", lambda run: bool(run.metrics)
    )
    return {**_figures(text, groups, absent), "layout": "three"}


@section("gallery", "Images", "gallery.html.j2")
def gallery_section(material: Material) -> Content:
    return {
        "galleries": [
            (run.name, _gallery(run)) for run in material.runs if run.gallery
        ],
        "absent": material.absent(
            "The images are", "gallery", lambda run: bool(run.gallery)
        ),
    }


def _gallery(run: RunFolder) -> list[tuple[str, list[Content]]]:
    """The pictures by group."""
    groups = []
    for group, title in _GROUPS.items():
        cards = []
        for picture in run.gallery:
            if picture.example.group == group:
                cards.append(_card(picture, run.class_names))
        # A group without pictures, such as wrong predictions of a perfect network, has
        # no title either.
        if cards:
            groups.append((title, cards))
    return groups


def _card(picture: Picture, names: Sequence[str]) -> Content:
    """An image and the closest other one found, with names instead of numbers of classes."""
    example = picture.example
    card: dict[str, Any] = {
        "idx": example.idx,
        "label": names[example.label],
        "prediction": names[example.prediction],
        # #: 0.500, not 0.5, so that cards line up.
        "radius": f"{example.radius:#.3g}",
        "image": data_uri(picture.image),
        "adversarial": None,
    }
    if example.distance is not None and example.adversarial_prediction is not None:
        card["adversarial"] = data_uri(picture.adversarial)
        card["other"] = names[example.adversarial_prediction]
        card["distance"] = f"{example.distance:#.3g}"
    return card


@section("repeat", "To repeat it", "repeat.html.j2")
def repeat_section(material: Material) -> Content:
    return {
        "origins": origins(material.runs),
        "absent": material.absent(
            "The environment is", "environment", lambda run: run.environment is not None
        ),
    }
