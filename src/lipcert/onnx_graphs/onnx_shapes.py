"""Operators of ONNX that move entries: shapes, axes, slices, padding, pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lipcert.onnx_graphs.onnx_node import OnnxNode, RefusalError, Step, operator


def _same(x: Tensor) -> Tensor:
    return x


@operator("Identity", "Dropout")
def identity(node: OnnxNode) -> Step:
    if node.kind == "Dropout":
        training = node.constant(2)
        if training is not None and bool(np.any(training)):
            raise RefusalError(
                "it is in training mode; export the network in eval mode"
            )
    return node.step(_same)


def _reshaped(x: Tensor, shape: list[int]) -> Tensor:
    return x.reshape(x.shape[0], *shape)


def _row_shape(node: OnnxNode, target: Sequence[int]) -> list[int]:
    """The shape of one row, from a shape for the sample, of which the batch has to remain the first axis."""
    try:
        # torch works out −1; what is kept are the sizes behind the batch, so that any
        # number of rows will do.
        shape = list(node.x.reshape(list(target)).shape)
    except RuntimeError:
        shape = []
    if not shape or shape[0] != node.batch:
        raise RefusalError(
            f"it makes {tuple(node.x.shape)} {tuple(target)}; the batch has to "
            "stay the first axis"
        )
    return shape[1:]


@operator("Reshape")
def reshape(node: OnnxNode) -> Step:
    target = node.numbers(1, "shape")
    if target is None:
        raise RefusalError("its shape is missing")
    if not node.attribute("allowzero", 0):
        # 0 means: as it was.
        for k, size in enumerate(target):
            if size == 0:
                target[k] = node.x.shape[k]
    return node.step(_reshaped, shape=_row_shape(node, target))


@operator("Flatten")
def flatten(node: OnnxNode) -> Step:
    axis = node.attribute("axis", 1)
    axis = axis + node.x.dim() if axis < 0 else axis
    front = int(np.prod(node.x.shape[:axis]))
    return node.step(_reshaped, shape=_row_shape(node, [front, -1]))


@operator("Transpose")
def transpose(node: OnnxNode) -> Step:
    order = list(node.attribute("perm", range(node.x.dim())[::-1]))
    if order[0] != 0:
        raise RefusalError(f"perm is {order}; the batch has to stay the first axis")
    return node.step(torch.permute, dims=order)


@operator("Squeeze")
def squeeze(node: OnnxNode) -> Step:
    axes = node.numbers(1, "axes")
    if axes is None:
        axes = [k for k, size in enumerate(node.x.shape) if size == 1 and k > 0]
    left = {node.axis(axis) for axis in axes}
    return node.step(
        _reshaped,
        shape=[size for k, size in enumerate(node.x.shape) if k > 0 and k not in left],
    )


@operator("Unsqueeze")
def unsqueeze(node: OnnxNode) -> Step:
    axes = node.numbers(1, "axes") or []
    rank = node.x.dim() + len(axes)
    new = {node.axis(axis, rank) for axis in axes}
    sizes = list(node.x.shape[1:])
    # (B, 5, 6) with axes 1 and 3 becomes (B, 1, 5, 1, 6).
    shape = [1 if k in new else sizes.pop(0) for k in range(1, rank)]
    return node.step(_reshaped, shape=shape)


def _joined(*x: Tensor, dim: int, places: list[int], **others: Tensor) -> Tensor:
    """Activations at some places, constants, made as long as the batch, at the others."""
    # Constants keep their order, and each activation is put in at its place, from the
    # front.
    pieces: list[Tensor] = list(others.values())
    for place, piece in zip(places, x, strict=True):
        pieces.insert(place, piece)
    batch = x[0].shape[0]
    return torch.cat([piece.expand(batch, *piece.shape[1:]) for piece in pieces], dim)


@operator("Concat")
def concat(node: OnnxNode) -> Step:
    samples = [value for value in node.inputs if isinstance(value, Tensor)]
    axis = node.axis(node.attribute("axis"), samples[0].dim())
    if len(samples) == len(node.inputs):
        return node.step(_concatenated, dim=axis)
    tensors: dict[str, Tensor | None] = {}
    places = []
    for k, value in enumerate(node.inputs):
        if isinstance(value, Tensor):
            places.append(k)
        elif value is not None and value.shape[:1] == (1,):
            tensors[f"constant_{k}"] = torch.from_numpy(np.array(value)).to(
                samples[0].dtype
            )
        else:
            raise RefusalError(
                f"the constant {k} fixes the size of the batch, expected one row"
            )
    return node.step(_joined, tensors, dim=axis, places=places)


def _concatenated(*x: Tensor, dim: int) -> Tensor:
    return torch.cat(x, dim)


@operator("Pad")
def pad(node: OnnxNode) -> Step:
    pads = node.numbers(1, "pads")
    mode = node.attribute("mode", "constant")
    if pads is None:
        raise RefusalError("its pads are missing")
    rank = node.x.dim()
    axes = node.numbers(3, "axes") or list(range(rank))
    before, after = [0] * rank, [0] * rank
    for k, axis in enumerate(axes):
        # ONNX: all beginnings, then all ends.
        before[axis], after[axis] = pads[k], pads[k + len(axes)]
    if before[0] or after[0]:
        raise RefusalError("it pads the batch axis")
    listed: list[int] = []
    # torch lists pairs from the last axis on.
    for k in range(rank - 1, 0, -1):
        listed += [before[k], after[k]]
    # torch pads by reflection only along as many axes as are spatial: channels must not
    # be listed.
    while len(listed) > 2 and listed[-2:] == [0, 0]:
        listed = listed[:-2]
    if mode == "constant":
        fill = node.constant(2)
        value = (
            float(fill.reshape(-1)[0])
            if fill is not None
            else float(node.attribute("value", 0.0))
        )
        return node.step(F.pad, pad=listed, value=value)
    modes = {"reflect": "reflect", "edge": "replicate", "wrap": "circular"}
    if mode not in modes:
        raise RefusalError(f"mode is {mode}, which is not known")
    return node.step(F.pad, pad=listed, mode=modes[mode])


def _picked(x: Tensor, axes: list[int], index: list[list[int]]) -> Tensor:
    """Entries at constant places along some axes."""
    for axis, places in zip(axes, index, strict=True):
        x = x.index_select(axis, torch.tensor(places, device=x.device))
    return x


@operator("Slice")
def slices(node: OnnxNode) -> Step:
    starts, ends = node.numbers(1, "starts"), node.numbers(2, "ends")
    if starts is None or ends is None:
        raise RefusalError("its starts or ends are missing")
    axes = node.numbers(3, "axes") or list(range(len(starts)))
    steps = node.numbers(4, "steps") or [1] * len(starts)
    chosen, index = [], []
    for axis, start, end, stride in zip(axes, starts, ends, steps, strict=True):
        size = node.x.shape[axis]
        # Python cuts off ends such as 2^63 − 1 and understands negative ones, as ONNX
        # does.
        places = list(range(size))[slice(start, end, stride)]
        if places == list(range(size)):
            continue
        chosen.append(node.axis(axis))
        index.append(places)
    return node.step(_picked, axes=chosen, index=index)


@operator("Gather")
def gather(node: OnnxNode) -> Step:
    axis = node.axis(node.attribute("axis", 0))
    places = node.constant(1)
    if places is None:
        raise RefusalError("its indices are missing")
    size = node.x.shape[axis]
    index = [
        int(place) + size if place < 0 else int(place) for place in places.reshape(-1)
    ]
    # Indices of shape () remove the axis, (2, 3) make two of it.
    shape = [*node.x.shape[1:axis], *places.shape, *node.x.shape[axis + 1 :]]
    return node.step(_gathered, axis=axis, index=index, shape=shape)


def _gathered(x: Tensor, axis: int, index: list[int], shape: list[int]) -> Tensor:
    return _reshaped(_picked(x, [axis], [index]), shape)


@operator("Split")
def split(node: OnnxNode) -> Step:
    axis = node.axis(node.attribute("axis", 0))
    sizes = node.numbers(1, "split")
    if sizes is None:
        count = node.attribute("num_outputs", node.attribute("outputs"))
        # Seven entries in three pieces: 3, 3 and 1.
        size = -(-node.x.shape[axis] // count)
        sizes = [size] * (count - 1)
        sizes.append(node.x.shape[axis] - sum(sizes))
    return node.step(_pieces, sizes=sizes, dim=axis)


def _pieces(x: Tensor, sizes: list[int], dim: int) -> Any:
    return torch.split(x, sizes, dim)
