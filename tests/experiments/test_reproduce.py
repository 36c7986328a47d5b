"""Every experiment on the digits: finite, consistent numbers, shared runs, continued and failed invocations."""

import csv
import json
import shutil
import sys
from functools import cache
from math import isfinite

import pytest
from typer.testing import CliRunner

from lipcert import cli
from lipcert.errors import DataError, OptionError
from lipcert.training import TrainConfig
from lipcert_experiments import EXPERIMENTS, Plan, invocation, reproduce

TINY = Plan("tiny", epochs=2)
ACCURACY_TABLES = [
    name
    for name in EXPERIMENTS
    if name.startswith("table") and name != "table-lipschitz"
]
RUN_TIMES = ("fig-depth", "fig-iterations", "fig-input-size")


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """One folder for all experiments, so that they share their runs."""
    return tmp_path_factory.mktemp("reproduce")


@pytest.fixture(scope="module")
def made(out):
    """An experiment by name, computed once for all tests."""
    return cache(lambda name: reproduce(name, TINY, out))


def results(done):
    return json.loads((done.folder / "results.json").read_text())


def cells(done):
    """(row, column, cell) of all cells of ours."""
    rows = done.outcome.table.rows
    return [
        (row, name, cell)
        for row in rows
        for name, cell in row.cells.items()
        if cell.ours is not None
    ]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_gives_finite_numbers_and_its_files(out, made, name):
    done = made(name)
    assert done.failed == {}
    assert done.folder == out / f"{name}-tiny-2-epochs"
    found = cells(done)
    assert found
    assert all(isfinite(cell.ours) and cell.ours >= 0 for _, _, cell in found)
    files = {path.name for path in done.folder.iterdir()}
    assert {"results.json", "table.md", "table.tex"} <= files
    assert ({"figure.png", "figure.svg"} <= files) == name.startswith("fig")
    stored = results(done)
    assert (
        stored["command"]
        == f"lipcert reproduce {name} --budget tiny --protocol lipcert --epochs 2"
    )
    assert len(stored["table"]["rows"]) == len(done.outcome.table.rows)
    markdown = (done.folder / "table.md").read_text()
    for word in (
        "hardware",
        "commit",
        *(() if name in RUN_TIMES else ("data: digits", "ε: 0.25", "epochs", "seed")),
    ):
        assert word in markdown
    assert ("compressed" in markdown) == (name not in RUN_TIMES)
    for row in done.outcome.table.texts():
        assert "| " + " | ".join(row) + " |" in markdown


@pytest.mark.parametrize("name", ACCURACY_TABLES)
def test_certified_is_below_attacked_is_below_clean_on_the_same_inputs(made, name):
    for run in results(made(name))["runs"].values():
        attacked = run["measured"]["attacked"]
        assert attacked["inputs"] == 40
        assert attacked["certified"] <= attacked["attacked"] <= attacked["clean"]
        assert run["at"][0]["certified"] <= run["clean"]


def test_rows_hold_what_the_runs_hold(out, made):
    done = made("table-l2")
    runs = results(done)["runs"]
    for row in done.outcome.table.rows:
        run = runs.get(f"mnist {row.heads[1]}")
        assert (run is None) == (row.heads[1] == "Local-Lip")
        if run is not None:
            path = out / "runs" / run["run"] / "certificates.csv"
            with path.open() as file:
                rows = [
                    (r["label"] == r["prediction"], float(r["radius"]))
                    for r in csv.DictReader(file)
                ]
            assert row.cells["clean"].ours == pytest.approx(
                100 * sum(right for right, _ in rows) / len(rows)
            )
            certified = sum(right and radius >= 0.25 for right, radius in rows) / len(
                rows
            )
            assert row.cells["certified"].ours == pytest.approx(100 * certified)
    losses = {
        row.heads[1]: row.cells["certified"].published
        for row in done.outcome.table.rows
    }
    assert losses == {"Standard": 0.0, "GloRo": 50.1, "Local-Lip": 55.8, "CRM": 63.37}


def test_estimates_of_pairwise_liplt_are_not_below_what_is_certified(made):
    """The same constants: guaranteed ones are larger, and rounding is subtracted."""
    run = results(made("table-l2"))["runs"]["mnist CRM"]
    assert run["measured"]["estimated"]["certified"] >= run["at"][0]["certified"] > 0


