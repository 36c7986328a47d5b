"""Every operator of ONNX that is read computes what onnxruntime computes; all others are refused by name."""

import numpy as np
import pytest
import torch
from onnx_files import array, ints, node, write
from torch import nn

import lipcert
from lipcert.errors import ModelError, UnsupportedError
from lipcert.onnx_graphs import onnx_module
from lipcert.onnx_graphs.onnx_node import OPERATORS
from lipcert.onnx_graphs.onnx_patterns import PATTERNS
from lipcert.onnx_graphs.onnx_runtime import (
    TOLERANCE,
    difference,
    open_session,
    run_session,
)

IMAGE, VECTOR = (4, 9, 8), (6,)
HALF, TWO = np.float32(0.5), np.float32(2.0)
WIDE = {"w": array(6, 4, 3, 3), "b": array(6)}
TALL = {"w": array(6, 4, 4, 2), "b": array(6)}
BACK = {"w": array(4, 3, 3, 3)}
CASES = {
    # operator: (nodes' inputs, attributes, shape of an input, constants[, opset])
    "Gemm": ("x w b", {"alpha": 0.5, "beta": 2.0, "transB": 1}, VECTOR, {"w": array(3, 6), "b": array(3)}),
    "Gemm plain": ("x w b", {}, VECTOR, {"w": array(6, 3), "b": array(1, 3)}),
    "Gemm scalar": ("x w b", {}, VECTOR, {"w": array(6, 3), "b": array(1)}),
    "MatMul": ("x w", {}, VECTOR, {"w": array(6, 3)}),
    "MatMul left": ("w x", {}, (6, 5), {"w": array(3, 6)}),
    "MatMul batched": ("x w", {}, (2, 3, 5), {"w": array(2, 5, 4)}),
    "Conv": ("x w b", {"pads": [1, 2, 1, 2], "strides": [2, 1], "dilations": [1, 2]}, IMAGE, WIDE),
    "Conv grouped": ("x w", {"group": 2, "pads": [0, 0, 2, 1]}, IMAGE, {"w": array(6, 2, 3, 3)}),
    "Conv upper": ("x w b", {"auto_pad": "SAME_UPPER", "strides": [2, 3]}, IMAGE, TALL),
    "Conv lower": ("x w b", {"auto_pad": "SAME_LOWER", "strides": [2, 3]}, IMAGE, TALL),
    "Conv valid": ("x w b", {"auto_pad": "VALID"}, IMAGE, WIDE),
    "Conv 1d": ("x w", {"pads": [2, 0]}, (4, 9), {"w": array(3, 4, 3)}),
    "Conv 3d": ("x w", {"pads": [1, 0, 1, 1, 0, 0]}, (2, 5, 4, 4), {"w": array(3, 2, 2, 3, 2)}),
    "ConvTranspose": ("x w b", {"strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 1]}, IMAGE,
                      {"w": array(4, 3, 3, 3), "b": array(3)}),
    "ConvTranspose uneven": ("x w", {"strides": [2, 3], "pads": [0, 1, 2, 0], "group": 2}, IMAGE, BACK),
    "ConvTranspose upper": ("x w", {"strides": [2, 3], "auto_pad": "SAME_UPPER"}, IMAGE, {"w": array(4, 3, 4, 4)}),
    "ConvTranspose lower": ("x w", {"strides": [2, 3], "auto_pad": "SAME_LOWER"}, IMAGE, {"w": array(4, 3, 5, 4)}),
    "ConvTranspose shape": ("x w", {"strides": [2, 2], "output_shape": [18, 15]}, IMAGE, {"w": array(4, 3, 3, 3)}),
    "BatchNormalization": ("x s b m v", {"epsilon": 1e-3}, IMAGE,
                           {"s": array(4), "b": array(4), "m": array(4), "v": array(4) ** 2 + HALF}),
    "MaxPool": ("x", {"kernel_shape": [2, 3], "strides": [2, 2], "pads": [1, 1, 1, 1], "ceil_mode": 1}, IMAGE, {}),
    "MaxPool uneven": ("x", {"kernel_shape": [3, 3], "pads": [0, 1, 2, 0]}, IMAGE, {}),
    "MaxPool same": ("x", {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "SAME_UPPER"}, IMAGE, {}),
    "MaxPool dilated": ("x", {"kernel_shape": [2, 2], "dilations": [2, 3]}, IMAGE, {}),
    "AveragePool": ("x", {"kernel_shape": [3, 2], "pads": [1, 1, 1, 1], "strides": [2, 1]}, IMAGE, {}),
    "AveragePool counted": ("x", {"kernel_shape": [3, 2], "pads": [1, 1, 1, 1], "count_include_pad": 1}, IMAGE, {}),
    "AveragePool uneven": ("x", {"kernel_shape": [3, 2], "pads": [2, 0, 0, 1]}, IMAGE, {}),
    "AveragePool same": ("x", {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "SAME_LOWER"}, IMAGE, {}),
    "AveragePool whole": ("x", {"kernel_shape": [3, 2], "pads": [2, 0, 0, 1], "count_include_pad": 1}, IMAGE, {}),
    "GlobalAveragePool": ("x", {}, IMAGE, {}),
    "GlobalMaxPool": ("x", {}, IMAGE, {}),
    "ReduceMean": ("x a", {"keepdims": 0}, IMAGE, {"a": ints(-1, 2)}),
    "ReduceMean old": ("x", {"axes": [2, 3]}, IMAGE, {}, 13),
    "ReduceSum": ("x a", {}, IMAGE, {"a": ints(1)}),
    "ReduceMax": ("x a", {}, IMAGE, {"a": ints(3)}),
    "Relu": ("x", {}, VECTOR, {}), "Sigmoid": ("x", {}, VECTOR, {}), "Tanh": ("x", {}, VECTOR, {}),
    "Softplus": ("x", {}, VECTOR, {}), "Softsign": ("x", {}, VECTOR, {}), "HardSwish": ("x", {}, VECTOR, {}),
    "Mish": ("x", {}, VECTOR, {}), "Abs": ("x", {}, VECTOR, {}), "Neg": ("x", {}, VECTOR, {}),
    "Erf": ("x", {}, VECTOR, {}), "Sin": ("x", {}, VECTOR, {}), "Cos": ("x", {}, VECTOR, {}),
    "Atan": ("x", {}, VECTOR, {}),
    "LeakyRelu": ("x", {"alpha": 0.2}, VECTOR, {}), "LeakyRelu default": ("x", {}, VECTOR, {}),
    "Elu": ("x", {"alpha": 0.7}, VECTOR, {}), "Celu": ("x", {"alpha": 0.7}, VECTOR, {}), "Selu": ("x", {}, VECTOR, {}),
    "Gelu": ("x", {}, VECTOR, {}, 20), "Gelu tanh": ("x", {"approximate": "tanh"}, VECTOR, {}, 20),
    "HardSigmoid": ("x", {"alpha": 0.3}, VECTOR, {}),
    "PRelu": ("x s", {}, IMAGE, {"s": np.abs(array(4, 1, 1))}), "PRelu one": ("x s", {}, VECTOR, {"s": HALF[None]}),
    "Clip": ("x low high", {}, VECTOR, {"low": -HALF, "high": HALF}),
    "Clip above": ("x  high", {}, VECTOR, {"high": HALF}),
    "Clip old": ("x", {"min": 0.0, "max": 6.0}, VECTOR, {}, 10),
    "Softmax": ("x", {}, VECTOR, {}), "Softmax axis": ("x", {"axis": 1}, IMAGE, {}),
    "Softmax old": ("x", {}, IMAGE, {}, 11), "LogSoftmax": ("x", {"axis": -1}, VECTOR, {}),
    "Add": ("x c", {}, IMAGE, {"c": array(4, 1, 1)}), "Add both": ("x x", {}, IMAGE, {}),
    "Sub": ("x c", {}, IMAGE, {"c": array(1, 4, 1, 1)}), "Sub reversed": ("c x", {}, IMAGE, {"c": array(8)}),
    "Mul": ("c x", {}, IMAGE, {"c": TWO}), "Div": ("x c", {}, IMAGE, {"c": TWO}), "Sum": ("x x", {}, VECTOR, {}),
    "Max": ("x c", {}, VECTOR, {"c": HALF}), "Min": ("c x", {}, VECTOR, {"c": HALF}),
    "Cast": ("x", {"to": 1}, VECTOR, {}),
    "Identity": ("x", {}, VECTOR, {}), "Dropout": ("x r", {}, VECTOR, {"r": HALF}),
    "Reshape": ("x t", {}, IMAGE, {"t": ints(0, 2, -1)}), "Reshape free": ("x t", {}, IMAGE, {"t": ints(-1, 288)}),
    "Flatten": ("x", {}, IMAGE, {}),
    "Transpose": ("x", {"perm": [0, 2, 3, 1]}, IMAGE, {}),
    "Squeeze": ("x a", {}, (1, 5, 1), {"a": ints(1, -1)}), "Unsqueeze": ("x a", {}, VECTOR, {"a": ints(-1, 1)}),
    "Squeeze old": ("x", {"axes": [1]}, (1, 5, 1), {}, 11),
    "Concat": ("x x", {"axis": 1}, IMAGE, {}),
    "Pad": ("x p v", {}, IMAGE, {"p": ints(0, 0, 1, 2, 0, 1, 0, 3), "v": HALF}),
    "Pad reflect": ("x p", {"mode": "reflect"}, IMAGE, {"p": ints(0, 0, 1, 2, 0, 0, 0, 3)}),
    "Pad edge": ("x p  a", {"mode": "edge"}, IMAGE, {"p": ints(1, 2, 0, 3), "a": ints(2, 3)}),
    "Pad crop": ("x p", {}, IMAGE, {"p": ints(0, 0, -1, 2, 0, 0, 0, -3)}),
    "Slice": ("x s e a t", {}, IMAGE, {"s": ints(1, -1), "e": ints(-1, -99), "a": ints(2, 3), "t": ints(2, -3)}),
    "Slice old": ("x", {"starts": [0, 1], "ends": [9999, 3], "axes": [0, 1]}, IMAGE, {}, 9),
    "Gather": ("x i", {"axis": 1}, IMAGE, {"i": ints(3, 0, -1)}),
    "Gather one": ("x i", {"axis": -1}, IMAGE, {"i": np.int64(2)}),
    "Gather table": ("x i", {"axis": 2}, IMAGE, {"i": np.array([[0, 1, 2], [5, 4, 3]])}),
}  # fmt: skip


def read_case(name, path):
    inputs, attributes, shape, constants, *opset = CASES[name]
    kind = name.split()[0]
    made = node(kind, "x", "y", **attributes)
    del made.input[:]
    made.input.extend(inputs.split(" "))
    return write(path, [made], shape, opset=(opset or [18])[0], **constants), shape


@pytest.mark.parametrize("name", CASES)
def test_operators_compute_what_onnxruntime_computes(name, tmp_path):
    """`load_onnx` compares too; here with other inputs, and so that a comparison that sees nothing would be found."""
    path, shape = read_case(name, tmp_path / "net.onnx")
    model = lipcert.load_onnx(path)
    assert model.input_shape == shape
    session = open_session(path)
    torch.manual_seed(5)
    for rows in (2, 3):
        x = 3 * torch.randn(rows, *shape)
        (expected,) = run_session(session, x, ["y"])
        assert difference(model(x), expected) <= 1e-5


def test_every_operator_has_a_case():
    assert {name.split()[0] for name in CASES} | {"Split"} | set(PATTERNS) == set(
        OPERATORS
    )


ONE, HALF_ROOT = np.float32(1), np.float32(0.5**0.5)
GELU = [node("Mul", "a root", "b"), node("Erf", "b", "c"), node("Add", "c one", "d")]
WRITTEN_OUT = {
    # as exporters write them, between two dense layers
    "SiLU": (nn.SiLU(), [node("Sigmoid", "a", "b"), node("Mul", "a b", "z")]),
    "Mish": (
        nn.Mish(),
        [node("Softplus", "a", "b"), node("Tanh", "b", "c"), node("Mul", "c a", "z")],
    ),
    "Softsign": (
        nn.Softsign(),
        [node("Abs", "a", "b"), node("Add", "b one", "c"), node("Div", "a c", "z")],
    ),
    "GELU": (nn.GELU(), [*GELU, node("Mul", "a half", "e"), node("Mul", "e d", "z")]),
    "GELU later": (
        nn.GELU(),
        [*GELU, node("Mul", "a d", "e"), node("Mul", "e half", "z")],
    ),
}


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_activations_that_are_written_out_are_bounded(name, tmp_path):
    module, nodes = WRITTEN_OUT[name]
    first, last = array(6, 5), array(5, 3)
    nodes = [node("MatMul", "x first", "a"), *nodes, node("MatMul", "z last", "y")]
    constants = {
        "first": first,
        "last": last,
        "one": ONE,
        "half": HALF,
        "root": HALF_ROOT,
    }
    model = lipcert.load_onnx(write(tmp_path / "net.onnx", nodes, VECTOR, **constants))
    same = nn.Sequential(
        nn.Linear(6, 5, bias=False), module, nn.Linear(5, 3, bias=False)
    ).eval()
    same.load_state_dict(
        {"0.weight": torch.tensor(first.T), "2.weight": torch.tensor(last.T)}
    )
    found, expected = lipcert.bound(model, VECTOR), lipcert.bound(same, VECTOR)
    assert torch.allclose(found.value, expected.value, rtol=1e-5)


def test_what_only_looks_like_a_pattern_is_none(tmp_path):
    nodes = [
        node("Sigmoid", "x", "b"),
        node("Add", "x one", "a"),
        node("Mul", "a b", "y"),
    ]
    model = lipcert.load_onnx(write(tmp_path / "net.onnx", nodes, VECTOR, one=ONE))
    x = torch.randn(3, 6)
    assert torch.allclose(model(x), (x + 1) * x.sigmoid())
    with pytest.raises(UnsupportedError, match="a product of two tensors"):
        lipcert.bound(model, VECTOR)


@pytest.mark.parametrize(
    "wrong", ["LeakyRelu", "Conv upper", "AveragePool", "Softmax old", "Slice", "Gemm"]
)
def test_a_wrong_reader_would_be_refused(wrong, tmp_path, monkeypatch):
    path, _ = read_case(wrong, tmp_path / "net.onnx")
    kind = wrong.split()[0]
    others = {
        "LeakyRelu": lambda view: view.step(torch.relu),
        "Conv": lambda view: OPERATORS["Conv"](_changed(view, auto_pad="SAME_LOWER")),
        "AveragePool": lambda view: OPERATORS["AveragePool"](
            _changed(view, count_include_pad=1)
        ),
        "Softmax": lambda view: view.step(torch.softmax, dim=1),
        "Slice": lambda view: view.step(torch.narrow, dim=2, start=1, length=3),
        "Gemm": lambda view: OPERATORS["Gemm"](_changed(view, alpha=1.0)),
    }
    monkeypatch.setattr(onnx_module, "OPERATORS", {**OPERATORS, kind: others[kind]})
    with pytest.raises(
        (ModelError, UnsupportedError),
        match=r"was read as something else than onnxruntime computes",
    ):
        lipcert.load_onnx(path)
    assert TOLERANCE < 1e-3


def _changed(view, **attributes):
    from dataclasses import replace

    return replace(view, attributes={**view.attributes, **attributes})


def test_pieces_are_put_together_again(tmp_path):
    nodes = [
        node("Split", "x sizes", ["a", "b", "c"], axis=1),
        node("Concat", "c a b", "y", axis=1),
    ]
    path = write(tmp_path / "net.onnx", nodes, (6, 5), sizes=ints(1, 3, 2))
    x = torch.rand(3, 6, 5)
    assert torch.equal(lipcert.load_onnx(path)(x), x[:, [4, 5, 0, 1, 2, 3]])
    nodes = [
        node("Split", "x", ["a", "b"], axis=-1, num_outputs=2),
        node("Concat", "b a", "y", axis=2),
    ]
    assert lipcert.load_onnx(write(tmp_path / "even.onnx", nodes, (6, 4)))(
        x[..., :4]
    ).shape == (3, 6, 4)


def test_a_graph_for_a_single_row_is_a_module_for_any_number(tmp_path):
    """As torch.onnx.export writes without a dynamic axis: the batch size is in shapes and constants."""
    constant = array(1, 3, 4)
    nodes = [
        node("Concat", "c x", "a", axis=-1),
        node("Reshape", "a t", "b"),
        node("Gemm", "b w", "y"),
    ]
    path = write(
        tmp_path / "net.onnx",
        nodes,
        (3, 2),
        batch=1,
        c=constant,
        t=ints(1, 18),
        w=array(18, 5),
    )
    model, session = lipcert.load_onnx(path), open_session(path)
    x = torch.rand(4, 3, 2)
    (expected,) = run_session(session, x, ["y"], rows=1)
    assert difference(model(x), expected) <= 1e-6


REFUSED = {
    "LRN": ([node("LRN", "x", "y", size=3)], IMAGE, r"LRN_y \(LRN\): local response normalisation has no Lipschitz"),
    "unknown": ([node("Exp", "x", "a"), node("Sqrt", "a", "y")], VECTOR, r"2 operations .*\n.*\(Exp\)(.|\n)*\(Sqrt\)"),
    "batch": ([node("Transpose", "x", "y", perm=[1, 0])], VECTOR, r"perm is \[1, 0\]; the batch has to stay"),
    "mean": ([node("ReduceMean", "x", "y")], VECTOR, r"it reduces all axes, that of the batch too"),
    "slice": ([node("Slice", "x zero one", "y")], VECTOR, r"it works on the batch axis; rows of a batch have to"),
    "reshape": ([node("Reshape", "x minus", "y")], VECTOR, r"Reshape.*the batch has to stay the first axis"),
    "rows": ([node("Add", "x rows", "y")], VECTOR, r"of shape \(7, 6\) treats the rows of a batch differently"),
    "weights": ([node("Gemm", "x x", "y", transB=1)], VECTOR, r"input 1 depends on the input of the network"),
    "indices": ([node("MaxPool", "x", ["a", "b"], kernel_shape=[2, 2]), node("Cast", "b", "y", to=1)], IMAGE,
                r"its input b is a second output"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_read_is_named(case, tmp_path):
    nodes, shape, message = REFUSED[case]
    constants = {
        "zero": ints(0),
        "one": ints(1),
        "minus": ints(-1),
        "rows": array(7, 6),
    }
    with pytest.raises(UnsupportedError, match=message):
        lipcert.load_onnx(write(tmp_path / "net.onnx", nodes, shape, **constants))
