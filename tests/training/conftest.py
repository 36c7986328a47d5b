"""Trainings without pictures: galleries and figures are the subject of tests/report."""

import pytest

from lipcert.report import drawing
from lipcert.runs import finishing


@pytest.fixture(autouse=True)
def _without_pictures(monkeypatch) -> None:
    monkeypatch.setattr(finishing, "write_gallery", lambda *_: [])
    monkeypatch.setattr(drawing, "save_figure", lambda figure, path: [])
    monkeypatch.setattr(drawing, "inline_svg", lambda figure, label: "<svg></svg>")
    monkeypatch.setattr(
        "matplotlib.figure.Figure.draw_without_rendering", lambda figure: None
    )
