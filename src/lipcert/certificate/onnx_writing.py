"""A certified classifier as an ONNX file, checked against the module by onnxruntime."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lipcert.errors import ModelError
from lipcert.files import replace_file
from lipcert.network.states import quiet
from lipcert.onnx_graphs.onnx_runtime import (
    TOLERANCE,
    difference,
    needed,
    open_session,
    run_session,
    sample_inputs,
)
from lipcert.version import VERSION

if TYPE_CHECKING:
    from lipcert.certificate.classifier import CertifiedClassifier

OPSET = 18
_EXACT = (0.0, 2.0, float("inf"))
"""Numbers of the classifier that float32 has exactly."""
_INEXACT = {"Celu", "Elu", "Selu"}
"""Operators of ONNX that runtimes compute as exp(x) − 1, which loses all digits near zero, where torch has expm1."""
INPUT, OUTPUTS = "input", ("logits", "radius")


def write_onnx(classifier: CertifiedClassifier, path: Path) -> None:
    """Write the file; it is complete and agrees with the classifier, or absent."""
    onnx: Any = needed("onnx")
    needed("onnxscript")
    shape, dtype = classifier.input_shape, classifier.dtype
    sample = sample_inputs(2, shape, dtype)[0]
    model = _exported(classifier, sample)
    # Before anything is written: a file with wrong numbers must not exist under any
    # name.
    _check_operators(model, path)
    _check_numbers(model.graph, path)
    facts = {
        "lipcert": VERSION, "guarantee": classifier.guarantee, "fingerprint": classifier.fingerprint,
        "radius": "l2, in the units of the input; 0 where nothing is known",
        "holds": "in IEEE arithmetic, whatever the order of " "sums; not " "with fused or " "reduced-precision kernels",
    }  # fmt: skip
    for key, value in facts.items():
        model.metadata_props.add(key=key, value=value)
    # An error in the comparison removes the temporary file and leaves an earlier one as
    # it was.
    with replace_file(path) as temporary:
        onnx.save(model, str(temporary))
        _check(classifier, temporary, path)


def _exported(classifier: nn.Module, sample: torch.Tensor) -> Any:
    """The graph, with any number of rows, by torch's own exporter."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                classifier,
                (sample,),
                input_names=[INPUT],
                output_names=list(OUTPUTS),
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                opset_version=OPSET,
                dynamo=True,
                optimize=False,
                verbose=False,
            )
    finally:
        logger.setLevel(level)
    assert program is not None
    return program.model_proto


def _check_operators(model: Any, path: Path) -> None:
    """Refuse operators whose errors in onnxruntime exceed the allowances of the classifier."""
    nodes = list(model.graph.node)
    for function in model.functions:
        nodes += function.node
    found = sorted({node.op_type for node in nodes} & _INEXACT)
    if found:
        raise ModelError(
            f"{path} was not written: runtimes compute {', '.join(found)} as exp(x) "
            "− 1, with errors near zero that "
            "radii do not cover; train with another activation, such as "
            "Softplus or SiLU"
        )


def _check_numbers(graph: Any, path: Path) -> None:
    """Refuse numbers that were rounded to float32 before they are used in float64: radii would be too large."""
    onnx: Any = needed("onnx")
    rounded: dict[str, float] = {}
    # A Constant in float32 that a Cast widens has lost its digits before; 1 − 2^-45
    # would have become 1.
    narrow = {
        value.name
        for value in graph.value_info
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    }
    for node in graph.node:
        if (
            node.op_type == "CastLike" and node.input[1] in narrow
        ):  # numbers that are used in float32
            continue
        for attribute in node.attribute:
            if (
                node.op_type == "Constant"
                and attribute.t.data_type == onnx.TensorProto.FLOAT
            ):
                rounded[node.output[0]] = float(
                    onnx.numpy_helper.to_array(attribute.t).reshape(-1)[0]
                )
        for name in node.input:
            if (
                node.op_type in ("Cast", "CastLike")
                and rounded.get(name, 0.0) not in _EXACT
            ):
                raise ModelError(
                    f"{path} was not written: the exporter of torch has rounded "
                    f"{rounded[name]:g} to float32"
                )


@torch.no_grad()
def _check(classifier: CertifiedClassifier, file: Path, path: Path) -> None:
    """Refuse a file with other outputs than the classifier's."""
    session = open_session(file)
    # Not the number of rows that was exported: the batch axis has to be free.
    for rows in (1, 5):
        for x in sample_inputs(rows, classifier.input_shape, classifier.dtype):
            found = run_session(session, x, OUTPUTS)
            for name, mine, theirs in zip(OUTPUTS, classifier(x), found, strict=True):
                if difference(theirs, mine) > TOLERANCE:
                    raise ModelError(
                        f"{path} was not written: its {name} in onnxruntime differ "
                        "from the classifier's"
                    )
