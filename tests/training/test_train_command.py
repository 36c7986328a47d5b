"""`lipcert train` and `lipcert presets`."""

import json

import pytest
from runs import TINY
from typer.testing import CliRunner

from lipcert.cli import app
from lipcert.errors import ConfigError, OptionError
from lipcert.training import TrainConfig, presets


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False, env={"COLUMNS": "200"})
    assert result.exit_code == 0
    return result.output


def options(*overrides: str) -> list[str]:
    return [part for override in (*TINY, *overrides) for part in ("--set", override)]


def test_train_prints_a_table_with_the_twin_and_the_folder(tmp_path):
    output = invoke("train", "--run-dir", str(tmp_path / "run"), "--quiet", *options("compare_standard=true"))
    summaries = [json.loads((tmp_path / "run" / part / "summary.json").read_text()) for part in ("", "standard")]
    for summary in summaries:
        row = next(line for line in output.splitlines() if summary["loss"] in line.split())
        assert f"{summary['clean']:.2%}" in row
        assert f"{summary['at'][0]['certified']:.2%}" in row
    assert [summary["loss"] for summary in summaries] == ["crm", "standard"]
    assert f"run: {tmp_path / 'run'}" in output


def test_json(tmp_path):
    result = json.loads(invoke("train", "digits", "--run-dir", str(tmp_path), "--json", *options()))
    assert result["folder"] == str(tmp_path)
    assert result["at"][0]["epsilon"] == 0.25


def test_presets_lists_all_with_their_notes():
    output = " ".join(invoke("presets").split())
    for name in presets():
        assert name in output
        assert " ".join(TrainConfig.preset(name).note.split()) in output


def test_errors(tmp_path):
    with pytest.raises(ConfigError, match=r"did you mean 'digits'\?"):
        invoke("train", "digit")
    with pytest.raises(OptionError, match=r"--resume continues a run as it was configured"):
        invoke("train", "digits", "--resume", str(tmp_path))
