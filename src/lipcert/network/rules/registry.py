"""Which rule turns which operation into the normal form, and what a rule gets to see."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lipcert.errors import check_choice
from lipcert.network.linear import Function, LinearOp, Shape
from lipcert.network.slopes import Slope


class Refusal(Exception):
    """Raised by a rule for a call it cannot express; the message is the remedy shown to the user."""


@dataclass(frozen=True)
class Input:
    """A tensor that depends on the network's input: the output of node `source`, one row of which has `shape`."""

    source: int
    shape: Shape


@dataclass(frozen=True)
class Constant:
    """A tensor that does not depend on the network's input; calling it reads its present value."""

    read: Callable[[], Tensor]

    def __call__(self) -> Tensor:
        return self.read()


@dataclass(frozen=True)
class Sum:
    """Σ of chains of linear operations on several inputs; an empty chain is the identity."""

    terms: Sequence[tuple[Input, Sequence[LinearOp]]]


Result = Slope | LinearOp | Sequence[LinearOp] | Sum | Input
"""What a rule returns: a nonlinearity or linear operations on the first input, a sum, or an input passed through."""


@dataclass(frozen=True)
class Call:
    """One operation of a traced model, as a rule sees it.

    `args` and `kwargs` are those of the call, with `Input` for tensors that depend on the network's input and
    `Constant` for those that do not. A rule is called as `rule(call, *args, **kwargs)`.
    """

    name: str
    module: nn.Module | None
    invoke: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    out_shape: Shape
    training: bool = False

    @property
    def inputs(self) -> list[Input]:
        """All tensors among the arguments that depend on the network's input, in order."""
        return [value for value in _flatten((self.args, self.kwargs)) if isinstance(value, Input)]

    @property
    def input(self) -> Input:
        """The only tensor that depends on the network's input."""
        inputs = self.inputs
        if len(inputs) != 1:
            raise Refusal(f"it takes {len(inputs)} inputs that depend on the network's input, only one is supported")
        return inputs[0]

    def linear(
        self, function: Callable[[Tensor], Tensor] | None = None, *, terms: int = -1, nonnegative: bool = False
    ) -> Function:
        """The linear operation `function` (by default the traced call itself) on the only input.

        The adjoint comes from automatic differentiation. State `terms` and `nonnegative` (see `Function`) if rounding
        errors are to be bounded too.
        """
        if function is None:
            function = self._rerun
        return Function(function, self.input.shape, self.out_shape, terms, nonnegative)

    def at_zero(self) -> Tensor:
        """What the call returns for zero inputs, one row of it: the constants that it adds."""
        constants = [value() for value in _flatten((self.args, self.kwargs)) if isinstance(value, Constant)]
        tensors: list[Tensor] = [*(self.module.parameters() if self.module is not None else ()), *constants]
        like = next((tensor for tensor in tensors if tensor.is_floating_point()), torch.zeros(()))
        return self._invoke(lambda value: like.new_zeros(1, *value.shape))[0]

    def _rerun(self, x: Tensor) -> Tensor:
        return self._invoke(lambda _: x)

    def _invoke(self, value_of: Callable[[Input], Tensor]) -> Tensor:
        def fill(value: Any) -> Any:
            if isinstance(value, Input):
                return value_of(value)
            return value() if isinstance(value, Constant) else value

        result: Tensor = self.invoke(*_map(self.args, fill), **_map(dict(self.kwargs), fill))
        return result


Rule = Callable[..., Result]
Key = type[nn.Module] | Callable[..., Any] | str
_RULES: dict[Key, Rule] = {}
VIEWS = ("residual", "opaque", "certified")
_VIEW_RULES: dict[str, dict[Key, Rule]] = {"residual": {}, "opaque": {}, "certified": {}}


def register_rule(*keys: Key, view: str | None = None) -> Callable[[Rule], Rule]:
    """Decorator: use this rule for module classes, functions, or (as strings) tensor methods.

    The rule is called as `rule(call, *args, **kwargs)` with the arguments of the traced call (for a module: those of
    its `forward`) and returns a `Slope` for a nonlinearity, a linear operation for a linear map, or the `Input` itself
    for a call that changes nothing::

        @lipcert.register_rule(Squareplus)
        def squareplus_rule(call, x):
            return lipcert.Slope(0.0, 1.0, ulps=8.0)

        @lipcert.register_rule(Blur)
        def blur_rule(call, x):
            return call.linear(terms=9, nonnegative=True)

    A module with a rule is treated as one operation; its inside is not looked at. Biases do not matter to slopes: give
    the linear part only. A rule for one `view` (see `lipcert.trace`) is used in it alone.
    """
    if view is not None:
        check_choice("view", view, VIEWS)

    def register(rule: Rule) -> Rule:
        rules = _RULES if view is None else _VIEW_RULES[view]
        for key in keys:
            rules[key] = rule
        return rule

    return register


def find_rule(key: Key | nn.Module, view: str = "residual") -> Rule | None:
    """The rule for a module, function or method name.

    A subclass of a module class uses its parent's rule only while it keeps the parent's `forward`.
    """
    rules = {**_RULES, **_VIEW_RULES[view]} if _VIEW_RULES[view] else _RULES
    if not isinstance(key, nn.Module):
        return rules.get(key)
    for parent in type(key).__mro__:
        if parent in rules:
            return rules[parent] if type(key).forward is getattr(parent, "forward", None) else None
    return None


def _flatten(value: Any) -> list[Any]:
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in _flatten(item)]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _flatten(item)]
    return [value]


def _map(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, tuple | list):
        return type(value)(_map(item, function) for item in value)
    if isinstance(value, dict):
        return {key: _map(item, function) for key, item in value.items()}
    return function(value)
