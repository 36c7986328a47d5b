"""`lipcert train` and `lipcert presets`."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from unittest import mock

import pytest
from rich.console import Console
from runs import TINY
from typer.testing import CliRunner

from lipcert import cli
from lipcert.commands import progress_bar as progress
from lipcert.display import TextTable
from lipcert.errors import ConfigError, OptionError
from lipcert.runs import read_runs
from lipcert.training import TrainConfig, presets


def invoke(*arguments: str) -> str:
    with mock.patch.object(cli.console, "_width", 200):
        result = CliRunner().invoke(cli.app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def options(*overrides: str) -> list[str]:
    return [part for override in (*TINY, *overrides) for part in ("--set", override)]


def test_train_prints_a_table_with_the_twin_and_the_folder(tmp_path):
    output = invoke(
        "train",
        "--run-dir",
        str(tmp_path / "run"),
        "--quiet",
        *options("compare_standard=true"),
    )
    summaries = [
        json.loads((tmp_path / "run" / part / "summary.json").read_text())
        for part in ("", "standard")
    ]
    for summary in summaries:
        row = next(
            line for line in output.splitlines() if summary["loss"] in line.split()
        )
        assert f"{summary['clean']:.2%}" in row
        assert f"{summary['at'][0]['certified']:.2%}" in row
    assert [summary["loss"] for summary in summaries] == ["crm", "standard"]
    assert f"run: {tmp_path / 'run'}" in output


def test_json(tmp_path):
    result = json.loads(
        invoke("train", "digits", "--run-dir", str(tmp_path), "--json", *options())
    )
    assert result["folder"] == str(tmp_path)
    assert result["at"][0]["epsilon"] == 0.25


def test_presets_lists_all_with_their_notes():
    output = " ".join(invoke("presets").split())
    for name in presets():
        assert name in output
        assert " ".join(TrainConfig.preset(name).note.split()) in output


@pytest.mark.parametrize("columns", [60, 80])
def test_no_name_is_cut_in_a_narrow_terminal(columns, monkeypatch):
    monkeypatch.setattr(cli.console, "width", columns)
    output = CliRunner().invoke(cli.app, ["presets"]).stdout
    lines = [
        [cell.strip() for cell in line.split("│")]
        for line in output.splitlines()
        if "│" in line
    ]
    assert all(len(line) <= columns for line in output.splitlines())
    assert "".join(name for name, *_ in lines) == "".join(presets())
    assert (
        ["cifar10-6c2f-authors-units", "6C2F", "crm", "400", "0.07059"] in lines
    ) == (columns == 80)


def test_no_number_is_cut_in_a_narrow_terminal():
    numbers = ["crm", *(f"{k}1.2345%" for k in range(1, 8))]
    table = TextTable(
        "accuracies", [f"certified at {k}" for k in range(8)], [numbers], "a note"
    )
    for width in (40, 60, 160):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(table.rich())
        text = console.export_text()
        assert all(number in text for number in numbers)
        assert max(map(len, text.splitlines())) <= width


def test_tables_in_files_are_wide():
    environment = {
        name: value for name, value in os.environ.items() if name != "COLUMNS"
    }
    command = [sys.executable, "-m", "lipcert", "presets"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    )
    assert 120 < max(map(len, done.stdout.splitlines())) <= 160


def test_the_table_says_how_many_inputs_were_attacked(tmp_path):
    some = invoke(
        "train",
        "--run-dir",
        str(tmp_path / "some"),
        "--quiet",
        *options("attack_inputs=10"),
    )
    assert "attacked at ε = 0.25 (10 inputs)" in " ".join(some.split())
    output = invoke(
        "train",
        "--run-dir",
        str(tmp_path / "all"),
        "--quiet",
        *options("attack_inputs=1000"),
    )
    assert "attacked at ε = 0.25 ┃" in output


def test_ctrl_c_says_how_to_go_on(tmp_path):
    folder = tmp_path / "my run"
    command = [
        sys.executable,
        "-m",
        "lipcert",
        "train",
        "--run-dir",
        str(folder),
        "--quiet",
        *options("epochs=10000"),
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not (folder / "checkpoint.safetensors").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert (
        process.communicate()[1]
        == f"stopped; continue with: lipcert train --resume '{folder}'\n"
    )
    assert process.returncode == 130


def test_a_log_gets_a_line_every_half_minute_and_at_the_end(capsys, monkeypatch):
    seconds = iter([0, 10, 20, 31, 40, 62, 70])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(seconds))
    with progress.progress_bar() as report:
        for fraction in (0.4, 0.5, 0.6, 0.7, 0.8, 1.0):
            report("training", fraction, f"epoch {10 * fraction:.0f}/10  loss 0.5")
    assert capsys.readouterr().err.splitlines() == [
        "training 60%  left 0:00:42  epoch 6/10  loss 0.5",
        "training 80%  left 0:00:26  epoch 8/10  loss 0.5",
        "training 100%  epoch 10/10  loss 0.5",
    ]


def test_a_training_ends_with_a_line_in_the_log_unless_it_is_quiet(tmp_path):
    arguments = ["train", "--run-dir", str(tmp_path / "run"), *options()]
    shown = CliRunner().invoke(cli.app, arguments).stderr
    assert re.fullmatch(
        r"training 100%  epoch 3/3  loss .*  train .*  clean .*  est\. certified@0\.25 .*\n",
        shown,
    )
    arguments[2] = str(tmp_path / "quiet")
    assert CliRunner().invoke(cli.app, [*arguments, "--quiet"]).stderr == ""


def test_figures_give_way_first_in_a_narrow_terminal(monkeypatch):
    screen = io.StringIO()
    narrow = Console(file=screen, width=60, force_terminal=True, color_system=None)
    monkeypatch.setattr(progress, "Console", lambda **options: narrow)
    with progress.progress_bar() as report:
        report("training", 0.3, "epoch 3/10  loss 0.532  train 90.1%")
    assert re.search(r"training .* 0:00:0\d left -:--:-- epoch 3/…", screen.getvalue())


def test_errors(tmp_path):
    with pytest.raises(ConfigError, match=r"did you mean 'digits'\?"):
        invoke("train", "digit")
    with pytest.raises(
        OptionError, match=r"--resume continues a run as it was configured"
    ):
        invoke("train", "digits", "--resume", str(tmp_path))


def test_another_epsilon_is_one_option(tmp_path):
    """None of three networks is far behind the others at the ε that it was trained for."""
    shares = {}
    sizes = (0.1, 0.25, 0.6)
    for trained_for in sizes:
        folder = tmp_path / str(trained_for)
        changes = []
        for change in (
            "model=mlp-64",
            "epochs=20",
            "attack_inputs=0",
            "compare_standard=false",
        ):
            changes += ["--set", change]
        invoke(
            "train",
            "digits",
            "--run-dir",
            str(folder),
            "--quiet",
            "--eps",
            str(trained_for),
            *changes,
        )
        config = TrainConfig.from_toml(folder / "config.toml")
        assert config.epsilons == pytest.approx((trained_for, 2 * trained_for))
        certificates = read_runs([folder])[0].certificates
        shares[trained_for] = [
            certificates.certified_accuracy(epsilon) for epsilon in sizes
        ]
    for k, trained_for in enumerate(sizes):
        others = [shares[other][k] for other in sizes if other != trained_for]
        assert shares[trained_for][k] > max(others) - 0.07
    assert shares[0.6][2] > shares[0.1][2]
    assert shares[0.1][0] > 0.7


def test_another_epsilon_scales_what_is_a_distance():
    pixels = TrainConfig.preset("cifar10-6c2f").at_epsilon(18 / 255)
    assert pixels.loss.r0 == pytest.approx(
        0.5 * TrainConfig.preset("cifar10-6c2f").loss.r0
    )
    assert pixels.loss.t == pytest.approx(2 * TrainConfig.preset("cifar10-6c2f").loss.t)
    assert pixels.loss.weight == pytest.approx(
        2 * TrainConfig.preset("cifar10-6c2f").loss.weight
    )
    with pytest.raises(ConfigError, match="epsilon is 0, expected a positive number"):
        pixels.at_epsilon(0)
