"""`lipcert bound` continues where it was interrupted, and computes anew once it has ended."""

import json

import pytest
from typer.testing import CliRunner

from lipcert import cli
from lipcert.bounds.compute import bound_targets
from lipcert.commands import bound_task


@pytest.fixture
def methods(tmp_path, monkeypatch):
    """The methods that are computed, in a cache of their own; naming one in `stopped` interrupts it."""
    computed, stopped = [], []

    def counted(model, shape, method, *rest, **options):
        if method in stopped:
            raise KeyboardInterrupt
        computed.append(method)
        return bound_targets(model, shape, method, *rest, **options)

    monkeypatch.setenv("LIPCERT_CACHE", str(tmp_path))
    monkeypatch.setattr(bound_task, "bound_targets", counted)
    return computed, stopped


def run(*options):
    return CliRunner().invoke(
        cli.app, ["bound", "2C2F", "--target", "network", "--json", *options]
    )


def test_finished_methods_are_kept_until_the_command_ends(methods, tmp_path):
    computed, stopped = methods
    stopped.append("liplt")
    assert run().exit_code != 0
    assert list(tmp_path.rglob("*naive-network.json"))
    stopped.clear()
    rows = json.loads(run().stdout)
    assert [row["method"] for row in rows] == ["naive", "liplt"]
    assert computed == ["naive", "liplt"]
    assert not list(tmp_path.rglob("*.json"))
    assert json.loads(run().stdout)[0]["value"] == rows[0]["value"]
    assert computed == ["naive", "liplt"] * 2


def test_a_cache_that_cannot_be_written_is_no_failure(
    methods, tmp_path, monkeypatch, caplog
):
    (tmp_path / "bounds").write_text("a file where a folder should be")
    assert run().exit_code == 0
    assert "finished bounds cannot be kept" in caplog.text


def test_little_memory_is_refused_with_the_forecast(methods):
    result = run("--max-memory", "0.0000001")
    assert "may be used" in str(result.exception)
    assert "--max-memory" in str(result.exception)
