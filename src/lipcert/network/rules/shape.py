"""Rules for operations that move or sum entries, and for those that change nothing."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from lipcert.errors import TrainingModeError
from lipcert.network.linear import Reshape
from lipcert.network.rules.broadcasting import broadcast
from lipcert.network.rules.call import Call
from lipcert.network.rules.registry import rule_for
from lipcert.network.rules.values import (
    BatchSize,
    Constant,
    Input,
    Refusal,
    Result,
    Sum,
)

_POSITIONS = (
    "the positions that it reads depend on the network's input, so it "
    "jumps; use constant positions"
)
_FIXED_AXES = {
    "fliplr": 1,
    "flipud": 0,
    "hsplit": 1,
    "dsplit": 2,
    "vsplit": 0,
    "tril": -2,
    "triu": -2,
}
"""Operators that work along an axis that is not among their arguments."""


def _checked_input(x: Any, what: str) -> Input:
    if not isinstance(x, Input):
        raise Refusal(
            f"it gives a constant the {what} of a tensor that depends on the input; "
            f"use its {what} instead"
        )
    return x


@rule_for(
    "reshape view _unsafe_view flatten unflatten squeeze unsqueeze view_as "
    "reshape_as ravel atleast_2d atleast_3d"
)
def reshape(call: Call, x: Any, *args: Any) -> Result:
    """The batch axis stays in front, so that every row keeps its entries in their order."""
    return Reshape(_checked_input(x, "shape").shape, call.out_shape)


@rule_for(
    "flip roll rot90 diagonal linalg_diagonal select narrow index_select unbind unfold "
    "split split_with_sizes chunk tensor_split repeat_interleave"
)
def move_along_axes(call: Call, *args: Any, **kwargs: Any) -> Result:
    call.axes()
    return call.move()


@rule_for(" ".join(_FIXED_AXES))
def move_along_fixed_axis(call: Call, *args: Any) -> Result:
    call.axis(_FIXED_AXES[call.operator])
    return call.move()


def is_whole_slice(start: Any = None, end: Any = None, step: Any = None) -> bool:
    """Whether a slice leaves nothing out; torch writes 2⁶³ − 1 for an end that is not given."""
    to_the_end = end is None or (isinstance(end, int) and end >= 2**62)
    return start in (None, 0) and to_the_end and step in (None, 1)


@rule_for("slice")
def slices(
    call: Call, x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Result:
    # Dimension 0 is the batch. Slices that leave out rows change the recorded shape,
    # too, which is checked.
    if dim % (len(call.input.shape) + 1) != 0:
        return call.move()
    if not is_whole_slice(start, end, step) and not isinstance(end, BatchSize):
        raise Refusal("it leaves out rows of the batch")
    return call.input


@rule_for("col2im")
def fold(call: Call, x: Any, size: Any, kernel: Any, *args: Any) -> Result:
    """Adds up patches that overlap."""
    return call.linear(terms=prod(kernel), nonnegative=True)


@rule_for("gather")
def gather(
    call: Call, x: Any, dim: int, index: Any, *args: Any, **kwargs: Any
) -> Result:
    if not isinstance(index, Constant):
        raise Refusal(_POSITIONS)
    call.axis(dim)
    # One row of a constant with a batch axis is read; positions of several rows would
    # be different in each.
    if len(index()) != 1:
        raise Refusal(
            "its positions have a batch axis of their own; expand them from one row"
        )
    return call.move()


@rule_for("index")
def index(call: Call, x: Any, indices: Any) -> Result:
    if call.inputs != [x]:
        raise Refusal(_POSITIONS)
    # The first place is that of the batch axis: x[:, [0, 2]] has None there.
    if not indices or indices[0] is not None:
        raise Refusal("it picks rows of the batch")
    for positions in indices:
        if isinstance(positions, Constant) and positions().dtype == torch.bool:
            raise Refusal(
                "torch.export does not know how many entries a mask picks; use "
                "positions, or x * mask"
            )
    return call.move()


@rule_for(
    "permute transpose swapaxes swapdims movedim moveaxis mT mH adjoint t numpy_T "
    "matrix_H repeat tile diag_embed "
    "im2col zero pad constant_pad_nd pixel_shuffle pixel_unshuffle channel_shuffle "
    "reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d "
    "replication_pad2d replication_pad3d"
)
def move_entries(call: Call, *args: Any, **kwargs: Any) -> Result:
    """The batch axis may not move, which the shape of the result shows; numbers written beside do not matter."""
    # A padding with ones is affine. Its linear part pads with zeros.
    if call.argument("value"):
        return call.move_beside_numbers()
    return call.move()


@rule_for("expand expand_as broadcast_to")
def expand(call: Call, x: Any, *args: Any, **kwargs: Any) -> Result:
    """Copies in a larger shape; of the other tensor of expand_as, only the shape is read."""
    x = _checked_input(x, "shape")
    return Sum([(x, [broadcast(x.shape, call.out_shape)])])


@rule_for("sum mean")
def reduce(call: Call, *args: Any, **kwargs: Any) -> Result:
    call.axes()
    # Each result sums as many entries, and a mean divides once more.
    entries = prod(call.input.shape) // max(prod(call.out_shape), 1)
    return call.linear(terms=entries + 1, nonnegative=True)


@rule_for("to _to_copy clone contiguous alias detach lift_fresh_copy type_as positive")
def unchanged(call: Call, x: Any, *args: Any, **kwargs: Any) -> Result:
    return _checked_input(x, "dtype")


@rule_for("dropout feature_dropout alpha_dropout feature_alpha_dropout native_dropout")
def dropout(call: Call, x: Any, p: float, train: bool) -> Result:
    if train and p > 0:
        raise TrainingModeError(
            f"{call.name} (dropout) is in training mode, where it is random; call "
            "model.eval() first, and pass "
            "training=self.training to functions"
        )
    assert isinstance(x, Input)
    return x
