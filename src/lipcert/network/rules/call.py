"""What a rule gets to see of an operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from lipcert.network.kinds import packet_name
from lipcert.network.linear import Function
from lipcert.network.program import Shape
from lipcert.network.rules.values import (
    BatchSize,
    Constant,
    Input,
    OtherSize,
    Refusal,
    Sum,
)
from lipcert.rounding import has_denormals

# How operators call arguments that name axes.
_AXES = ("dim", "dims", "dim1", "dim2", "dimension")


@dataclass(frozen=True)
class Call:
    """One operation of a captured program, as a rule sees it.

    `args` and `kwargs` are those of the call, with `Input` for tensors that depend on
    the network's input and `Constant` for those that do not; a rule is called as
    `rule(call, *args, **kwargs)`. `index`: which of several results is meant. `node`:
    the operation in the program. `module` is set for calls of modules with a rule.
    `typed`: the model's tensors determine the type in which it runs. `local`: only
    bounds over balls are wanted. `apart`: sorted pairs are means and absolute values of
    differences.

    Example:
        >>> @lipcert.register_rule(torch.cumsum)
        ... def cumsum_rule(call, x, dim, **kwargs):
        ...     return call.linear(terms=x.shape[call.axis(dim)], nonnegative=True)
    """

    name: str
    invoke: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    out_shape: Shape
    dtype: torch.dtype
    typed: bool
    node: fx.Node
    module: nn.Module | None = None
    index: int | None = None
    local: bool = False
    apart: bool = False

    @property
    def operator(self) -> str:
        """The name of the operator, without its overload: "add"."""
        return packet_name(self.node)

    @property
    def inputs(self) -> list[Input]:
        """All tensors among the arguments that depend on the network's input, in order."""
        leaves = tree_leaves((self.args, dict(self.kwargs)))
        return [value for value in leaves if isinstance(value, Input)]

    @property
    def input(self) -> Input:
        """The only tensor that depends on the network's input."""
        inputs = self.inputs
        if len(inputs) != 1:
            raise Refusal(
                f"it takes {len(inputs)} inputs that depend on the network's input, "
                "only one is supported"
            )
        return inputs[0]

    def argument(self, name: str) -> Any:
        """The argument that the operator calls so, or its default; None if there is none."""
        schema: Any = self.node.target
        for place, argument in enumerate(schema._schema.arguments):
            if argument.name == name:
                if place < len(self.args):
                    return self.args[place]
                return self.kwargs.get(name, argument.default_value)
        return None

    def axis(self, dim: int, of: Shape | None = None) -> int:
        """The axis of a row that the dimension `dim` of a tensor is; refuses the batch axis."""
        shape = self.input.shape if of is None else of
        # A tensor has the batch axis in front of the axes of a row: its dim 1 is axis
        # 0, its dim −1 the last axis.
        axis = dim % (len(shape) + 1) - 1
        if axis < 0:
            raise Refusal(
                "it works along the batch axis, so each row of its result depends "
                "on the whole batch"
            )
        return axis

    def axes(self) -> list[int]:
        """The axes of a row along which the operator works, as its arguments say; refuses the batch axis."""
        axes = []
        for name in _AXES:
            dims = self.argument(name)
            if isinstance(dims, int):
                dims = [dims]
            for dim in dims or []:
                axes.append(self.axis(dim))
        if not axes:
            raise Refusal(
                "it is taken over everything, the batch included; give it an axis"
            )
        return axes

    def linear(
        self,
        function: Callable[[Tensor], Tensor] | None = None,
        *,
        terms: int = -1,
        nonnegative: bool = False,
    ) -> Function:
        """The linear operation `function` (by default the call itself) on the only input.

        The adjoint comes from automatic differentiation. State `terms` and
        `nonnegative` (see `Function`) if rounding errors are to be bounded too.
        """
        made, shape = function or self.rerun, self.input.shape
        return Function(made, shape, self.out_shape, terms, nonnegative)

    def move(self) -> Function:
        """The call itself, which only moves or copies entries of the only input."""
        return self.linear(terms=0, nonnegative=True)

    def move_beside_numbers(self) -> Function:
        """The call itself, which moves entries of the only input, without the numbers that it writes beside them."""

        def moved(x: Tensor) -> Tensor:
            return self.rerun(x) - self.rerun(torch.zeros_like(x))

        return self.linear(moved, terms=0, nonnegative=True)

    def product(self, terms: int) -> Function:
        """The call itself, which multiplies the only input by constants: |A| is the call with absolute constants."""
        for value in tree_leaves((self.args, dict(self.kwargs))):
            if isinstance(value, Constant) and has_denormals(value()):
                raise Refusal(
                    "its constants have entries that processors may take for zero; "
                    "set them to zero"
                )

        def absolute(x: Tensor) -> Tensor:
            return self.run([x], torch.abs)

        shape = self.input.shape
        return Function(self.rerun, shape, self.out_shape, terms, absolute=absolute)

    def each(self) -> Sum:
        """The call itself, which only moves entries of several tensors, as a sum over those that are inputs."""
        terms = []
        for place, value in enumerate(self.inputs):
            shapes = value.shape, self.out_shape
            alone = Function(self._alone(place), *shapes, terms=0, nonnegative=True)
            terms.append((value, [alone]))
        return Sum(terms)

    def _alone(self, place: int) -> Callable[[Tensor], Tensor]:
        def function(x: Tensor) -> Tensor:
            others = [x.new_zeros(len(x), *value.shape) for value in self.inputs]
            others[place] = x
            return self.run(others, torch.zeros_like)

        return function

    def at_zero(self) -> Tensor:
        """What the call returns for zero inputs, one row of it: the constants that it adds."""
        zero = torch.zeros((), dtype=self.dtype, device=self.recorded.device)
        zeros = [zero.new_zeros(1, *value.shape) for value in self.inputs]
        return self.run(zeros)[0]

    @property
    def recorded(self) -> Tensor:
        """The first result as torch.export has recorded it: without values, in the type in which the program runs."""
        first: Tensor = tree_leaves(self.node.meta["val"])[0]
        return first

    def rerun(self, x: Tensor) -> Tensor:
        """The call itself for a batch in place of its input."""
        return self.run([x] * len(self.inputs))

    def run(
        self, inputs: Sequence[Tensor], change: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """The call itself for batches in place of its inputs; `change` is done to its floating-point constants."""
        # tree_map visits values in the order of tree_leaves, so that inputs take their
        # places in the order of `inputs`.
        remaining = iter(inputs)
        rows = len(inputs[0]) if inputs else 1

        def fill(value: Any) -> Any:
            if isinstance(value, Input):
                return next(remaining)
            if isinstance(value, BatchSize):
                return rows
            if not isinstance(value, Constant):
                return value
            tensor = value()
            if value.batched:
                tensor = tensor.expand(rows, *tensor.shape[1:])
            if change is None or not tensor.is_floating_point():
                return tensor
            return change(tensor)

        args, kwargs = tree_map(fill, (self.args, dict(self.kwargs)))
        result: Any = self.invoke(*args, **kwargs)
        if self.index is not None:
            result = result[self.index]
        picked: Tensor = result
        return picked


def check_batch_size(call: Call) -> None:
    """The number of rows may only be part of a shape."""
    if call.operator in ("slice", "slice_scatter"):  # judged by their results
        return
    for value in (*call.args, *call.kwargs.values()):
        if isinstance(value, BatchSize) or any(
            isinstance(leaf, OtherSize) for leaf in tree_leaves(value)
        ):
            raise Refusal(
                "it reads the number of rows of the batch, so each row depends "
                "on the whole batch"
            )
