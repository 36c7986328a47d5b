"""Refusals of what cannot be captured: of models, of shapes, and of graphs that do not hold for every batch."""

from __future__ import annotations

import inspect
import operator
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.optim.swa_utils import AveragedModel

from lipcert.errors import (
    ModelError,
    OptionError,
    ShapeError,
    UnsupportedError,
    UnsupportedNode,
)
from lipcert.network.explain import unsupported
from lipcert.network.program import Shape


def checked_shape(input_shape: Any) -> Shape:
    """The shape as a tuple of positive integers."""
    try:
        sizes = tuple(operator.index(n) for n in input_shape)
    except TypeError:
        sizes = (0,)
    if min(sizes, default=1) < 1:
        shown = input_shape
        if not isinstance(shown, int | tuple | list):
            shown = f"a {type(input_shape).__name__}"
        raise ShapeError(
            f"input_shape is {shown}, expected a tuple without the batch axis, "
            "such as (3, 32, 32)"
        )
    return sizes


def check_model(model: object) -> None:
    """Refuse what cannot be followed at all: wrappers, several inputs, weights that are not there."""
    if not isinstance(model, nn.Module):
        remedy = "wrap functions in one"
        if isinstance(model, torch.export.ExportedProgram):
            remedy = "pass the module that was exported"
        raise OptionError(
            f"model is a {type(model).__name__}, expected a torch.nn.Module; {remedy}"
        )
    # Also inside: a compiled layer of an ordinary model is followed no better.
    for name, module in model.named_modules():
        remedy = _unwrapped(module)
        if remedy:
            kind = type(module).__name__
            raise UnsupportedError([UnsupportedNode(name or "the model", kind, remedy)])
    _check_tensors(model)
    _check_inputs(model)


def _check_tensors(model: nn.Module) -> None:
    """Refuse weights that are not there."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise ModelError(
                f"{name} has no shape yet; run the model once on an input "
                "before it is bounded"
            )
        if tensor.is_meta:
            raise ModelError(
                f"{name} is on the meta device, which has no values; load "
                "the weights first"
            )
        if tensor.is_inference():
            raise ModelError(
                f"{name} was made in torch.inference_mode, where it cannot be "
                "captured; make the model outside of it"
            )


def _check_inputs(model: nn.Module) -> None:
    """Refuse several inputs."""
    # The first parameter of a bound forward is x.
    remedy = (
        "the model takes more than one input; fix the others with "
        "functools.partial or a wrapper module"
    )
    others = []
    for parameter in list(inspect.signature(model.forward).parameters.values())[1:]:
        named = (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        is_named = parameter.kind in named
        if is_named and parameter.default is parameter.empty:
            others.append(UnsupportedNode(parameter.name, "input", remedy))
    if others:
        raise UnsupportedError(others)


def _unwrapped(module: nn.Module) -> str:
    """What to pass instead of a module that hides another one; empty if it does not."""
    if isinstance(module, torch.jit.ScriptModule):
        return "TorchScript cannot be followed; pass the original module"
    if "_orig_mod" in module._modules:  # torch.compile
        return (
            "compiled code cannot be followed; pass the original module, its ._orig_mod"
        )
    if isinstance(module, fx.GraphModule) and "eval" in vars(
        module
    ):  # ExportedProgram.module() replaces it
        return "an exported program has lost its module; pass the one that was exported"
    if isinstance(
        module, nn.DataParallel | nn.parallel.DistributedDataParallel | AveragedModel
    ):
        return "it only wraps the model; pass the original module, its .module"
    return ""


def check_graph(exported: torch.export.ExportedProgram, model: nn.Module) -> None:
    """Refuse operators that contain programs, other inputs, and what holds for some numbers of rows only."""
    nodes = exported.graph_module.graph.nodes
    for node in nodes:
        _check_node(node, model)
    signature = exported.graph_signature
    inputs = [
        node.meta.get("val") for node in nodes if node.name in signature.user_inputs
    ]
    if (
        len(inputs) != 1
        or not isinstance(inputs[0], Tensor)
        or signature.inputs_to_lifted_custom_objs
    ):
        remedy = (
            "it takes something else than one tensor, such as a random "
            "generator; use parameters and buffers"
        )
        raise unsupported(model, "input", remedy)
    # Guards are what torch.export has assumed about the number of rows and cannot
    # prove, such as s0 % 8 == 0, s0 != 9: branches that forward has taken. Where one is
    # false, the graph is not what the model does.
    rows: Any = inputs[0].shape[0]
    for guard in rows.node.shape_env.guards:
        if guard.expr != sympy.true:
            remedy = (
                "its forward depends on the number of rows of a batch, "
                f"{rows}: {guard.expr}"
            )
            raise unsupported(model, "torch.export", remedy)


def _check_node(node: fx.Node, model: nn.Module) -> None:
    if node.op == "get_attr" or isinstance(node.target, torch._ops.HigherOrderOperator):
        remedy = (
            f"it uses {node.target}, whose inside is not looked into; write "
            "it without control flow"
        )
        raise unsupported(model, "torch.export", remedy)
    value = node.meta.get("val")
    if isinstance(value, Tensor) and value.layout != torch.strided:
        remedy = f"{node.name} is sparse; use dense tensors (to_dense())"
        raise unsupported(model, "torch.export", remedy)


def check_output(exported: torch.export.ExportedProgram, model: nn.Module) -> fx.Node:
    """The only tensor that a model returns; models that return anything else are refused."""
    signature = exported.graph_signature
    (output,) = (
        node for node in exported.graph_module.graph.nodes if node.op == "output"
    )
    # Outputs begin with buffers that are changed; the user's are those that the
    # signature names.
    results = set()
    for result in output.args[0]:
        if isinstance(result, fx.Node) and result.name in signature.user_outputs:
            results.add(result)
    spec = exported.call_spec.out_spec
    is_nested = spec is not None and not spec.is_leaf()
    if len(signature.user_outputs) != 1 or len(results) != 1 or is_nested:
        raise unsupported(
            model,
            "output",
            "the model must return one tensor that depends on its input",
        )
    return results.pop()
