"""From a PyTorch module to a torch.fx graph, which leaves the module as it is."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from traceback import walk_tb

import torch
from torch import fx, nn
from torch.optim.swa_utils import AveragedModel

from lipcert.errors import UnsupportedError, UnsupportedNode
from lipcert.network.rules import find_rule

_NOT_USERS = {Path(torch.__file__).parent, Path(importlib.__file__).parent, Path(__file__).parents[1]}
"""Folders of code that is not the user's."""
_LOCK = Lock()


class _Tracer(fx.Tracer):
    """Modules with a rule, and torch's own, are single operations; everything else is looked into."""

    proxy_buffer_attributes = True  # what the model computes from its buffers is computed again when it is read

    def __init__(self, view: str) -> None:
        super().__init__()
        self.view = view

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if find_rule(m, self.view) is not None:
            return True
        return super().is_leaf_module(m, module_qualified_name)


def trace_graph(model: nn.Module, view: str) -> fx.GraphModule:
    """The operations of a model; tensors that its code makes are attributes of the graph, not of the model.

    torch.fx replaces `nn.Module.__call__` while it traces: one thread at a time, and none may run a model meanwhile.
    """
    _check_wrappers(model)
    if find_rule(model, view) is not None:  # a bare layer
        model = nn.Sequential(model)
    try:
        with _LOCK, _unchanged(model):
            graph = fx.GraphModule(model, _Tracer(view).trace(model))
    except UnsupportedError:
        raise
    except Exception as error:  # torch.fx raises whatever the model's Python code raises on a proxy
        remedy = "torch.fx cannot follow its forward; write it without control flow that depends on values"
        if isinstance(error, NameError | AttributeError):
            remedy = "its forward uses a name that is not defined"
        remedy += f" ({type(error).__name__}{user_line(error)}: {error})"
        raise UnsupportedError([UnsupportedNode(type(model).__name__, "torch.fx", remedy)]) from error
    others = [node for node in graph.graph.nodes if node.op == "placeholder"][1:]
    remedy = "the model takes more than one input; fix the others with functools.partial or a wrapper module"
    if required := [str(node.target) for node in others if not node.args and not str(node.target).startswith("*")]:
        raise UnsupportedError([UnsupportedNode(name, "input", remedy) for name in required])
    return graph


def user_line(error: Exception) -> str:
    """ " at file:line", the last line of the user's code that an error went through; empty if there is none."""
    places = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        places.append((error.filename, error.lineno or 0))
    files = [(file, line) for file, line in places if file[0] != "<" and _NOT_USERS.isdisjoint(Path(file).parents)]
    return " at {}:{}".format(*files[-1]) if files else ""


def _check_wrappers(model: nn.Module) -> None:
    """Refuse modules that run another one in a way that cannot be followed."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            remedy = "TorchScript cannot be followed; pass the original module"
        elif "_orig_mod" in module._modules:  # torch.compile
            remedy = "compiled code cannot be followed; pass the original module, its ._orig_mod"
        elif isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel | AveragedModel):
            remedy = "it only wraps the model; pass the original module, its .module"
        else:
            continue
        raise UnsupportedError([UnsupportedNode(name or "the model", type(module).__name__, remedy)])


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Forgets the attributes that torch.fx and the model's own code set meanwhile."""
    states = [(vars(module), dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for attributes, before in states:
            attributes.clear()
            attributes.update(before)
