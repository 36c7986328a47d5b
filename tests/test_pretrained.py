"""Trained networks that come with lipcert: their figures are those that their weights have."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import lipcert
from lipcert import cli, data
from lipcert.errors import OptionError
from lipcert.models.shipped import shipped_names
from lipcert.runs.pretrained import pretrained_folder
from lipcert.runs.summary import read_summary
from lipcert.training import presets

MEGABYTES = 20


def invoke(*words):
    result = CliRunner().invoke(cli.app, [*words])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_smallest_has_exactly_the_figures_that_are_stored(tmp_path):
    stored = read_summary(pretrained_folder("digits"))
    found = json.loads(invoke("certify", "digits", "--out", str(tmp_path), "--json"))
    assert found["clean"] == stored.clean
    assert [entry["certified"] for entry in found["at"]] == [
        entry.certified for entry in stored.at
    ]
    assert found["fingerprint"] == stored.fingerprint


def test_sums_in_parts_are_certified_and_attacked(tmp_path):
    model = str(pretrained_folder("digits") / "model.safetensors")
    words = (
        "certify",
        model,
        "--data",
        "digits",
        "--eps",
        "0.25",
        "--limit",
        "20",
        "--split",
        "--attack",
    )
    found = json.loads(invoke(*words, "--out", str(tmp_path), "--json"))
    assert found["execution"] == "float32-split"
    (at,) = found["at"]
    assert at["certified"] <= at["attacked"] <= found["clean"]


def test_the_classifier_has_its_bound_its_figures_and_its_command():
    classifier = lipcert.pretrained("digits")
    test = data.load("digits").test
    x, labels = test.pixels().to(classifier.dtype), test.labels
    logits, radius = classifier(x)
    correct = logits.argmax(1) == labels
    assert correct.double().mean().item() == classifier.summary.clean
    assert (correct & (radius >= 0.25)).double().mean().item() <= classifier.summary.at[
        0
    ].certified
    assert radius.median() > 0.3
    assert classifier.command == "lipcert train digits --set seed=0"


def test_all_are_listed_and_belong_to_a_preset():
    output = invoke("pretrained")
    for name in shipped_names():
        summary = read_summary(pretrained_folder(name))
        assert name in presets()
        assert name in output
        assert all(f"{entry.certified:.2%}" in output for entry in summary.at)


@pytest.mark.parametrize("name", shipped_names())
def test_every_one_loads_with_its_bound(name):
    classifier = lipcert.pretrained(name)
    logits, radius = classifier(
        torch.rand(2, *classifier.input_shape, dtype=classifier.dtype)
    )
    assert bool(torch.isfinite(logits).all())
    assert (radius >= 0).all()
    assert classifier.fingerprint == classifier.summary.fingerprint


def test_they_are_small_and_tell_nothing_about_where_they_were_made():
    files = [
        path for name in shipped_names() for path in pretrained_folder(name).iterdir()
    ]
    assert sum(path.stat().st_size for path in files) < MEGABYTES * 1e6
    for path in files:
        assert b"/work" not in path.read_bytes()


def test_the_report_is_not_written_into_the_installation(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    invoke("report", "digits")
    assert Path("runs/digits/report.html").exists()
    assert not (pretrained_folder("digits") / "report.html").exists()


def test_a_name_that_does_not_exist():
    with pytest.raises(
        OptionError, match=r"name is 'digit', expected one of .*did you mean"
    ):
        lipcert.pretrained("digit")
