"""Which rule turns which operator into the normal form, and what a rule gets to see."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn

from lipcert.errors import OptionError, check_choice
from lipcert.network.linear import Function, LinearOp
from lipcert.network.program import Shape
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
    batched: bool = False
    """Whether it has a batch axis, of which one row is read."""

    def __call__(self) -> Tensor:
        return self.read()


class BatchSize:
    """Stands for the number of rows of a batch among the arguments of a call."""


@dataclass(frozen=True)
class Sum:
    """Σ of chains of linear operations on several inputs; an empty chain is the identity."""

    terms: Sequence[tuple[Input, Sequence[LinearOp]]]


@dataclass(frozen=True)
class Extremum:
    """The larger (sign 1) or the smaller (sign −1) of two inputs, (a + b)/2 ± |a − b|/2."""

    first: Input
    second: Input
    sign: int


Result = Slope | LinearOp | Sequence[LinearOp] | Sum | Extremum | Input
"""What a rule returns: a nonlinearity or linear operations on the only input, a sum, or an input passed through."""


@dataclass(frozen=True)
class Call:
    """One operation of a captured program, as a rule sees it.

    `args` and `kwargs` are those of the call, with `Input` for tensors that depend on the network's input and
    `Constant` for those that do not. A rule is called as `rule(call, *args, **kwargs)`. `index` says which of several
    results is meant, and `node` is the operation in the program. `module` is set for calls of modules with a rule.
    `typed` says whether the model's tensors determine the type in which it runs.
    """

    name: str
    invoke: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    out_shape: Shape
    dtype: torch.dtype
    typed: bool = True
    module: nn.Module | None = None
    node: fx.Node | None = None
    index: int | None = None

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

    def axis(self, dim: int, of: Shape | None = None) -> int:
        """The axis of a row that the dimension `dim` of a tensor is; refuses the batch axis."""
        rank = len(self.input.shape if of is None else of) + 1
        if dim % rank == 0:
            raise Refusal("it works along the batch axis, so each row of its result depends on the whole batch")
        return dim % rank - 1

    def linear(
        self, function: Callable[[Tensor], Tensor] | None = None, *, terms: int = -1, nonnegative: bool = False
    ) -> Function:
        """The linear operation `function` (by default the call itself) on the only input.

        The adjoint comes from automatic differentiation. State `terms` and `nonnegative` (see `Function`) if rounding
        errors are to be bounded too.
        """
        if function is None:
            function = self._rerun
        return Function(function, self.input.shape, self.out_shape, terms, nonnegative)

    def product(self, terms: int) -> Function:
        """The call itself, which multiplies the only input by constants: |A| is the call with absolute constants."""
        return Function(
            self._rerun, self.input.shape, self.out_shape, terms, absolute=lambda x: self._run(x, absolute=True)
        )

    def each(self) -> Sum:
        """The call itself, which only moves entries of several tensors, as a sum over those that are inputs."""
        terms = []
        for place, value in enumerate(self.inputs):
            alone = Function(self._alone(place), value.shape, self.out_shape, terms=0, nonnegative=True)
            terms.append((value, [alone]))
        return Sum(terms)

    def at_zero(self) -> Tensor:
        """What the call returns for zero inputs, one row of it: the constants that it adds."""
        return self._invoke([torch.zeros(1, *v.shape, dtype=self.dtype, device=self._device) for v in self.inputs])[0]

    @property
    def executed(self) -> torch.dtype:
        """The type in which the program runs; `dtype` is float64 in the exact network."""
        value = self.node.meta.get("val") if self.node is not None else None
        first = value[0] if isinstance(value, tuple | list) else value
        return first.dtype if isinstance(first, Tensor) else self.dtype

    @property
    def _device(self) -> torch.device:
        value = self.node.meta.get("val") if self.node is not None else None
        first = value[0] if isinstance(value, tuple | list) else value
        return first.device if isinstance(first, Tensor) else torch.device("cpu")

    def _rerun(self, x: Tensor) -> Tensor:
        return self._invoke([x] * len(self.inputs))

    def _run(self, x: Tensor, absolute: bool) -> Tensor:
        return self._invoke([x], (lambda c: c.abs() if c.is_floating_point() else c) if absolute else None)

    def _alone(self, place: int) -> Callable[[Tensor], Tensor]:
        def function(x: Tensor) -> Tensor:
            others = [x.new_zeros(len(x), *value.shape) for value in self.inputs]
            others[place] = x
            return self._invoke(others, lambda c: torch.zeros_like(c) if c.is_floating_point() else c)

        return function

    def _invoke(self, inputs: Sequence[Tensor], change: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Call with these tensors in place of the inputs, in order, and constants changed if so wished."""
        remaining = iter(inputs)
        rows = len(inputs[0]) if inputs else 1

        def fill(value: Any) -> Any:
            if isinstance(value, Input):
                return next(remaining)
            if isinstance(value, Constant):
                tensor = value().expand(rows, *value().shape[1:]) if value.batched else value()
                return tensor if change is None else change(tensor)
            return rows if isinstance(value, BatchSize) else value

        result = self.invoke(*_map(self.args, fill), **_map(dict(self.kwargs), fill))
        picked: Tensor = result if self.index is None else result[self.index]
        return picked


