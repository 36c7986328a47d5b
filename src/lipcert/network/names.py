"""How operations of a program are called in errors and results: by the layers that make them."""

from __future__ import annotations

from operator import getitem

from torch import fx

from lipcert.network.kinds import packet_name
from lipcert.network.rules.refusals import MODULES


def producer(node: fx.Node) -> fx.Node:
    """The operation itself, or the one of whose results a node picks one."""
    if node.target is getitem and isinstance(node.args[0], fx.Node):
        return node.args[0]
    return node


def layer_name(node: fx.Node, has_rule: bool) -> tuple[str, str]:
    """The qualified name and the type of a layer, or of a call within the module that makes it."""
    modules = _modules_around(node) or [("", "", "")]
    # "attention (MultiheadAttention)" says more than the first of the dozen operators
    # inside that has no rule.
    for path, module, kind in modules:
        if kind in MODULES and module.startswith(
            "torch.nn."
        ):  # the outermost one that is refused as a whole
            return path or kind, kind
    path, module, kind = modules[-1]
    if module.startswith(("torch.nn.modules", "lipcert.layers")) or has_rule:
        return path or kind.lower(), kind
    if path:
        path += "."
    return path + node.name, packet_name(producer(node))


def _modules_around(node: fx.Node) -> list[tuple[str, str, str]]:
    """The modules that make a call, outermost first: their names, and where their classes are from."""
    modules = []
    for path, kind in (node.meta.get("nn_module_stack") or {}).values():
        # torch.export begins with the module that it is given, `Root`; the model is its
        # attribute `model`.
        root, _, name = path.partition(".")
        if root == "model":
            module = (
                kind
                if isinstance(kind, str)
                else f"{kind.__module__}.{kind.__qualname__}"
            )
            modules.append((name, module, module.split(".")[-1]))
    return modules
