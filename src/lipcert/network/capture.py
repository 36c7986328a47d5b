"""From a PyTorch module to a `Program`, by torch.export."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from threading import RLock
from typing import Any

import torch
from torch import Tensor, fx, nn

from lipcert.network.capture_refusals import (
    check_graph,
    check_model,
    check_output,
    checked_shape,
)
from lipcert.network.explain import explained, unsupported
from lipcert.network.kinds import packet_name
from lipcert.network.opaque import Root, RuledModules
from lipcert.network.program import Live, Opaque, Program, Shape
from lipcert.network.states import bare, quiet, sizes_as_text, unchanged

aten = torch.ops.aten
_ASSERTIONS = (
    "_assert_tensor_metadata",
    "_assert_scalar",
    "sym_constrain_range_for_size",
)
CAPTURE_LOCK = RLock()
"""Captures and comparisons change modules for a moment: one at a time."""


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
    # Two rows: torch.export takes sizes of 0 and 1 for fixed numbers, whatever is said
    # about them.
    x = torch.zeros(2, *input_shape, dtype=like.dtype, device=like.device)
    modules = RuledModules(model, view)
    with CAPTURE_LOCK, unchanged(model), modules.as_operations() as ruled:
        exported = _followed(model, ruled, x)
        check_graph(exported, model)
        result = check_output(exported, model)
        names = _tensor_names(exported)
        readers = _readers(model, names, exported.constants)
    graph = exported.graph_module.graph
    # Buffers that the model changes are outputs, too; `check_capture` refuses them by
    # their names.
    next(node for node in graph.nodes if node.op == "output").args = ((result,),)
    _simplify(graph)
    opaque = _opaque_calls(graph, ruled)
    mutated = exported.graph_signature.buffers_to_mutate.values()
    changed = tuple(name.removeprefix("model.") for name in mutated)
    kind = like.dtype, like.device
    return Program(graph, input_shape, *kind, readers, names, opaque, changed)


def _followed(
    model: nn.Module, ruled: RuledModules, x: Tensor
) -> torch.export.ExportedProgram:
    """What torch.export makes of a model, or an error that says what to do."""
    try:
        with sizes_as_text() as texts:
            exported = _export(Root(model, ruled), x)
    # torch.export raises whatever the model's code raises.
    except Exception as error:
        raise explained(error, model, x) from error
    if texts:
        remedy = (
            f"{texts[0]} turns the number of rows of a batch into text, which could "
            "decide what is computed; do without, print included"
        )
        raise unsupported(model, "capture", remedy)
    return exported


def _opaque_calls(graph: fx.Graph, ruled: RuledModules) -> dict[fx.Node, Opaque]:
    """The calls of modules that have a rule of their own."""
    opaque = {}
    for node in graph.nodes:
        if node.target is torch.ops.lipcert.opaque.default:
            module, rule = ruled.calls[node.args[1]]
            shape = tuple(node.args[0].meta["val"].shape[1:])
            alone = bare(module)
            # There is no view of this name, so no rule in it: what is inside is
            # captured down to its operators.
            opaque[node] = Opaque(alone, rule, capture(alone, shape, view=""))
    return opaque


def _export(root: nn.Module, x: Tensor) -> torch.export.ExportedProgram:
    batch = {0: torch.export.Dim.DYNAMIC}
    # Of every capture the number of rows is another symbol: what torch keeps of
    # operators it has seen is hardly ever found again, and keeping it takes a sixth of
    # the time.
    anew = torch._dynamo.config.patch(fake_tensor_cache_enabled=False)
    with anew, quiet(), torch.no_grad(), torch.inference_mode(False):
        # Not strict: Python runs as it is, and operators are recorded, hooks and
        # patched methods included.
        dynamic = {"x": batch}
        exported = torch.export.export(root, (x,), dynamic_shapes=dynamic, strict=False)
        _pass_through_dropout(exported.graph)
        # Without a table nothing is decomposed. Operators that work in place become
        # others that do not, views included.
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


def _readers(
    model: nn.Module, names: Mapping[fx.Node, str], constants: Mapping[str, Any]
) -> dict[fx.Node, Live]:
    """How the tensors of the graph are read."""
    readers = {}
    for node, name in names.items():
        # `Root` holds the model as its attribute `model`, which the names of exported
        # tensors begin with.
        constant = constants.get(f"model.{name}", constants.get(name))
        readers[node] = _reader(model, name, constant)
    return readers


def _reader(model: nn.Module, path: str, constant: Any) -> Live:
    """Reads a tensor from the model itself; tensors that are written in its code are constants."""
    # Looked up at every read: another tensor may have taken the place of a parameter or
    # a buffer since.
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
        if name in _ASSERTIONS:
            graph.erase_node(node)
        elif node.target in (aten.view.default, aten._unsafe_view.default):
            # Which does not depend on memory formats.
            node.target = aten.reshape.default
        elif name == "copy" and _type(node.args[1]) == _type(node):
            # which is differentiable.
            node.target = aten.expand_as.default
            node.args = (node.args[1], node.args[0])
        # In eval mode the slope of RReLU is the mean of its limits.
        elif name == "rrelu" and not _argument(node, 3, "training", False):
            lower = _argument(node, 1, "lower", 1 / 8)
            upper = _argument(node, 2, "upper", 1 / 3)
            node.target = aten.leaky_relu.default
            node.args, node.kwargs = (node.args[0], (lower + upper) / 2), {}
        # A quotient of two dependent values has no rule; as one operator, softsign has
        # slopes in [0, 1].
        elif name == "div" and _is_softsign(node):
            node.target = torch.nn.functional.softsign
            node.args = node.args[:1]
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))


def _type(node: Any) -> Any:
    return node.meta["val"].dtype


def _argument(node: fx.Node, place: int, name: str, default: Any) -> Any:
    if place < len(node.args):
        return node.args[place]
    return node.kwargs.get(name, default)


def _is_softsign(node: fx.Node) -> bool:
    """Whether a quotient is x/(|x| + 1), as torch writes F.softsign."""
    if len(node.args) != 2 or node.kwargs or not isinstance(node.args[1], fx.Node):
        return False
    total = node.args[1]
    if packet_name(total) != "add" or total.kwargs:
        return False
    if len(total.args) != 2 or total.args[1] != 1:
        return False
    size = total.args[0]
    if not isinstance(size, fx.Node) or packet_name(size) != "abs":
        return False
    return size.args == node.args[:1]