def test_constants_are_ordered(made):
    """LipLT ≤ naive; L_ij ≤ L_i + L_j and √2·L; estimate ≤ guaranteed, all up to rounding."""
    done = made("table-lipschitz")
    (run,) = results(done)["runs"].values()
    measured = run["measured"]["constants"]
    for kind in ("guaranteed", "estimate"):
        for target, value in measured[kind]["liplt"].items():
            assert value <= measured[kind]["naive"][target] * (1 + 1e-6)
        for method in ("naive", "liplt"):
            by_target = measured[kind][method]
            assert by_target["pairwise"] <= min(
                by_target["per-class"], by_target["network"]
            ) * (1 + 1e-4)
    for method, by_target in measured["estimate"].items():
        for target, value in by_target.items():
            assert value <= measured["guaranteed"][method][target] * (1 + 1e-6)
            assert value == pytest.approx(
                measured["guaranteed"][method][target], rel=0.02
            )
    rows = {
        (row.heads[1], row.heads[2]): row.cells["L_ij"]
        for row in done.outcome.table.rows
    }
    assert rows["naive / LipLT", "guaranteed"].published == pytest.approx(
        266.08 / 64.10
    )
    assert (
        rows["LipLT", "guaranteed"].ours == measured["guaranteed"]["liplt"]["pairwise"]
    )


def test_radii_by_naive_constants_are_smaller(made):
    rows = [
        row for row in made("fig-radii").outcome.table.rows if row.heads[1] == "CRM"
    ]
    by_bound = {row.heads[2]: row.cells["median radius"].ours for row in rows}
    assert 0 < by_bound["naive"] < by_bound["LipLT"]


def test_the_evolution_has_every_epoch(made):
    for curves in made("fig-evolution").outcome.numbers.values():
        assert curves["naive"]["epochs"] == [1, 2]
        pairs = zip(curves["LipLT"]["values"], curves["naive"]["values"], strict=True)
        assert all(liplt <= naive * (1 + 1e-3) for liplt, naive in pairs)


@pytest.mark.parametrize("name", RUN_TIMES)
def test_parts_of_an_iteration_are_shorter_than_it(made, name):
    for row in made(name).outcome.table.rows:
        for method in ("naive", "LipLT"):
            assert (
                0
                < row.cells[f"training {method}"].ours
                < row.cells[f"iteration {method}"].ours
            )


def test_runs_are_shared_and_finished_ones_are_only_read(out, made, monkeypatch):
    first = made("table-l2")
    before = {
        path: path.stat().st_mtime_ns
        for path in (out / "runs").rglob("model.safetensors")
    }
    shared = results(first)["runs"]["mnist CRM"]["run"]
    for name, key in (
        ("table-lipschitz", "mnist"),
        ("fig-radii", "mnist CRM"),
        ("fig-evolution", "CRM + LipLT"),
    ):
        assert results(made(name))["runs"][key]["run"] == shared
    monkeypatch.setattr(invocation, "train", None)
    again = reproduce("table-l2", TINY, out)
    assert results(again)["table"] == results(first)["table"]
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_an_interrupted_invocation_continues_where_it_stopped(made, tmp_path):
    whole = made("fig-evolution")

    def interrupt(what, fraction, figures=""):
        if what.startswith("2/3") and "training" in what and fraction > 0.6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reproduce("fig-evolution", TINY, tmp_path, progress=interrupt)
    began = sorted(
        path.parent.name for path in tmp_path.rglob("checkpoint.safetensors")
    )
    assert len(began) == 2
    (first,) = (path.parent for path in tmp_path.rglob("summary.json"))
    finished = (first / "model.safetensors").stat().st_mtime_ns
    seen = []

    def watch(what, fraction, figures=""):
        seen.append((what, fraction))

    done = reproduce("fig-evolution", TINY, tmp_path, progress=watch)
    assert (first / "model.safetensors").stat().st_mtime_ns == finished
    assert not any(what.startswith("1/3") and "training" in what for what, _ in seen)
    assert (
        min(
            fraction
            for what, fraction in seen
            if what.startswith("2/3") and what.endswith("training")
        )
        > 0.25
    )
    assert results(done)["table"] == results(whole)["table"]
    assert results(done)["numbers"] == results(whole)["numbers"]


