"""Which rule turns which operator or module into the normal form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lipcert.errors import OptionError, check_choice
from lipcert.network.rules.values import Result

Rule = Callable[..., Result]
VIEWS = ("residual", "certified")
RULES: dict[str, Rule] = {}
"""By the names of operators: "aten::relu"."""
MODULE_RULES: dict[str, dict[type[nn.Module], Rule]] = {"residual": {}, "certified": {}}


def register_rule(*keys: Any, view: str | None = None) -> Callable[[Rule], Rule]:
    """Decorator: use this rule for module classes, torch functions and methods, or operators.

    A key is a subclass of nn.Module, an operator (`torch.ops.aten.sin`, or one of your
    own made with `torch.library.custom_op`), or a function of torch, which stands for
    its operator: `torch.sin` covers `x.sin()` too. The rule is called as `rule(call,
    *args, **kwargs)` with the arguments of the call and returns a `Slope` for a
    nonlinearity, a linear operation for a linear map, or the `Input` itself for a call
    that changes nothing.

    A module with a rule is one operation of the network. What a rule says is tried out
    at many inputs whenever it is used, and refused with a counterexample if it is
    false. Biases do not matter to slopes: give the linear part only. A rule for one
    `view` (see `lipcert.trace`) is used in it alone.

    Example:
        >>> class Squareplus(nn.Module):
        ...     def forward(self, x):
        ...         return (x + torch.sqrt(x * x + 4)) / 2
        >>> @lipcert.register_rule(Squareplus)
        ... def squareplus_rule(call, x):
        ...     return lipcert.Slope(0.0, 1.0, ulps=8.0)
        >>> lipcert.trace(nn.Sequential(nn.Linear(4, 3), Squareplus()), (4,))
        Network((4,) → (3,), 1 nonlinearity: 1)
    """
    if view is not None:
        check_choice("view", view, VIEWS)
    if not keys:
        raise OptionError(
            "a rule needs what it is for: module classes, torch functions or operators"
        )

    def register(rule: Rule) -> Rule:
        _keep(rule, keys, VIEWS if view is None else (view,))
        return rule

    return register


def _keep(rule: Rule, keys: Sequence[Any], views: Sequence[str]) -> None:
    if not callable(rule):
        raise OptionError(
            f"a rule is a {type(rule).__name__}, expected a function of "
            "(call, *arguments)"
        )
    for key in keys:
        if isinstance(key, type) and issubclass(key, nn.Module):
            for view in views:
                MODULE_RULES[view][key] = rule
        else:
            RULES[operator_name(key)] = rule


def rule_for(operators: str) -> Callable[[Rule], Rule]:
    """Decorator: use this rule for the ATen operators of these names, separated by spaces."""
    return register_rule(*(getattr(torch.ops.aten, name) for name in operators.split()))


def operator_name(key: Any) -> str:
    """The qualified name of an operator, of its overload, or of the operator that a torch function stands for."""
    if isinstance(key, torch._ops.OpOverload):
        key = key.overloadpacket
    if isinstance(key, torch._ops.OpOverloadPacket):
        return str(key._qualified_op_name)
    if hasattr(key, "_opoverload"):  # what torch.library.custom_op returns
        return operator_name(key._opoverload)
    if key is torch.nn.functional.softsign:  # no operator of its own
        return "softsign"
    name = getattr(key, "__name__", "")
    if hasattr(torch.ops.aten, name) and _is_torch(key):
        return f"aten::{name}"
    shown = getattr(key, "__qualname__", key)
    raise OptionError(
        f"a rule for {shown!r}: expected a subclass of nn.Module, a function of "
        "torch that is one operator, or an "
        "operator; make one of your function with torch.library.custom_op"
    )


def _is_torch(function: Any) -> bool:
    method_of = getattr(function, "__objclass__", None)
    module = getattr(function, "__module__", None)
    module = module or getattr(method_of, "__module__", "torch")
    return str(module).split(".")[0] in ("torch", "builtins")


def find_rule(name: str) -> Rule | None:
    """The rule for an operator by its qualified name."""
    return RULES.get(name)


def find_module_rule(module: nn.Module, view: str) -> Rule | None:
    """The rule for a module; a subclass uses its parent's only while it keeps the parent's `forward`."""
    rules = MODULE_RULES.get(view, {})
    # A forward on the instance is other code than the one that the rule is about.
    if "forward" in vars(module):
        return None
    # Nearest class first: a rule for a subclass goes before that for its parent.
    for parent in type(module).__mro__:
        if parent in rules:
            if type(module).forward is not getattr(parent, "forward", None):
                return None
            return rules[parent]
    return None
