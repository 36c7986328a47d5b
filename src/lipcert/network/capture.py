"""From a PyTorch module to a `Program`, by torch.export."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from threading import RLock
from typing import Any

import torch
from torch import Tensor, fx, nn

from lipcert.network.capturable import check_graph, check_model, check_output, checked_shape
from lipcert.network.explain import explained
from lipcert.network.kinds import packet_name
from lipcert.network.program import Live, Opaque, Program, Shape
from lipcert.network.rules.registry import Rule, find_module_rule
from lipcert.network.states import quiet, unchanged

aten = torch.ops.aten
LOCK = RLock()
"""Captures and comparisons change modules for a moment: one at a time."""
_OPAQUE: list[nn.Module] = []
"""The modules that are single operations in the capture under way."""


class _Root(nn.Module):
    """Calls a model as users do, so that its hooks and its own __call__ are captured too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Any:
        return self.model(x)


@torch.library.custom_op("lipcert::opaque", mutates_args=())
def _opaque(x: Tensor, index: int) -> Tensor:
    result: Tensor = _OPAQUE[index](x)
    return result


@_opaque.register_fake
def _(x: Tensor, index: int) -> Tensor:
    with torch._subclasses.fake_tensor.unset_fake_temporarily(), torch.no_grad():
        like = torch.zeros(2, *map(int, x.shape[1:]), dtype=x.dtype, device=x.device)
        result = _OPAQUE[index](like)
    if not isinstance(result, Tensor) or len(result) != 2:
        raise TypeError("a module with a rule must return one tensor with the batch axis in front")
    return x.new_empty(x.shape[0], *result.shape[1:])


def capture(model: nn.Module, input_shape: Shape, view: str = "residual") -> Program:
    """The program of a model in the mode it is in; modules that have a rule in this view are single operations.

    Raises:
        UnsupportedError: torch.export cannot follow the model's code.
        ShapeError: the model does not accept inputs of this shape.
    """
    input_shape = checked_shape(input_shape)
    check_model(model)
    tensors = (*model.parameters(), *model.buffers())
    like = next((t for t in tensors if t.is_floating_point()), torch.zeros(()))
    x = torch.zeros(2, *input_shape, dtype=like.dtype, device=like.device)
    with LOCK, unchanged(model), _rules_as_operations(model, view) as ruled:
        try:
            exported = _export(_Root(model), x)
        except Exception as error:  # torch.export raises whatever the model's code raises
            raise explained(error, model, x) from error
        check_graph(exported, model)
        result = check_output(exported, model)
        names = _tensor_names(exported)
        readers = {}
        for node, name in names.items():
            readers[node] = _reader(model, name, exported.constants.get(f"model.{name}"))
    graph = exported.graph_module.graph
    next(node for node in graph.nodes if node.op == "output").args = ((result,),)
    _simplify(graph)
    opaque = {}
    for node in graph.nodes:
        if node.target is torch.ops.lipcert.opaque.default:
            module, rule = ruled[node.args[1]]
            shape = tuple(node.args[0].meta["val"].shape[1:])
            opaque[node] = Opaque(module, rule, capture(module, shape, view=""))
    changed = [name.removeprefix("model.") for name in exported.graph_signature.buffers_to_mutate.values()]
    return Program(graph, input_shape, like.dtype, like.device, readers, names, opaque, tuple(changed))


def _export(root: nn.Module, x: Tensor) -> torch.export.ExportedProgram:
    batch = {0: torch.export.Dim.DYNAMIC}
    with quiet(), torch.no_grad(), torch.inference_mode(False):
        exported = torch.export.export(root, (x,), dynamic_shapes={"x": batch}, strict=False)
        _pass_through_dropout(exported.graph)
        if not all(_is_functional(node) for node in exported.graph.nodes):
            exported = exported.run_decompositions({})
    return exported


def _pass_through_dropout(graph: fx.Graph) -> None:
    """Inactive dropout returns its input itself, so that a change of one in place is a change of the other."""
    for node in graph.nodes:
        if "dropout" in packet_name(node) and node.args[-1] is False:
            node.target, node.args = aten.alias.default, node.args[:1]


def _is_functional(node: fx.Node) -> bool:
    """Whether a node is a plain operator that changes none of its arguments."""
    if node.op != "call_function":
        return node.op in ("placeholder", "output")
    if isinstance(node.target, torch._ops.OpOverload):
        return not node.target._schema.is_mutable
    return not isinstance(node.target, torch._ops.HigherOrderOperator)


def _tensor_names(exported: torch.export.ExportedProgram) -> dict[fx.Node, str]:
    """The names of the tensors that the graph reads, as the model calls them."""
    signature = exported.graph_signature
    targets = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    targets |= signature.inputs_to_lifted_tensor_constants
    names = {}
    for node in exported.graph_module.graph.nodes:
        if node.op == "placeholder" and node.name in targets:
            names[node] = targets[node.name].removeprefix("model.")
    return names


def _reader(model: nn.Module, path: str, constant: Any) -> Live:
    """Reads a tensor from the model itself; tensors that are written in its code are constants."""
    get = operator.attrgetter(path)
    try:
        if isinstance(get(model), Tensor):
            return lambda: get(model)
    except AttributeError:
        pass
    return lambda: constant


def _simplify(graph: fx.Graph) -> None:
    """Remove assertions and what is not used, and put operators in the place of others that return the same."""
    for node in list(graph.nodes):
        name = packet_name(node)
        if name in ("_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range_for_size"):
            graph.erase_node(node)
        elif node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default  # which does not depend on memory formats
        elif name == "copy" and node.args[1].meta["val"].dtype == node.meta["val"].dtype:
            node.target = aten.expand_as.default  # which is differentiable
            node.args = (node.args[1], node.args[0])
        elif name == "div" and _is_softsign(node):
            node.target = torch.nn.functional.softsign
            node.args = node.args[:1]
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))


def _is_softsign(node: fx.Node) -> bool:
    """Whether a quotient is x/(|x| + 1), as torch writes F.softsign."""
    if len(node.args) != 2 or node.kwargs or not isinstance(node.args[1], fx.Node):
        return False
    total = node.args[1]
    if packet_name(total) != "add" or len(total.args) != 2 or total.args[1] != 1 or total.kwargs:
        return False
    size = total.args[0]
    return isinstance(size, fx.Node) and packet_name(size) == "abs" and size.args == node.args[:1]


@contextmanager
def _rules_as_operations(model: nn.Module, view: str) -> Iterator[list[tuple[nn.Module, Rule]]]:
    """Within, modules with a rule are calls of one operator; yields them in the order of their numbers."""
    ruled = []
    for module in model.modules():
        rule = find_module_rule(module, view)
        if rule is not None:
            ruled.append((module, rule))
    _OPAQUE.extend(deepcopy(module).requires_grad_(False) for module, _ in ruled)
    for index, (module, _) in enumerate(ruled):
        module.forward = _call_of(index)
    try:
        yield ruled
    finally:
        _OPAQUE.clear()
        for module, _ in ruled:
            vars(module).pop("forward", None)


def _call_of(index: int) -> Any:
    def forward(x: Tensor) -> Tensor:
        result: Tensor = torch.ops.lipcert.opaque(x, index)
        return result

    return forward
