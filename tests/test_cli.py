"""The command line: tables and JSON on standard output, files in the folder, errors as one message with code 2."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import lipcert
from lipcert import cli, zoo
from lipcert.bounds.methods import METHODS
from lipcert.certificate.stream import read_certificates
from lipcert.errors import OptionError, ResumeError, TooLargeError
from lipcert.models import save_model

NET = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))
    model.input_shape = (1, 8, 8)
    return model
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a command in a folder with a trained network for the digits."""
    (tmp_path / "digit_net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli.console, "width", 140)
    monkeypatch.delitem(sys.modules, "digit_net", raising=False)
    runner = CliRunner()

    def call(*arguments):
        result = runner.invoke(cli.app, [str(argument) for argument in arguments])
        if result.exception is not None and not isinstance(
            result.exception, SystemExit
        ):
            raise result.exception
        assert result.exit_code == 0, result.output
        return result.stdout

    return call


@pytest.fixture(scope="session")
def weights(tmp_path_factory):
    """Weights of the network above, trained for a second."""
    names: dict = {}
    exec(NET, names)
    model, data = names["build"](), lipcert.data.load("digits").train
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, weight_decay=1e-3)
    for _ in range(100):
        loss = torch.nn.functional.cross_entropy(model(data.pixels()), data.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    from safetensors.torch import save_model

    path = tmp_path_factory.mktemp("weights") / "digits.safetensors"
    save_model(model, path)
    return path


def fails(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["lipcert", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return " ".join(captured.err.split())


def test_bound_prints_a_table_of_methods_and_targets(run):
    table = run("bound", "digit_net:build", "--quiet")
    for word in (
        "naive",
        "liplt",
        "network",
        "per-class",
        "last-layer",
        "pairwise",
        "deterministic",
        "ratio",
        "1×8×8",
    ):
        assert word in table


def test_bound_as_json_is_what_the_library_says(run):
    rows = json.loads(run("bound", "digit_net:build", "--json"))
    assert [(row["target"], row["method"]) for row in rows[:2]] == [
        ("network", "naive"),
        ("network", "liplt"),
    ]
    names: dict = {}
    exec(NET, names)
    for row in rows:
        bound = lipcert.bound(
            names["build"]().eval(), (1, 8, 8), row["method"], row["target"]
        )
        assert row["value"] == pytest.approx(bound.mean, rel=1e-9)
        assert row["guarantee"] == "deterministic"


def test_estimates_are_labelled_and_below_the_bounds(run):
    options = ("--method", "liplt", "--target", "pairwise", "--json")
    (bound,) = json.loads(run("bound", "digit_net:build", *options))
    (estimate,) = json.loads(run("bound", "digit_net:build", "--estimate", *options))
    assert estimate["guarantee"] == "estimate"
    assert (
        0.99 * bound["value"] < estimate["value"] <= bound["value"] * (1 + 1e-6)
    )  # it is rounded


def test_all_methods_stand_above_the_slopes_that_were_found(run):
    rows = json.loads(run("bound", "digit_net:build", "--method", "all", "--json"))
    values = {(row["method"], row["target"]): row["value"] for row in rows}
    assert list(values) == [
        (m, t) for m in (*METHODS, "sampled") for t in ("network", "pairwise")
    ]
    names: dict = {}
    exec(NET, names)
    for target in ("network", "pairwise"):
        floor = values["sampled", target]
        assert all(floor <= value for (_, t), value in values.items() if t == target)
        assert (
            values["lipsdp", target] < values["liplt", target] < values["naive", target]
        )
        found = lipcert.estimate_sampled(names["build"]().eval(), (1, 8, 8), target)
        assert floor == pytest.approx(
            found.sum().item() / (1 if target == "network" else 90), rel=1e-6
        )
    assert rows[-1]["guarantee"] == "from below"


def test_all_methods_as_a_table_with_refusals(run, monkeypatch):
    def refuse(network, *arguments, **options):
        raise TooLargeError(
            "LipSDP needs order 9000, the limit is 2000; use method='rescaled'"
        )

    monkeypatch.setattr("lipcert.bounds.methods.recursive.lipsdp_constants", refuse)
    monkeypatch.setattr("lipcert.bounds.methods.best._SMALL", 0)  # "best" does without
    monkeypatch.setattr(
        "lipcert.commands.bound_task.METHODS", ("naive", "liplt", "lipsdp", "best")
    )
    table = run("bound", "digit_net:build", "--method", "all", "--quiet")
    lines = {
        line.split()[1]: line for line in table.splitlines() if line.startswith("│")
    }
    assert list(lines) == ["naive", "liplt", "lipsdp", "best", "sampled"]
    assert lines["lipsdp"].count("–") == 3
    assert "LipSDP needs order 9000, the limit is 2000" in lines["lipsdp"]
    assert "rescaled" not in lines["lipsdp"]
    assert "–" not in lines["best"]
    assert "mean pairwise" in table
    with pytest.raises(TooLargeError):
        run("bound", "digit_net:build", "--method", "lipsdp")


def test_a_method_without_a_target_is_refused_for_that_target_only(run):
    arguments = (
        "--method",
        "all",
        "--target",
        "network",
        "--target",
        "last-layer",
        "--json",
    )
    rows = json.loads(run("bound", "digit_net:build", *arguments))
    for method in ("ellipsoids", "lipsdp"):
        values = {
            row["target"]: row["value"] for row in rows if row["method"] == method
        }
        assert values["network"] > 0
        assert values["last-layer"] is None
    assert all(
        row["value"] > 0
        for row in rows
        if row["method"] not in ("ellipsoids", "lipsdp")
    )


def test_all_estimates(run):
    rows = json.loads(
        run("bound", "digit_net:build", "--method", "all", "--estimate", "--json")
    )
    values = {(row["method"], row["target"]): row["value"] for row in rows}
    for target in ("network", "pairwise"):
        order = [
            values[method, target]
            for method in ("sampled", "rescaled", "liplt", "naive")
        ]
        assert order == sorted(order)
        assert order[1] < 0.99 * order[2]  # the coordinates were fitted


def test_certify_writes_its_files_and_continues(run, weights, tmp_path, monkeypatch):
    arguments = (
        "digit_net:build",
        "--weights",
        weights,
        "--data",
        "digits",
        "--eps",
        0.1,
        "--eps",
        0.3,
        "--out",
        "r",
    )
    table = run("certify", *arguments, "--limit", 40, "--quiet")
    caption = "deterministic; executed in float32, rounding included"
    for word in (
        "clean",
        "certified",
        "median radius",
        "0.1",
        "0.3",
        caption,
        "40 test",
    ):
        assert word in " ".join(table.split())
    assert sorted(path.name for path in (tmp_path / "r").iterdir()) == [
        "bound.json", "bound.safetensors", "certificates.csv", "certificates.origin.json", "constants.json",
        "environment.json", "figures", "gallery.safetensors", "report.html", "summary.json", "table.md", "table.tex",
    ]  # fmt: skip
    first = (tmp_path / "r" / "certificates.csv").read_text()
    computed = []
    original = lipcert.certificate.Certifier.certify
    monkeypatch.setattr(
        lipcert.certificate.Certifier, "certify",
        lambda self, x, start=0, label=None: computed.append((start, len(x))) or original(self, x, start, label),
    )  # fmt: skip
    monkeypatch.setattr(
        "lipcert.bounds.compute.bound_network", None
    )  # the stored bound is used again
    facts = json.loads(run("certify", *arguments, "--limit", 60, "--json"))
    assert computed == [(40, 20)]
    assert (tmp_path / "r" / "certificates.csv").read_text().startswith(first)
    assert facts == json.loads((tmp_path / "r" / "summary.json").read_text())
    certificates = read_certificates(tmp_path / "r" / "certificates.csv")
    assert facts["clean"] == certificates.clean_accuracy > 0.8
    assert facts["inputs"] == len(certificates) == 60
    assert [at["certified"] for at in facts["at"]] == certificates.certified_accuracies(
        [0.1, 0.3]
    )
    assert facts["median_radius"] == certificates.radius.median().item()
    assert facts["at"][0]["attacked"] is None


def test_certify_with_attack_orders_the_accuracies(run, weights):
    facts = json.loads(
        run("certify", "digit_net:build", "--weights", weights, "--data", "digits", "--eps", 0.3, "--limit", 50,
            "--attack", "--json", "--out", "a")
    )  # fmt: skip
    (at,) = facts["at"]
    assert 0 < at["certified"] <= at["attacked"] <= facts["clean"]


def test_local_certificates_stand_beside_the_global_ones(run, weights, tmp_path):
    arguments = (
        "digit_net:build",
        "--weights",
        weights,
        "--data",
        "digits",
        "--eps",
        0.1,
        "--eps",
        0.3,
        "--local",
    )
    facts = json.loads(
        run("certify", *arguments, "--limit", 30, "--attack", "--json", "--out", "l")
    )
    assert facts["local_norm"] == "l2"
    for at in facts["at"]:
        assert at["certified"] <= at["local"] <= at["attacked"] <= facts["clean"]
    assert facts["at"][1]["certified"] < facts["at"][1]["local"]
    radius = read_certificates(tmp_path / "l" / "local.csv").radius
    assert (
        radius >= read_certificates(tmp_path / "l" / "certificates.csv").radius
    ).all()
    assert f"certified locally (l2): {facts['at'][0]['local']:.2%} at ε = 0.1" in (
        tmp_path / "l" / "report.html"
    ).read_text("utf-8")
    table = run(
        "certify", *arguments, "--norm", "inf", "--limit", 10, "--quiet", "--out", "inf"
    )
    assert "locally (l∞)" in " ".join(table.split())
    with pytest.raises(
        ResumeError, match="other weights or data, or by another method"
    ):
        run(
            "certify",
            *arguments,
            "--limit",
            30,
            "--norm",
            "inf",
            "--quiet",
            "--out",
            "l",
        )


def test_in_float64_rounding_costs_next_to_nothing(run, weights, tmp_path):
    """The same weights have larger radii, by what the rounding of float32 could have changed."""
    arguments = (
        "digit_net:build",
        "--weights",
        weights,
        "--data",
        "digits",
        "--eps",
        0.3,
        "--limit",
        30,
        "--attack",
    )
    single = json.loads(run("certify", *arguments, "--json", "--out", "single"))
    double = json.loads(
        run("certify", *arguments, "--float64", "--json", "--out", "double")
    )
    assert (single["execution"], double["execution"]) == ("float32", "float64")
    radii = {
        name: read_certificates(tmp_path / name / "certificates.csv").radius
        for name in ("single", "double")
    }
    assert (radii["double"] > radii["single"]).all()
    assert torch.allclose(radii["double"], radii["single"], rtol=1e-2)
    estimated = read_certificates(tmp_path / "double" / "certificates.csv").margin
    bound = lipcert.Bound.load(tmp_path / "double" / "bound")
    assert (radii["double"] >= estimated / bound.value.max() * (1 - 1e-9)).all()


def test_certify_by_another_method(run, weights):
    arguments = (
        "digit_net:build",
        "--weights",
        weights,
        "--data",
        "digits",
        "--eps",
        0.3,
        "--limit",
        10,
        "--json",
    )
    plain = json.loads(run("certify", *arguments, "--out", "plain"))
    better = json.loads(
        run("certify", *arguments, "--method", "rescaled", "--out", "better")
    )
    assert (plain["method"], better["method"]) == ("liplt", "rescaled")
    assert better["mean_radius"] > plain["mean_radius"]


def test_certificates_of_something_else_are_left_as_they_are(run, weights, tmp_path):
    """Neither the radii of another method are taken for new ones, nor is anything of the folder replaced."""
    arguments = (
        "digit_net:build",
        "--weights",
        weights,
        "--data",
        "digits",
        "--eps",
        0.3,
        "--out",
        "r",
        "--quiet",
    )
    run("certify", *arguments, "--limit", 10)
    kept = {
        path.name: path.read_bytes()
        for path in (tmp_path / "r").iterdir()
        if path.is_file()
    }
    for message, changed in {
        "other weights or data, or by another method": ("--method", "naive"),
        "other weights or data": ("--float64",),
        "holds 10 certificates, more than 5": ("--limit", 5),
    }.items():
        with pytest.raises(ResumeError, match=message):
            run("certify", *arguments, *changed)
        assert kept == {
            path.name: path.read_bytes()
            for path in (tmp_path / "r").iterdir()
            if path.is_file()
        }
    (tmp_path / "r" / "config.toml").touch()
    with pytest.raises(OptionError, match="is the folder of a training"):
        run("certify", *arguments)


def test_attack(run, weights):
    arguments = (
        "digit_net:build",
        "--weights",
        weights,
        "--data",
        "digits",
        "--limit",
        50,
        "--steps",
        20,
    )
    facts = json.loads(run("attack", *arguments, "--eps", 0.05, "--eps", 2.0, "--json"))
    near, far = facts["at"]
    assert near["clean"] == far["clean"] > 0.8
    assert far["attacked"] < near["attacked"] <= near["clean"]
    assert "l2 PGD, 20 iterations" in " ".join(
        run("attack", *arguments, "--eps", 1.0, "--quiet").split()
    )


def test_epsilons_as_fractions(run, weights):
    arguments = (
        "digit_net:build",
        "--weights",
        weights,
        "--data",
        "digits",
        "--limit",
        2,
        "--json",
    )
    for command in ("certify", "attack"):
        facts = json.loads(run(command, *arguments, "--eps", "36/255", "--eps", "1e-1"))
        assert [at["epsilon"] for at in facts["at"]] == [36 / 255, 0.1]


def test_certify_a_checkpoint_of_the_zoo(run, tmp_path):
    save_model(
        zoo.build("4C3F", (1, 8, 8), 10, seed=0),
        tmp_path / "z.safetensors",
        "4C3F",
        (1, 8, 8),
        10,
    )
    facts = json.loads(
        run(
            "certify",
            tmp_path / "z.safetensors",
            "--data",
            "digits",
            "--eps",
            0.1,
            "--limit",
            4,
            "--json",
        )
    )
    assert facts["model"].endswith("z.safetensors")
    assert (tmp_path / "runs" / "certify" / "summary.json").exists()


def test_version(run):
    assert run("--version").strip() == f"lipcert {lipcert.__version__}"


DIGITS = ("--data", "digits", "--eps", 0.1)
ERRORS = {
    "unknown model": (("bound", "9C9F"), "error: '9C9F' is not a model"),
    "unknown method": (
        ("bound", "4C3F", "--method", "fast"),
        "error: method is 'fast', expected one of",
    ),
    "wrong shape": (
        ("bound", "4C3F", "--input-shape", "a,b"),
        "--input-shape is 'a,b', expected numbers",
    ),
    "negative shape": (
        ("bound", "mlp-64", "--input-shape", "-1,28"),
        "--input-shape is '-1,28', expected numbers",
    ),
    "no iterations": (
        ("bound", "mlp-64", "--estimate", "--iterations", 0),
        "Invalid value for '--iterations'",
    ),
    "no number": (
        ("attack", "4C3F", "--data", "digits", "--eps", "1/0"),
        "--eps is '1/0', expected a number or a frac",
    ),
    "norm without local": (
        ("certify", "4C3F", *DIGITS, "--norm", "inf"),
        "--norm belongs to --local",
    ),
    "wrong epsilon": (
        ("certify", "4C3F", "--data", "digits", "--eps", -1),
        "--eps is [-1.0], expected positive",
    ),
    "no limit": (
        ("attack", "4C3F", *DIGITS, "--limit", 0),
        "--limit is 0, expected 1 or more",
    ),
    "other images": (
        ("certify", "4C3F", *DIGITS),
        "the data have inputs of shape (1, 8, 8), the model takes (1, 28, 28)",
    ),
    "unknown data": (
        ("attack", "4C3F", "--data", "digit", "--eps", 1),
        "did you mean 'digits'",
    ),
    "markup": (("bound", "[/red]"), "'[/red]' is not a model"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_one_message_with_code_2(name, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    arguments, message = ERRORS[name]
    assert message in fails(monkeypatch, capsys, *arguments)
    assert list(tmp_path.iterdir()) == []  # nothing half-written


def test_other_weights_in_the_same_folder_are_refused(
    run, weights, monkeypatch, capsys, tmp_path
):
    arguments = (
        "certify",
        "digit_net:build",
        *DIGITS,
        "--limit",
        5,
        "--out",
        "r",
        "--quiet",
    )
    run(*arguments, "--weights", weights)
    monkeypatch.setenv("COLUMNS", "200")
    assert "holds certificates of other weights or data" in fails(
        monkeypatch, capsys, *arguments
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupts_while_importing_end_in_one_word(number, tmp_path):
    """Also in the middle of a library that goes on after exceptions, as torch and numpy do."""
    text = f"import os\ntry:\n    os.kill(os.getpid(), {int(number)})\nexcept BaseException:\n    pass\n1 / 0"
    (tmp_path / "torch.py").write_text(text)
    code = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from lipcert.__main__ import main\nmain()"
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.pathsep.join(sys.path)}",
    }
    done = subprocess.run(
        [sys.executable, "-c", code, "presets"],
        env=environment,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"stopped\n")


def test_help_does_not_import_torch():
    code = "import sys\nfrom lipcert.cli import COMMANDS, main\n"
    code += "for name in ('', *COMMANDS):\n    sys.argv = ['lipcert', *name.split(), '--help']\n"
    code += "    try:\n        main()\n    except SystemExit:\n        print(name, 'torch' in sys.modules)\n"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    shown = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout
    for name, (*_, text) in cli.COMMANDS.items():
        assert f"\n{name} False\n" in shown
        assert text.split()[0] in shown
    for method in METHODS:
        assert shown.count(method) >= 2  # of bound and of certify


def test_names_are_found_when_they_are_used():
    assert lipcert.attacks.pgd is not None
    assert set(lipcert.__all__) <= set(dir(lipcert))
    for name in lipcert.__all__:
        assert getattr(lipcert, name) is not None
    with pytest.raises(
        AttributeError, match="module 'lipcert' has no attribute 'bouund'"
    ):
        _ = lipcert.bouund