def test_a_failed_configuration_is_reported_and_the_rest_completes(
    out, made, tmp_path, monkeypatch
):
    """By the command, which exits with 1."""
    folder = made("table-power-iterations").folder.name
    shutil.copytree(out, tmp_path, dirs_exist_ok=True)
    original = invocation.measure

    def failing(subject, names):
        if subject.config.estimator.power_iterations == 5:
            raise DataError("no such images; put them there")
        return original(subject, names)

    monkeypatch.setattr(invocation, "measure", failing)
    monkeypatch.setattr(cli.console, "width", 200)
    arguments = [
        "table-power-iterations",
        "--epochs",
        "2",
        "--out",
        str(tmp_path),
        "--quiet",
    ]
    result = CliRunner().invoke(cli.app, ["reproduce", *arguments])
    assert result.exit_code == 1, result.output
    assert "DataError: no such images; put them there" in " ".join(
        result.output.split()
    )
    stored = json.loads((tmp_path / folder / "results.json").read_text())
    assert [
        row["iterations"] for row in stored["table"]["rows"] if "failed" in row
    ] == ["5"]
    assert all(
        row["clean"]["ours"] is not None
        for row in stored["table"]["rows"]
        if "failed" not in row
    )
    assert "failed" in stored["runs"]["mnist 5"]
    assert "| failed (95.91) |" in (tmp_path / folder / "table.md").read_text()


def test_every_failure_fits_its_table(tmp_path, monkeypatch):
    """Without any data, every experiment still writes its table."""

    def missing(*arguments):
        raise DataError("nothing here")

    monkeypatch.setattr(invocation, "train", missing)
    for name in EXPERIMENTS:
        if name not in RUN_TIMES:
            done = reproduce(name, TINY, tmp_path)
            assert set(done.failed.values()) == {"DataError: nothing here"}
            assert len([row for row in done.outcome.table.rows if row.failed]) == len(
                done.failed
            )
            assert "nothing here" in (done.folder / "table.md").read_text()


def test_the_authors_protocol_has_their_attack(out):
    done = reproduce("table-l2", Plan("tiny", "authors", epochs=2), out)
    assert done.folder.name == "table-l2-tiny-authors-2-epochs"
    assert "the authors' PGD" in (done.folder / "table.md").read_text()
    for run in results(done)["runs"].values():
        attacked = run["measured"]["attacked"]
        assert (attacked["protocol"], attacked["step"]) == ("authors", 0.001)
        assert attacked["certified"] <= attacked["attacked"] <= attacked["clean"]


def test_the_list_names_all_experiments(monkeypatch):
    monkeypatch.setattr(cli.console, "width", 160)
    for arguments in (["reproduce"], ["reproduce", "--list"]):
        output = CliRunner().invoke(cli.app, arguments).output
        assert all(name in output for name in EXPERIMENTS)


def test_without_the_package_the_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lipcert_experiments", None)
    for arguments in ([], ["table-l2"]):
        monkeypatch.setattr(sys, "argv", ["lipcert", "reproduce", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        assert stopped.value.code == 2
        message = " ".join(capsys.readouterr().err.split())
        assert (
            "needs the package lipcert_experiments, which is not installed: run `pip install .`"
            in message
        )


def test_refusals(tmp_path):
    with pytest.raises(
        OptionError, match=r"experiment is 'table-l3', .* did you mean 'table-l2'\?"
    ):
        reproduce("table-l3", TINY, tmp_path)
    with pytest.raises(
        OptionError, match=r"budget is 'huge', expected one of tiny, hour, paper"
    ):
        Plan("huge")
    with pytest.raises(
        OptionError, match=r"protocol is 'author', .* did you mean 'authors'"
    ):
        Plan("tiny", "author")
    with pytest.raises(OptionError, match=r"epochs is 1, expected 2 or more"):
        Plan("hour", epochs=1)


@pytest.mark.data
def test_mnist_starts(tmp_path):
    """The paper's configuration for an hour begins on real data; the first batch is enough."""
    seen = []

    def stop(what, fraction, figures=""):
        seen.append(what)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reproduce("table-lipschitz", Plan("hour"), tmp_path, progress=stop)
    assert seen == ["1/1 mnist: training"]
    (config,) = tmp_path.rglob("config.toml")
    assert TrainConfig.from_toml(config).data == "mnist"
