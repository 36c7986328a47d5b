"""`lipcert.load_onnx`: from a file to a module that agrees with onnxruntime, or an error."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lipcert.errors import ModelError
from lipcert.onnx_graphs.onnx_module import Builder, OnnxModule
from lipcert.onnx_graphs.onnx_patterns import with_patterns
from lipcert.onnx_graphs.onnx_runtime import (
    TOLERANCE,
    difference,
    needed,
    open_session,
    run_session,
    sample_inputs,
)

_DTYPES = {1: torch.float32, 11: torch.float64}
_BATCH = 7  # of the sample that goes through a graph with any batch size


def load_onnx(path: str | Path, *, output: str | None = None) -> OnnxModule:
    """The network of an ONNX file as a module in eval mode, with `input_shape` as an attribute.

    Its outputs are compared with those of onnxruntime on random inputs; a file with
    which it does not agree, or that has operators without a reader, is refused. What is
    bounded and certified afterwards is the module, executed by torch, not another
    runtime.

    Args:
        path: an .onnx file with one input, whose first axis is the batch.
        output: which of several outputs is meant.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
        >>> torch.onnx.export(model, (torch.zeros(1, 4),), "net.onnx", dynamo=False)
        >>> lipcert.load_onnx("net.onnx").input_shape
        (4,)
    """
    file = _read(Path(path))
    model = OnnxModule(file.input_name, file.shape, _chosen_output(file, output))
    nodes = with_patterns(file.graph.node, file.constants, model.output_name)
    # Seven, because hardly anything else in a network has this size: a batch axis that
    # has moved is noticed.
    rows = file.rows or _BATCH
    sample = sample_inputs(rows, file.shape, file.dtype)[0]
    built = Builder(model, sample, file.opset, dict(file.constants)).build(nodes)
    _compare(built, file)
    return built


@dataclass(frozen=True)
class _File:
    """What a file says; rows: the batch size, None if any will do."""

    path: Path
    graph: Any
    opset: int
    constants: dict[str, Any]
    input_name: str
    shape: tuple[int, ...]
    rows: int | None
    dtype: torch.dtype


def _read(path: Path) -> _File:
    onnx: Any = needed("onnx")
    model = _loaded(onnx, path)
    graph, to_array = model.graph, onnx.numpy_helper.to_array
    constants = {tensor.name: to_array(tensor) for tensor in graph.initializer}
    # Files of old versions list their weights among the inputs.
    inputs = [value for value in graph.input if value.name not in constants]
    if len(inputs) != 1:
        names = ", ".join(value.name for value in inputs) or "none"
        raise ModelError(
            f"{path} has the inputs {names}, expected a single one; make "
            "the others constants"
        )
    kind = inputs[0].type.tensor_type
    if kind.elem_type not in _DTYPES:
        name = onnx.TensorProto.DataType.Name(kind.elem_type).lower()
        raise ModelError(
            f"{path} takes {name} inputs, expected float32 or float64; "
            "export it with these"
        )
    # 0 stands for a size that has a name only, such as "batch".
    sizes = [dimension.dim_value for dimension in kind.shape.dim]
    if len(sizes) < 2 or 0 in sizes[1:]:
        listed = tuple(d.dim_value or d.dim_param or "?" for d in kind.shape.dim)
        raise ModelError(
            f"{path} takes inputs of shape {listed}, expected known sizes "
            "after the batch axis"
        )
    own = [entry for entry in model.opset_import if entry.domain in ("", "ai.onnx")]
    opset = max(entry.version for entry in own)
    name, shape, dtype = inputs[0].name, tuple(sizes[1:]), _DTYPES[kind.elem_type]
    return _File(path, graph, opset, constants, name, shape, sizes[0] or None, dtype)


def _loaded(onnx: Any, path: Path) -> Any:
    if not path.is_file():
        raise ModelError(f"{path} does not exist")
    try:
        return onnx.load(str(path))
    except Exception as error:  # of protobuf, of the checker, of external data
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"{path} is not a valid ONNX file, or is damaged ({reason})"
        ) from None


def _chosen_output(file: _File, output: str | None) -> str:
    names: list[str] = [value.name for value in file.graph.output]
    if output is None and len(names) == 1:
        return names[0]
    if output is None or output not in names:
        given = "none was chosen"
        if output is not None:
            given = f"{output!r} is not one of them"
        raise ModelError(
            f"{file.path} has the outputs {', '.join(names)}, {given}; use "
            "load_onnx(…, output=…)"
        )
    return output


@torch.no_grad()
def _compare(model: OnnxModule, file: _File) -> None:
    """Refuse a module that computes something else than onnxruntime, for any number of rows."""
    session = open_session(file.path)
    for rows in (1, 5):
        for x in sample_inputs(rows * (file.rows or 1), file.shape, file.dtype):
            # A graph with a fixed batch size runs in pieces, the module at once: both
            # have to agree.
            (expected,) = run_session(session, x, [model.output_name], file.rows)
            found = difference(model(x), expected)
            if found > TOLERANCE:
                how_far = (
                    f"outputs differ by {found:.2g} of the largest one, more "
                    f"than {TOLERANCE:g}"
                )
                raise ModelError(
                    f"{file.path} was read as something else than onnxruntime "
                    f"computes: {how_far}"
                )
