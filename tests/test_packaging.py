"""The wheel: complete, readable by package indices, usable without the sources, typed for those who import it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

USER = """
import torch
from torch import nn
import lipcert

model = nn.Sequential(nn.Linear(4, 3)).eval()
bound: lipcert.Bound = lipcert.bound(model, (4,))
certificates: lipcert.Certificates = lipcert.certify(model, torch.rand(2, 4), bound)
radius: torch.Tensor = certificates.radius
classifier = lipcert.CertifiedClassifier(model, bound)
run: lipcert.Run = lipcert.train({"epochs": 1}, model=model, data=(torch.rand(4, 4), torch.tensor([0, 1, 0, 1])))
share: float = run.summary.clean
network: nn.Module = lipcert.load_onnx("net.onnx")
wrong: int = run.summary.clean
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """What a wheel puts into an empty environment: packages, their data and the command, no sources beside them."""
    folder = tmp_path_factory.mktemp("wheel")
    run_module("build", "--wheel", "--no-isolation", "--outdir", folder, ROOT)
    (wheel,) = folder.glob("*.whl")
    run_module(
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-compile",
        "--target",
        folder / "site",
        wheel,
    )
    return wheel, folder / "site"


def run_module(*words):
    done = subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_the_wheel_is_complete_and_trains_on_the_digits(installed, tmp_path):
    _, site = installed
    for file in (
        "lipcert/py.typed",
        "lipcert/presets/digits.toml",
        "lipcert/web/templates/classifier.html.j2",
    ):
        assert (site / file).is_file()
    environment = {**os.environ, "PYTHONPATH": str(site)}
    settings = ("epochs=1", "model=mlp-64", "compare_standard=false", "attack_inputs=0")
    command = [site / "bin/lipcert", "train", "--run-dir", "run", "--quiet"]
    for setting in settings:
        command += ["--set", setting]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "run/report.html").is_file()


def test_package_indices_can_show_it(installed):
    pytest.importorskip("twine")
    wheel, site = installed
    (file,) = site.glob("*.dist-info/METADATA")
    metadata = file.read_text("utf-8")
    facts, _, readme = metadata.partition("\n\n")
    repository = re.search(r"Project-URL: Repository, (\S+)", facts)[1]
    links = re.findall(r"\]\(([^)]+)\)", readme)
    assert len(links) > 10
    assert [link for link in links if not link.startswith("https://")] == []
    assert f"{repository}/blob/main/docs/own.md" in links
    assert any(
        link.startswith("https://raw.") and link.endswith("main/docs/images/digits.png")
        for link in links
    )
    assert (
        f"Classifier: Programming Language :: Python :: {sys.version_info[0]}.{sys.version_info[1]}\n"
        in facts
    )
    run_module("twine", "check", "--strict", wheel)


def test_the_public_face_is_typed_for_those_who_import_it(tmp_path):
    (tmp_path / "user.py").write_text(USER)
    settings = [
        "--config-file",
        ROOT / "pyproject.toml",
        "--cache-dir",
        ROOT / ".mypy_cache",
    ]  # as make lint has left it
    command = [sys.executable, "-m", "mypy", *settings, tmp_path / "user.py"]
    environment = {**os.environ, "MYPYPATH": str(ROOT / "src")}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    errors = [line for line in done.stdout.splitlines() if "user.py:" in line]
    assert len(errors) == 1, done.stdout
    assert "user.py:14" in errors[0]
    assert '"float", variable has type "int"' in errors[0]