Rule = Callable[..., Result]
VIEWS = ("residual", "certified")
RULES: dict[str, Rule] = {}
"""By the names of operators: "aten::relu"."""
MODULE_RULES: dict[str, dict[type[nn.Module], Rule]] = {"residual": {}, "certified": {}}


def register_rule(*keys: Any, view: str | None = None) -> Callable[[Rule], Rule]:
    """Decorator: use this rule for module classes, torch functions and methods, or operators.

    A key is a subclass of nn.Module, an operator (`torch.ops.aten.sin`, or one of your own made with
    `torch.library.custom_op`), or a function of torch, which stands for its operator: `torch.sin` covers `x.sin()` too.
    The rule is called as `rule(call, *args, **kwargs)` with the arguments of the call and returns a `Slope` for a
    nonlinearity, a linear operation for a linear map, or the `Input` itself for a call that changes nothing::

        @lipcert.register_rule(Squareplus)
        def squareplus_rule(call, x):
            return lipcert.Slope(0.0, 1.0, ulps=8.0)

        @lipcert.register_rule(Blur)
        def blur_rule(call, x):
            return call.linear(terms=9, nonnegative=True)

    A module with a rule is one operation of the network. What a rule says is tried out at many inputs whenever it is
    used, and refused with a counterexample if it is false. Biases do not matter to slopes: give the linear part only.
    A rule for one `view` (see `lipcert.trace`) is used in it alone.
    """
    if view is not None:
        check_choice("view", view, VIEWS)

    def register(rule: Rule) -> Rule:
        for key in keys:
            if isinstance(key, type) and issubclass(key, nn.Module):
                for name in VIEWS if view is None else (view,):
                    MODULE_RULES[name][key] = rule
            else:
                RULES[operator_name(key)] = rule
        return rule

    return register


def operator_name(key: Any) -> str:
    """The qualified name of an operator, of its overload, or of the operator that a torch function stands for."""
    if isinstance(key, torch._ops.OpOverload):
        key = key.overloadpacket
    if isinstance(key, torch._ops.OpOverloadPacket):
        return str(key._qualified_op_name)
    if hasattr(key, "_opoverload"):  # what torch.library.custom_op returns
        return operator_name(key._opoverload)
    name = key if isinstance(key, str) else getattr(key, "__name__", "")
    if key is torch.nn.functional.softsign:  # no operator of its own
        return name
    if hasattr(torch.ops.aten, name) and (isinstance(key, str) or _is_torch(key)):
        return f"aten::{name}"
    shown = getattr(key, "__qualname__", key)
    raise OptionError(
        f"a rule for {shown!r}: expected a subclass of nn.Module, a function of torch that is one operator, or an "
        "operator; make one of your function with torch.library.custom_op"
    )


def _is_torch(function: Any) -> bool:
    module = getattr(function, "__module__", None) or getattr(
        getattr(function, "__objclass__", None), "__module__", "torch"
    )
    return str(module).split(".")[0] in ("torch", "builtins")


def find_rule(name: str) -> Rule | None:
    """The rule for an operator by its qualified name."""
    return RULES.get(name)


def find_module_rule(module: nn.Module, view: str) -> Rule | None:
    """The rule for a module; a subclass uses its parent's only while it keeps the parent's `forward`."""
    rules = MODULE_RULES.get(view, {})
    if "forward" in vars(module):
        return None
    for parent in type(module).__mro__:
        if parent in rules:
            return rules[parent] if type(module).forward is getattr(parent, "forward", None) else None
    return None


def broadcast(shape: Shape, out_shape: Shape) -> Function:
    """Copies a row of one shape into a larger one, as arithmetic does."""
    if len(shape) != len(out_shape):
        raise Refusal(f"it broadcasts rows of shape {shape} to {out_shape}; reshape them explicitly first")
    return Function(lambda x: x.expand(x.shape[0], *out_shape), shape, out_shape, terms=0, nonnegative=True)


def window(shape: Shape, out_shape: Shape) -> int:
    """How many entries of an input each entry of a reduced output stands for."""
    return prod(shape) // max(prod(out_shape), 1)


def _flatten(value: Any) -> list[Any]:
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in _flatten(item)]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _flatten(item)]
    return [value]


def _map(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_map(item, function) for item in value)
    if isinstance(value, dict):
        return {key: _map(item, function) for key, item in value.items()}
    return function(value)
