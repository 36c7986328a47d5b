"""Rules for operations that move or sum entries, and for those that change nothing."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from lipcert.errors import TrainingModeError
from lipcert.network.linear import Reshape
from lipcert.network.rules.registry import (
    BatchSize,
    Call,
    Constant,
    Input,
    Refusal,
    Result,
    Sum,
    broadcast,
    register_rule,
    window,
)

aten = torch.ops.aten

_MOVES_BATCH = "it moves the batch axis; keep it in front"
_POSITIONS = "the positions that it reads depend on the network's input, so it jumps; use constant positions"


@register_rule(
    aten.reshape, aten.view, aten._unsafe_view, aten.flatten, aten.unflatten, aten.squeeze, aten.unsqueeze,
    aten.view_as, aten.reshape_as, aten.ravel, aten.atleast_2d, aten.atleast_3d,
)  # fmt: skip
def reshape(call: Call, x: Any, *args: Any) -> Result:
    """The batch axis stays in front, so that every row keeps its entries in their order."""
    if not isinstance(x, Input):
        raise Refusal("it gives a constant the shape of a tensor that depends on the input; use its shape instead")
    return Reshape(x.shape, call.out_shape)


def _move(call: Call) -> Result:
    return call.linear(terms=0, nonnegative=True)


@register_rule(aten.permute)
def permute(call: Call, x: Any, dims: Any) -> Result:
    if dims[0] % len(dims) != 0:
        raise Refusal(_MOVES_BATCH)
    return _move(call)


@register_rule(aten.transpose, aten.swapaxes, aten.swapdims, aten.movedim, aten.moveaxis)
def transpose(call: Call, x: Any, first: Any, second: Any) -> Result:
    rank = len(call.input.shape) + 1
    dims = [dim for value in (first, second) for dim in (value if isinstance(value, list | tuple) else [value])]
    if any(dim % rank == 0 for dim in dims):
        raise Refusal(_MOVES_BATCH)
    return _move(call)


@register_rule(aten.mT, aten.mH, aten.adjoint, aten.t, aten.numpy_T, aten.matrix_H)
def transpose_matrix(call: Call, x: Any) -> Result:
    """Swaps the last two axes; `x.T` reverses all of them."""
    if len(call.input.shape) < 2 or "numpy_T" in str(call.node.target):  # type: ignore[union-attr]
        raise Refusal(f"{_MOVES_BATCH}: x.mT, or x.transpose(1, 2)")
    return _move(call)


@register_rule(aten.flip, aten.roll)
def flip_or_roll(call: Call, x: Any, amounts: Any, dims: Any = None) -> Result:
    axes = amounts if "flip" in str(call.node.target) else dims  # type: ignore[union-attr]
    if not axes:
        raise Refusal("it moves entries from one row of the batch to another; give it dims")
    for dim in axes:
        call.axis(dim)
    return _move(call)


@register_rule(aten.slice)
def slices(call: Call, x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Result:
    if dim % (len(call.input.shape) + 1) == 0:
        everything = start in (None, 0) and (end is None or (isinstance(end, int) and end >= 2**62)) and step == 1
        if not everything and not isinstance(end, BatchSize):
            raise Refusal("it leaves out rows of the batch")
        return call.input
    return _move(call)


@register_rule(aten.rot90)
def rotate(call: Call, x: Any, times: int = 1, dims: Any = (0, 1)) -> Result:
    for dim in dims:
        call.axis(dim)
    return _move(call)


@register_rule(aten.fliplr, aten.flipud)
def flip_one_axis(call: Call, x: Any) -> Result:
    call.axis(1 if "fliplr" in str(call.node.target) else 0)  # type: ignore[union-attr]
    return _move(call)


@register_rule(aten.diagonal, aten.linalg_diagonal)
def diagonal(call: Call, x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1, **kwargs: Any) -> Result:
    for dim in (kwargs.get("dim1", dim1), kwargs.get("dim2", dim2)):
        call.axis(dim)
    return _move(call)


@register_rule(aten.tril, aten.triu)
def triangle(call: Call, x: Any, offset: int = 0) -> Result:
    call.axis(-2)
    return _move(call)


@register_rule(aten.diag_embed, aten.im2col, aten.zero)
def copies(call: Call, x: Any, *args: Any, **kwargs: Any) -> Result:
    return _move(call)


@register_rule(aten.col2im)
def fold(call: Call, x: Any, size: Any, kernel: Any, *args: Any) -> Result:
    """Adds up patches that overlap."""
    return call.linear(terms=prod(kernel), nonnegative=True)


@register_rule(aten.select, aten.narrow, aten.index_select, aten.unbind, aten.unfold)
def along_one_axis(call: Call, x: Any, dim: int = 0, *args: Any) -> Result:
    call.axis(dim)
    return _move(call)


@register_rule(aten.split, aten.split_with_sizes, aten.chunk, aten.tensor_split)
def split(call: Call, x: Any, size: Any, dim: int = 0) -> Result:
    call.axis(dim)
    return _move(call)


@register_rule(aten.hsplit, aten.dsplit, aten.vsplit)
def split_one_axis(call: Call, x: Any, size: Any) -> Result:
    call.axis({"h": 1, "d": 2, "v": 0}[str(call.node.target).removeprefix("aten.")[0]])  # type: ignore[union-attr]
    return _move(call)


@register_rule(aten.gather)
def gather(call: Call, x: Any, dim: int, index: Any, *args: Any, **kwargs: Any) -> Result:
    if not isinstance(index, Constant):
        raise Refusal(_POSITIONS)
    call.axis(dim)
    if len(index()) != 1:
        raise Refusal("its positions have a batch axis of their own; expand them from one row")
    return _move(call)


@register_rule(aten.index)
def index(call: Call, x: Any, indices: Any) -> Result:
    if not isinstance(x, Input) or any(isinstance(value, Input) for value in indices):
        raise Refusal(_POSITIONS)
    if not indices or indices[0] is not None:
        raise Refusal("it picks rows of the batch")
    if any(isinstance(value, Constant) and value().dtype == torch.bool for value in indices):
        raise Refusal("torch.export does not know how many entries a mask picks; use positions, or x * mask")
    return _move(call)


@register_rule(
    aten.pad, aten.constant_pad_nd, aten.pixel_shuffle, aten.pixel_unshuffle, aten.channel_shuffle,
    aten.reflection_pad1d, aten.reflection_pad2d, aten.reflection_pad3d,
    aten.replication_pad1d, aten.replication_pad2d, aten.replication_pad3d,
)  # fmt: skip
def move_entries(call: Call, x: Any, *args: Any, **kwargs: Any) -> Result:
    """What is written around the entries does not matter to the linear part."""

    def without_constants(t: Any) -> Any:
        return call._rerun(t) - call._rerun(torch.zeros_like(t))

    pads_by_number = str(call.node.target).startswith(("aten.pad", "aten.constant_pad")) and _value(args, kwargs)  # type: ignore[union-attr]
    return call.linear(without_constants if pads_by_number else None, terms=0, nonnegative=True)


def _value(args: tuple[Any, ...], kwargs: Any) -> bool:
    """Whether a padding writes another number than zero."""
    numbers = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, float | int)]
    return any(number != 0 for number in numbers)


@register_rule(aten.expand, aten.expand_as, aten.broadcast_to)
def expand(call: Call, x: Any, *args: Any, **kwargs: Any) -> Result:
    """Copies in a larger shape; of the other tensor of expand_as, only the shape is read."""
    if not isinstance(x, Input):
        raise Refusal("it gives a constant the shape of a tensor that depends on the input; use its shape instead")
    return Sum([(x, [broadcast(x.shape, call.out_shape)])])


@register_rule(aten.repeat, aten.tile)
def repeat(call: Call, x: Any, counts: Any) -> Result:
    if len(call.input.shape) != len(call.out_shape):
        raise Refusal("it adds axes in front of the batch axis; use unsqueeze first")
    return _move(call)


@register_rule(aten.repeat_interleave)
def repeat_interleave(call: Call, x: Any, counts: Any, dim: int | None = None, **kwargs: Any) -> Result:
    if dim is None or isinstance(counts, Input):
        raise Refusal("it repeats rows of the batch, or as often as the input says; give it a number and dim")
    call.axis(dim)
    return _move(call)


@register_rule(aten.sum, aten.mean)
def reduce(call: Call, x: Any, dims: Any = None, *args: Any, **kwargs: Any) -> Result:
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        raise Refusal("it sums over everything, the batch included; give it dim")
    for dim in dims if isinstance(dims, list | tuple) else [dims]:
        call.axis(dim)
    return call.linear(terms=window(call.input.shape, call.out_shape) + 1, nonnegative=True)


@register_rule(
    aten.to, aten._to_copy, aten.clone, aten.contiguous, aten.alias, aten.detach, aten.lift_fresh_copy,
    aten.type_as, aten.positive,
)  # fmt: skip
def unchanged(call: Call, x: Any, *args: Any, **kwargs: Any) -> Result:
    if not isinstance(x, Input):
        raise Refusal("it gives a constant the type of a tensor that depends on the input; use its dtype instead")
    return x


@register_rule(aten.empty_like, aten.new_empty)
def unset(call: Call, x: Any, *args: Any, **kwargs: Any) -> Result:
    raise Refusal("its entries are not set; use torch.zeros_like or x.new_zeros")


@register_rule(aten.dropout, aten.feature_dropout, aten.alpha_dropout, aten.feature_alpha_dropout, aten.native_dropout)
def dropout(call: Call, x: Any, p: float, train: bool) -> Result:
    if train and p > 0:
        raise TrainingModeError(
            f"{call.name} (dropout) is in training mode, where it is random; call model.eval() first, and pass "
            "training=self.training to functions"
        )
    assert isinstance(x, Input)
    return x
