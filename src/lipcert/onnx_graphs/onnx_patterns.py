"""Activations that exporters write as several nodes, such as x·sigmoid(x): products of two branches have no Lipschitz
constant, but these have. They are read as one node; whether that is right, onnxruntime
says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from lipcert.onnx_graphs.onnx_node import Array, OnnxNode, Step, operator


def _doubled_gelu(x: Tensor) -> Tensor:
    return 2 * F.gelu(x)


_ERRORS = ("Add(1,Erf(Div(x,1.41421)))", "Add(1,Erf(Mul(0.707107,x)))")
PATTERNS: dict[str, Any] = {
    # the expression, with the operands of sums and products in alphabetical order: the
    # function
    "Mul(Sigmoid(x),x)": F.silu,
    "Mul(Tanh(Softplus(x)),x)": F.mish,
    "Div(x,Add(1,Abs(x)))": F.softsign,
    **{f"Mul({error},x)": _doubled_gelu for error in _ERRORS},
    **{f"Mul({error},Mul(0.5,x))": F.gelu for error in _ERRORS},
}
_DEPTH = 5  # of the expressions above


@operator(*PATTERNS)
def pattern(node: OnnxNode) -> Step:
    return node.step(PATTERNS[node.kind])


@dataclass(frozen=True)
class _Expressions:
    """The nodes of a graph by what they give, and its constants with a single entry."""

    nodes: Mapping[str, Any]
    numbers: Mapping[str, float]

    def text(self, name: str, x: str, depth: int = _DEPTH) -> str:
        """A value as an expression in another one, `x`; "?" for what depends on something else, or is too deep."""
        if name == x:
            return "x"
        if name in self.numbers:
            # Six digits: √2 of an exporter in float32 and in float64 is 1.41421 in
            # both.
            return f"{self.numbers[name]:.6g}"
        node = self.nodes.get(name)
        if node is None or depth == 0:
            return "?"
        operands = [self.text(operand, x, depth - 1) for operand in node.input]
        if node.op_type in ("Add", "Mul"):
            # x·σ(x) and σ(x)·x are one pattern.
            operands.sort()
        return f"{node.op_type}({','.join(operands)})"

    def pattern(self, node: Any) -> tuple[str, str] | None:
        """The pattern that ends in a node, and the value that it is a function of."""
        for operand in node.input:
            before = self.nodes.get(operand)
            # x is an operand itself, as in x·σ(x), or one step before, as in (0.5·x)·(1
            # + erf(…)).
            for x in (operand, *(before.input if before is not None else ())):
                if x not in self.numbers:
                    kind = self.text(node.output[0], x)
                    if kind in PATTERNS:
                        return kind, x
        return None


def with_patterns(
    nodes: Sequence[Any], constants: Mapping[str, Array], output: str
) -> list[Any]:
    """The nodes that the output depends on, with one node for every pattern."""
    from onnx import helper

    by_output = {name: node for node in nodes for name in node.output}
    expressions = _Expressions(by_output, _single_numbers(nodes, constants))
    replaced = []
    for node in nodes:
        # All patterns end in a product or a quotient.
        found = expressions.pattern(node) if node.op_type in ("Mul", "Div") else None
        if found is not None:
            kind, x = found
            node = helper.make_node(kind, [x], list(node.output), name=node.name)  # noqa: PLW2901
        replaced.append(node)
    # The inner nodes of a pattern stay only if something else reads them, too.
    return _needed_for(replaced, output)


def _single_numbers(
    nodes: Sequence[Any], constants: Mapping[str, Array]
) -> dict[str, float]:
    """Constants with one entry, in the file or as nodes."""
    from onnx import numpy_helper

    numbers = {
        name: float(array.reshape(-1)[0])
        for name, array in constants.items()
        if array.size == 1
    }
    for node in nodes:
        for attribute in node.attribute:
            if node.op_type == "Constant" and attribute.name == "value":
                array = numpy_helper.to_array(attribute.t)
                if array.size == 1:
                    numbers[node.output[0]] = float(array.reshape(-1)[0])
    return numbers


def _needed_for(nodes: Sequence[Any], output: str) -> list[Any]:
    """Without the nodes whose results nothing uses."""
    needed = {output}
    kept = []
    # Nodes are in topological order: whoever reads a result comes later.
    for node in reversed(nodes):
        if not needed.isdisjoint(node.output):
            needed.update(node.input)
            kept.append(node)
    return kept[::-1]
