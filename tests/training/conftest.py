"""Trainings without pictures: galleries and figures are the subject of tests/report."""

from typing import NamedTuple

import pytest
from runs import tiny

import lipcert
from lipcert.report import drawing
from lipcert.runs import finishing
from lipcert.runs.result import Run


class Finished(NamedTuple):
    result: Run
    seen: list[tuple[str, float]]


@pytest.fixture(autouse=True)
def _without_pictures(monkeypatch) -> None:
    leave_out_pictures(monkeypatch)


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Finished:
    """A tiny run, not to be changed, and what it has reported."""
    seen: list[tuple[str, float]] = []
    with pytest.MonkeyPatch.context() as patch:
        leave_out_pictures(patch)
        result = lipcert.train(
            tiny(),
            tmp_path_factory.mktemp("finished") / "run",
            progress=lambda what, fraction, figures="": seen.append((what, fraction)),
        )
    return Finished(result, seen)


def leave_out_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finishing, "write_gallery", lambda *_: [])
    monkeypatch.setattr(drawing, "save_figure", lambda figure, path: [])
    monkeypatch.setattr(drawing, "inline_svg", lambda figure, label: "<svg></svg>")
    monkeypatch.setattr(
        "matplotlib.figure.Figure.draw_without_rendering", lambda figure: None
    )
