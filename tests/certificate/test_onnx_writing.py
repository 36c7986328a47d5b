"""Certified classifiers as ONNX files: the same radii in onnxruntime, and nothing rounded on the way."""

from importlib import import_module

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import lipcert
from lipcert.certificate import onnx_writing
from lipcert.errors import ModelError
from lipcert.onnx_graphs.onnx_runtime import open_session, run_session


@pytest.fixture(scope="module")
def classifier():
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(1, 3, 3),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(27, 4),
    )
    model = nn.Sequential(*layers).eval()
    return lipcert.CertifiedClassifier(model, lipcert.bound(model, (1, 8, 8)))


@pytest.fixture(scope="module")
def written(classifier, tmp_path_factory):
    return classifier.to_onnx(tmp_path_factory.mktemp("out") / "certified.onnx")


def test_onnxruntime_gives_the_same_logits_and_radii(classifier, written):
    session = open_session(written)
    assert [value.name for value in session.get_outputs()] == ["logits", "radius"]
    for rows in (1, 9):
        x = torch.rand(rows, 1, 8, 8)
        logits, radius = run_session(session, x, ("logits", "radius"))
        assert radius.dtype == torch.float64
        assert torch.allclose(logits, classifier(x)[0], atol=1e-5)
        assert torch.allclose(radius, classifier(x)[1], rtol=1e-4, atol=1e-9)
        assert float(radius.max()) > 0
    _, radius = run_session(
        session, torch.full((1, 1, 8, 8), torch.nan), ("logits", "radius")
    )
    assert float(radius) == 0


def test_the_file_says_what_it_is(classifier, written):
    model = onnx.load(written)
    assert {entry.domain: entry.version for entry in model.opset_import}[
        ""
    ] == onnx_writing.OPSET
    facts = {entry.key: entry.value for entry in model.metadata_props}
    assert facts["guarantee"] == classifier.guarantee
    assert "not with fused or reduced-precision kernels" in facts["holds"]


def test_roundings_are_kept_in_float64(written):
    """torch writes Python's numbers in float32, in which 1 − 2⁻⁴⁵ is 1: radii would not be rounded down."""
    found = set()
    for tensor in onnx.load(written).graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.shape == () and array.dtype == np.float64:
            found.add(float(array))
    assert {1 - 2.0**-45, 1 + 1e-12} <= found


def test_a_rounded_number_and_other_outputs_are_refused(
    classifier, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        import_module("lipcert.certificate.radius"), "_ROUND_DOWN", 1 - 2.0**-45
    )
    with pytest.raises(
        ModelError,
        match=r"bad.onnx was not written: the exporter of torch has rounded 1 to float32",
    ):
        classifier.to_onnx(tmp_path / "bad.onnx")
    monkeypatch.undo()
    monkeypatch.setattr(onnx_writing, "difference", lambda *_: 1.0)
    with pytest.raises(
        ModelError, match=r"bad.onnx was not written: its logits in onnxruntime differ"
    ):
        classifier.to_onnx(tmp_path / "bad.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("activation", [nn.GELU(), nn.LeakyReLU(0.3)], ids=str)
def test_numbers_that_are_used_in_float32_may_be_rounded(activation, tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), activation, nn.Linear(4, 3)).eval()
    classifier = lipcert.CertifiedClassifier(model, lipcert.bound(model, (4,)))
    assert classifier.to_onnx(tmp_path / "good.onnx").exists()


@pytest.mark.parametrize("activation", [nn.ELU(), nn.SELU(), nn.CELU(0.3)], ids=str)
def test_activations_that_runtimes_compute_with_cancellation_are_refused(
    activation, tmp_path
):
    """exp(x) − 1 in onnxruntime is 69 times as far off near zero as the allowance: a radius was false there."""
    model = nn.Sequential(nn.Linear(4, 4), activation, nn.Linear(4, 3)).eval()
    classifier = lipcert.CertifiedClassifier(model, lipcert.bound(model, (4,)))
    with pytest.raises(
        ModelError,
        match=r"bad.onnx was not written: runtimes compute .*lu as exp\(x\) − 1",
    ):
        classifier.to_onnx(tmp_path / "bad.onnx")
    assert list(tmp_path.iterdir()) == []
