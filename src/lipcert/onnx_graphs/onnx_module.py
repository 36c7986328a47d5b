"""An ONNX graph as a module: constants are folded, every other node becomes a step."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lipcert.errors import UnsupportedError, UnsupportedNode
from lipcert.onnx_graphs import onnx_elementwise, onnx_layers, onnx_pools, onnx_shapes
from lipcert.onnx_graphs.onnx_node import OPERATORS, Array, OnnxNode, RefusalError, Step

FAMILIES = (onnx_elementwise, onnx_layers, onnx_pools, onnx_shapes)
"""The files that make operators known."""
_OF_SHAPES = ("Shape", "Size")
_REMEDIES = {
    "LRN": "local response normalisation has no Lipschitz constant that holds "
    "everywhere; use BatchNormalization",
    "LayerNormalization": "its Lipschitz constant is unbounded near constant inputs; "
    "use BatchNormalization",
    "InstanceNormalization": "its Lipschitz constant is unbounded near constant "
    "inputs; use BatchNormalization",
}


@dataclass(frozen=True)
class _Wired:
    """A step with the names of the values that it takes and gives."""

    step: str
    takes: tuple[str, ...]
    gives: tuple[str, ...]


class OnnxModule(nn.Module):
    """A network that was read from an ONNX file; it computes what the graph says, node by node.

    input_shape: of one input, as the file states it: without the batch axis.
    """

    def __init__(
        self, input_name: str, input_shape: tuple[int, ...], output_name: str
    ) -> None:
        super().__init__()
        self.input_name, self.input_shape, self.output_name = (
            input_name,
            input_shape,
            output_name,
        )
        self.steps = nn.ModuleDict()
        self.wiring: list[_Wired] = []

    def add(self, node: Any, step: Step, takes: Sequence[str]) -> None:
        # Names of modules have no dots or slashes; exporters write "/layer1/conv/Conv".
        name = re.sub(r"\W+", "_", node.name or node.op_type).strip("_") or node.op_type
        if name in self.steps:
            name = f"{name}_{len(self.steps)}"
        self.steps[name] = step
        self.wiring.append(_Wired(name, tuple(takes), tuple(node.output)))

    def forward(self, x: Tensor) -> Tensor:
        values = {self.input_name: x}
        for wired in self.wiring:
            result = self.steps[wired.step](*(values[name] for name in wired.takes))
            if isinstance(result, Tensor):
                values[wired.gives[0]] = result
            else:
                values.update(zip(wired.gives, result, strict=True))
        return values[self.output_name]


@dataclass
class Builder:
    """Goes through the nodes with a sample: what it finds are constants or activations."""

    module: OnnxModule
    sample: Tensor
    opset: int
    constants: dict[str, Array]
    activations: dict[str, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def build(self, nodes: Sequence[Any]) -> OnnxModule:
        """The module with a step for every node that works on activations."""
        # The sample travels along: every node sees the shapes and dtypes of what it
        # will be given.
        self.activations[self.module.input_name] = self.sample
        _check_known(nodes, self.module.input_name)
        for node in nodes:
            self._read(node)
        return self.module.eval()

    def _read(self, node: Any) -> None:
        takes = [name for name in node.input if name in self.activations]
        # Shapes do not depend on the values of the input, so that they are constants.
        # The batch size in them is the sample's; whoever reshapes by it is checked
        # (`_row_shape`).
        if node.op_type in _OF_SHAPES and takes:
            shape = np.array(self.activations[takes[0]].shape, np.int64)
            shape = shape[
                slice(_attributes(node).get("start", 0), _attributes(node).get("end"))
            ]
            self.constants[node.output[0]] = (
                shape if node.op_type == "Shape" else np.array(np.prod(shape))
            )
        elif takes:
            self._add_step(node, takes)
        else:
            self._fold(node)

    def _add_step(self, node: Any, takes: Sequence[str]) -> None:
        values = [self._value(node, name) for name in node.input]
        attributes = {**_attributes(node), "outputs": len(node.output)}
        view = OnnxNode(
            node.name, node.op_type, attributes, values, self.opset, len(self.sample)
        )
        try:
            step = OPERATORS[node.op_type](view)
            # Tried at once, so that errors name the node.
            result = step(*(self.activations[name] for name in takes))
        except RefusalError as error:
            raise _unsupported(node, str(error)) from None
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise _unsupported(node, f"it does not fit its inputs ({error})") from error
        results = [result] if isinstance(result, Tensor) else list(result)
        # Dropout and BatchNormalization state outputs that nothing but training needs.
        for name, value in zip(node.output, results, strict=False):
            # From here on every activation has one row per input: nothing can mix rows
            # unseen.
            if value.dim() == 0 or len(value) != len(self.sample):
                raise _unsupported(
                    node,
                    f"its result has the shape {tuple(value.shape)} without a "
                    "batch axis in front",
                )
            self.activations[name] = value
        self.module.add(node, step, takes)

    def _value(self, node: Any, name: str) -> Array | Tensor | None:
        # An input that is left out has an empty name, to keep the places of those
        # behind it.
        if name == "":
            return None
        if name in self.activations:
            return self.activations[name]
        if name in self.constants:
            return self.constants[name]
        raise _unsupported(
            node,
            f"its input {name} is a second output of a node, which is not supported",
        )

    def _fold(self, node: Any) -> None:
        """Compute a node of constants by the reference implementation of ONNX."""
        from onnx import helper
        from onnx.reference import ReferenceEvaluator

        values = {name: self._value(node, name) for name in node.input if name}
        # The reference evaluates models, so that the node becomes a graph of its own.
        inputs = []
        for name, value in values.items():
            kind = helper.np_dtype_to_tensor_dtype(np.asarray(value).dtype)
            inputs.append(helper.make_tensor_value_info(name, kind, None))
        outputs = [helper.make_empty_tensor_value_info(name) for name in node.output]
        graph = helper.make_graph([node], "constants", inputs, outputs)
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", self.opset)]
        )
        try:
            results = ReferenceEvaluator(model).run(None, values)
        except Exception as error:  # whatever the reference does not take
            raise _unsupported(
                node, f"it cannot be computed from constants ({error})"
            ) from error
        self.constants.update(zip(node.output, map(np.asarray, results), strict=True))


def _check_known(nodes: Sequence[Any], input_name: str) -> None:
    """Refuse all operators without a reader at once."""
    # `moving` is what depends on the input; the rest are constants, which the reference
    # folds.
    moving, unknown = {input_name}, []
    for node in nodes:
        is_own_domain = node.domain not in ("", "ai.onnx")
        if moving.isdisjoint(node.input) or (
            node.op_type in _OF_SHAPES and not is_own_domain
        ):
            continue
        moving.update(node.output)
        if is_own_domain or node.op_type not in OPERATORS:
            remedy = _REMEDIES.get(
                node.op_type,
                "there is no reader for this operator; export the network without it",
            )
            unknown.append(
                UnsupportedNode(node.name or node.output[0], node.op_type, remedy)
            )
    if unknown:
        raise UnsupportedError(unknown)


def _unsupported(node: Any, reason: str) -> UnsupportedError:
    return UnsupportedError(
        [UnsupportedNode(node.name or node.output[0], node.op_type, reason)]
    )


def _attributes(node: Any) -> dict[str, Any]:
    """Attributes as Python has them: numbers, text and lists."""
    from onnx import helper

    values: dict[str, Any] = {}
    for attribute in node.attribute:
        value = helper.get_attribute_value(attribute)
        values[attribute.name] = value.decode() if isinstance(value, bytes) else value
    return values
