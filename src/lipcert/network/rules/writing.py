"""Rules for operations that join several tensors, or write into parts of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipcert.network.linear import LinearOp
from lipcert.network.program import Shape
from lipcert.network.rules.broadcasting import broadcast
from lipcert.network.rules.call import Call
from lipcert.network.rules.registry import rule_for
from lipcert.network.rules.shape import is_whole_slice
from lipcert.network.rules.values import Constant, Input, Refusal, Result, Sum


@dataclass(frozen=True)
class Embed(LinearOp):
    """Places a block among zeros along one axis: the part of a concatenation that belongs to one input."""

    in_shape: Shape
    out_shape: Shape
    axis: int
    offset: int
    terms = 0

    def _apply(self, x: Tensor) -> Tensor:
        after = self.out_shape[self.axis] - self.offset - self.in_shape[self.axis]
        # F.pad takes pairs from the last axis on: nothing for the axes behind, then
        # zeros before and after the block.
        trailing = len(self.in_shape) - 1 - self.axis
        return F.pad(x, (0, 0) * trailing + (self.offset, after))

    def _adjoint(self, y: Tensor) -> Tensor:
        return y.narrow(self.axis + 1, self.offset, self.in_shape[self.axis])

    def _magnitude(self, x: Tensor) -> Tensor:
        return self._apply(x)


@rule_for("cat concat concatenate")
def concatenate(call: Call, tensors: Any, dim: int = 0) -> Result:
    axis = call.axis(dim, of=call.out_shape)
    terms: list[tuple[Input, list[LinearOp]]] = []
    # cat of 3 channels, a constant of 1 and 2 channels: inputs are embedded at 0 and 4,
    # and constants only take room.
    offset = 0
    for tensor in tensors:
        if isinstance(tensor, Input):
            terms.append((tensor, [Embed(tensor.shape, call.out_shape, axis, offset)]))
            offset += tensor.shape[axis]
        elif (
            tensor().numel() > 0 or tensor().dim() > 1
        ):  # torch leaves out empty vectors
            offset += tensor().shape[axis + 1]
    return Sum(terms)


@rule_for("stack hstack dstack vstack column_stack")
def stack(call: Call, *args: Any) -> Result:
    dim = call.argument("dim")
    if dim is not None:
        call.axis(dim, of=call.out_shape)
    return call.each()


@rule_for("where")
def where(call: Call, mask: Any, a: Any = None, b: Any = None) -> Result:
    if isinstance(mask, Input) or a is None:
        raise Refusal(
            "its mask depends on the network's input, so it jumps; use a constant "
            "mask, or torch.maximum"
        )
    if isinstance(a, float | int) or isinstance(b, float | int):
        return call.move_beside_numbers()
    for value in call.inputs:
        broadcast(
            value.shape, call.out_shape
        )  # refuses rows that torch would take for a batch
    return call.each()


@rule_for("index_fill")
def index_fill(call: Call, x: Any, dim: int, index: Any, value: Any) -> Result:
    if isinstance(index, Input) or isinstance(value, Input):
        raise Refusal(
            "its positions or its value depend on the network's input; use constants"
        )
    call.axis(dim)
    return call.move_beside_numbers()


@rule_for("index_put")
def index_put(
    call: Call, x: Any, indices: Any, values: Any, accumulate: bool = False
) -> Result:
    """Writes constants to constant positions, as y[:, [0, 2]] = 0 does."""
    if call.inputs != [x]:
        raise Refusal(
            "it writes what depends on the network's input, or where it says; use "
            "slices, cat or where"
        )
    if accumulate:
        raise Refusal("it adds to entries; write the sum out")
    if not indices or indices[0] is not None:
        raise Refusal("it writes into some rows of the batch")
    return call.move_beside_numbers()


@rule_for("masked_fill")
def masked_fill(call: Call, x: Any, mask: Any, value: Any) -> Result:
    if isinstance(mask, Input) or isinstance(value, Input):
        raise Refusal(
            "its mask or its value depends on the network's input; use a constant mask"
        )
    # `each` runs the call with zeros for constants, which leaves the linear part.
    if isinstance(value, Constant):
        return call.each()

    def filled_with_zero(t: Tensor) -> Tensor:
        return torch.masked_fill(t, mask(), 0.0)

    return call.linear(filled_with_zero, terms=0, nonnegative=True)


@rule_for("select_scatter slice_scatter")
def scatter(call: Call, x: Any, source: Any, dim: int = 0, *args: Any) -> Result:
    """Writes into a part of a tensor, as y[:, 0] = z does."""
    along_rows = dim % (len(call.out_shape) + 1) == 0
    writes_all = call.operator == "slice_scatter" and is_whole_slice(*args)
    if along_rows and not writes_all:
        raise Refusal("it writes into some rows of the batch")
    return call.each()


@rule_for("copy")
def copy(call: Call, x: Any, source: Any, *args: Any) -> Result:
    """The source in the shape of x, whose values are not read."""
    if not isinstance(source, Input):
        raise Refusal("it overwrites a tensor that depends on the input")
    if source.shape == call.out_shape:
        return source
    return Sum([(source, [broadcast(source.shape, call.out_shape)])])
