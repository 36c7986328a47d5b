"""Sweeps: means and deviations of the runs themselves, and nothing trained twice."""

import json
from statistics import mean, stdev

import pytest
from runs import tiny
from typer.testing import CliRunner

import lipcert
from lipcert.cli import app
from lipcert.errors import ConfigError, ResumeError
from lipcert.training import sweeping as sweeps


def test_two_values_over_two_seeds(tmp_path, monkeypatch):
    (tmp_path / "mine.toml").write_text(tiny("epochs=2", "attack_inputs=0").to_toml())
    monkeypatch.chdir(tmp_path)
    command = [
        "sweep",
        "mine.toml",
        "--set",
        "loss.t=3,8",
        "--seeds",
        "2",
        "--out",
        "swept",
        "--quiet",
    ]
    trained = []
    begin = sweeps.train

    def stopping(config, *rest):
        if len(trained) == 3:
            raise KeyboardInterrupt
        trained.append(config)
        return begin(config, *rest)

    monkeypatch.setattr(sweeps, "train", stopping)
    assert CliRunner().invoke(app, command).exit_code != 0
    monkeypatch.setattr(
        sweeps,
        "train",
        lambda config, *rest: trained.append(config) or begin(config, *rest),
    )
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert [(config.loss.t, config.seed) for config in trained] == [
        (3, 0),
        (3, 1),
        (8, 0),
        (8, 1),
    ]
    assert "report: swept/report.html" in result.stdout
    lipcert.sweep("mine.toml", ["loss.t=3,8"], 2, "swept")
    assert len(trained) == 4
    cells = json.loads((tmp_path / "swept/sweep.json").read_text())
    assert [cell["values"] for cell in cells] == [{"loss.t": "3"}, {"loss.t": "8"}]
    for cell in cells:
        clean = [
            json.loads((tmp_path / run / "summary.json").read_text())["clean"]
            for run in cell["runs"]
        ]
        assert cell["figures"]["clean"] == {
            "mean": pytest.approx(mean(clean)),
            "deviation": pytest.approx(stdev(clean)),
        }
        assert f"{mean(clean):.2%} ± {stdev(clean):.2%}" in result.stdout
    with pytest.raises(
        ResumeError,
        match=r"seed-0 was trained with another configuration; choose another folder",
    ):
        sweeps.sweep(tiny("epochs=3"), ["loss.t=3"], 1, tmp_path / "swept")


def test_a_sweep_over_epsilons_shows_what_each_cell_has(tmp_path, monkeypatch):
    (tmp_path / "mine.toml").write_text(tiny("epochs=2", "attack_inputs=0").to_toml())
    monkeypatch.chdir(tmp_path)
    command = [
        "sweep",
        "mine.toml",
        "--set",
        "epsilons=[0.1],[0.3]",
        "--seeds",
        "1",
        "--out",
        "swept",
        "--quiet",
    ]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0
    assert "0.1" in result.stdout
    assert "0.3" in result.stdout


def test_choices():
    assert sweeps.read_choice("epsilons=[0.1, 0.2],[0.5]") == (
        "epsilons",
        ["[0.1, 0.2]", "[0.5]"],
    )
    assert sweeps.read_choice("model=mlp-64, 2C2F") == ("model", ["mlp-64", "2C2F"])
    for wrong in ("loss.t", "loss.t=", "=3", "loss.t=3,,5 , "):
        with pytest.raises(
            ConfigError, match=r"expected key=value,value, such as loss.t=3,5,8"
        ):
            sweeps.read_choice(wrong)
