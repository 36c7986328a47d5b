"""From an ONNX file that another tool wrote to bounds and certificates, in Python and on the command line."""

import json

import numpy as np
import pytest
import torch
from onnx import TensorProto
from onnx_files import array, node, tensorflow_net, write
from torch import nn
from typer.testing import CliRunner

import lipcert
from lipcert.cli import app
from lipcert.errors import ModelError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.pool, self.dense = nn.MaxPool2d(2), nn.Linear(64, 10)

    def forward(self, x):
        x = self.pool(torch.relu(self.norm(self.conv(x))))
        return self.dense(x.view(x.size(0), -1))


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A network of torch and what torch.onnx has made of it."""
    torch.manual_seed(0)
    model = Net().eval()
    model.norm.running_mean.normal_()
    path = tmp_path_factory.mktemp("onnx") / "net.onnx"
    x = torch.rand(2, 1, 8, 8)
    batch = {0: torch.export.Dim("batch")}
    torch.onnx.export(
        model, (x,), path, dynamo=True, dynamic_shapes=(batch,), verbose=False
    )
    return model, path


def test_a_network_of_torch_has_the_same_bound_and_radii(exported):
    model, path = exported
    read = lipcert.load_onnx(path)
    x = torch.rand(5, 1, 8, 8)
    assert torch.allclose(read(x), model(x), atol=1e-5)
    bound, own = lipcert.bound(read, read.input_shape), lipcert.bound(model, (1, 8, 8))
    assert torch.allclose(bound.value, own.value, rtol=1e-4)
    radius, expected = (
        lipcert.certify(read, x, bound).radius,
        lipcert.certify(model, x, own).radius,
    )
    assert torch.allclose(radius, expected, rtol=1e-3, atol=1e-6)
    assert lipcert.certify(lipcert.load_onnx(path), x, bound).radius.equal(radius)


def test_the_command_line(exported, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "lipcert.report.write_report", lambda folders: folders[0] / "report.html"
    )  # no figures here
    _, path = exported
    run = CliRunner()
    rows = json.loads(
        run.invoke(app, ["bound", str(path), "--json"], catch_exceptions=False).stdout
    )
    assert {row["target"] for row in rows} == {
        "network",
        "per-class",
        "last-layer",
        "pairwise",
    }
    tensorflow = tensorflow_net(tmp_path / "tensorflow.onnx")
    for file in (path, tensorflow):
        command = [
            "certify",
            str(file),
            "--data",
            "digits",
            "--eps",
            "0.1",
            "--limit",
            "20",
            "--json",
            "--attack",
        ]
        command += ["--out", f"out-{file.stem}"]
        summary = json.loads(run.invoke(app, command, catch_exceptions=False).stdout)
        assert summary["inputs"] == 20
        assert (
            summary["at"][0]["certified"]
            <= summary["at"][0]["attacked"]
            <= summary["clean"]
        )


def test_channels_last_radii_are_those_of_the_graph_itself(tmp_path):
    model = lipcert.load_onnx(tensorflow_net(tmp_path / "net.onnx"))
    assert model.input_shape == (8, 8, 1)
    x = torch.rand(4, 1, 8, 8)
    loaded = lipcert.load_model(str(tmp_path / "net.onnx")).for_images((1, 8, 8))
    turned = lipcert.certify(loaded.model, x)
    assert torch.allclose(
        turned.radius,
        lipcert.certify(model, x.permute(0, 2, 3, 1).contiguous()).radius,
        rtol=1e-4,
    )
    assert float(turned.radius.max()) > 0


def test_float64_and_constants_that_are_computed(tmp_path):
    nodes = [node("Mul", "w two", "v"), node("Gemm", "x v", "y")]
    weight = array(5, 3).astype(np.float64)
    path = write(
        tmp_path / "net.onnx",
        nodes,
        (5,),
        dtype=TensorProto.DOUBLE,
        w=weight,
        two=np.float64(2),
    )
    model = lipcert.load_onnx(path)
    x = torch.rand(4, 5, dtype=torch.float64)
    assert torch.allclose(model(x), x @ torch.from_numpy(2 * weight))
    assert float(lipcert.bound(model, (5,), target="network").value) == pytest.approx(
        2 * np.linalg.norm(weight, 2)
    )


def test_files_that_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ModelError, match=r"none.onnx does not exist"):
        lipcert.load_onnx(tmp_path / "none.onnx")
    (tmp_path / "broken.onnx").write_bytes(b"no protobuf at all")
    with pytest.raises(
        ModelError, match=r"broken.onnx is not a valid ONNX file, or is damaged"
    ):
        lipcert.load_onnx(tmp_path / "broken.onnx")
    half = write(
        tmp_path / "half.onnx",
        [node("Relu", "x", "y")],
        (3,),
        dtype=TensorProto.FLOAT16,
    )
    with pytest.raises(
        ModelError, match=r"half.onnx takes float16 inputs, expected float32 or float64"
    ):
        lipcert.load_onnx(half)
    unknown = write(tmp_path / "unknown.onnx", [node("Relu", "x", "y")], ("size",))
    with pytest.raises(
        ModelError, match=r"takes inputs of shape \('N', 'size'\), expected known sizes"
    ):
        lipcert.load_onnx(unknown)
    good = write(tmp_path / "good.onnx", [node("Relu", "x", "y")], (3,))
    with pytest.raises(
        ModelError, match=r"has the outputs y, 'z' is not one of them; use load_onnx"
    ):
        lipcert.load_onnx(good, output="z")
    with pytest.raises(
        ModelError, match=r"good.onnx is for inputs of shape \(3,\), not \(4,\)"
    ):
        lipcert.load_model(str(good), input_shape=(4,))
    with pytest.raises(
        ModelError, match=r"good.onnx holds weights already; leave out --weights w.pt"
    ):
        lipcert.load_model(str(good), weights="w.pt")
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    with pytest.raises(
        ModelError, match=r"ONNX needs the package onnx; pip install 'lipcert\[onnx\]'"
    ):
        lipcert.load_onnx(good)
