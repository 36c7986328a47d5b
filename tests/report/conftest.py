"""A real run on the digits with its twin, made once, and its report."""

import shutil
from pathlib import Path

import pytest
from digits_run import CONFIG

import lipcert
from lipcert.report import drawing, write_report


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Path:
    """The folder of a run with a twin; not to be changed."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    lipcert.train(CONFIG, folder)
    return folder


@pytest.fixture
def run(finished, tmp_path) -> Path:
    """A copy of the run without its twin, to be changed."""
    return Path(
        shutil.copytree(
            finished, tmp_path / "copy", ignore=shutil.ignore_patterns("standard")
        )
    )


@pytest.fixture(scope="session")
def page(finished, tmp_path_factory) -> Path:
    """The report of the run and its twin."""
    return write_report([finished], tmp_path_factory.mktemp("report"))


@pytest.fixture
def undrawn(monkeypatch) -> None:
    """Pages without pictures, for tests of words."""
    monkeypatch.setattr(drawing, "save_figure", lambda figure, path: [])
    monkeypatch.setattr(drawing, "inline_svg", lambda figure, label: "<svg></svg>")
    monkeypatch.setattr(
        "matplotlib.figure.Figure.draw_without_rendering", lambda figure: None
    )
