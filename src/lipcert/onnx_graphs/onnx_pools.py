"""Pools and means of ONNX."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lipcert.onnx_graphs.onnx_node import OnnxNode, RefusalError, Step, operator
from lipcert.onnx_graphs.onnx_padding import Window, padded, window

_MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_MEAN: dict[int, Any] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def _pool_window(node: OnnxNode) -> tuple[int, Window]:
    kernel = list(node.attribute("kernel_shape"))
    if len(kernel) not in _MAX:
        raise RefusalError(f"it has {len(kernel)} spatial axes, expected 1 to 3")
    return len(kernel), window(node, kernel)


def _fits(shape: Window) -> bool:
    """Whether torch takes this padding: alike on both sides and at most half a window."""
    return shape.is_symmetric and all(
        2 * pad <= size for pad, size in zip(shape.before, shape.kernel, strict=True)
    )


@operator("MaxPool")
def max_pool(node: OnnxNode) -> Step:
    rank, shape = _pool_window(node)
    options = {
        "stride": shape.stride,
        "dilation": shape.dilation,
        "ceil_mode": bool(node.attribute("ceil_mode", 0)),
    }
    if _fits(shape):
        return node.step(
            _MAX[rank], kernel_size=shape.kernel, padding=shape.before, **options
        )
    # −∞ never is the largest entry of a window.
    pads, low = shape.torch_pads, float("-inf")
    return node.step(
        padded,
        function=_MAX[rank],
        pads=pads,
        value=low,
        kernel_size=shape.kernel,
        **options,
    )


def _counted_mean(
    x: Tensor, share: Tensor, function: Any, pads: list[int], **options: Any
) -> Tensor:
    """The mean over what is no padding: of every window, the share of entries that count is constant."""
    y: Tensor = function(F.pad(x, pads), **options)
    return y / share


@operator("AveragePool")
def average_pool(node: OnnxNode) -> Step:
    rank, shape = _pool_window(node)
    if shape.dilation != [1] * rank:
        raise RefusalError(f"dilations are {shape.dilation}, expected 1")
    ceil, counted = (
        bool(node.attribute("ceil_mode", 0)),
        bool(node.attribute("count_include_pad", 0)),
    )
    options: dict[str, Any] = {"kernel_size": shape.kernel, "stride": shape.stride}
    if _fits(shape):
        more = {
            "padding": shape.before,
            "ceil_mode": ceil,
            "count_include_pad": counted,
        }
        return node.step(_MEAN[rank], **options, **more)
    if ceil:
        raise RefusalError(
            "ceil_mode with uneven padding is not supported; pad in a node of its own"
        )
    if counted:
        return node.step(padded, function=_MEAN[rank], pads=shape.torch_pads, **options)
    ones = torch.ones(1, 1, *node.x.shape[2:], dtype=node.x.dtype)
    # The mean of ones with zeros around them: the part of a window that lies inside the
    # image.
    share = padded(ones, function=_MEAN[rank], pads=shape.torch_pads, **options)
    return node.step(
        _counted_mean,
        {"share": share},
        function=_MEAN[rank],
        pads=shape.torch_pads,
        **options,
    )


@operator("GlobalAveragePool")
def global_average_pool(node: OnnxNode) -> Step:
    return node.step(torch.mean, dim=list(range(2, node.x.dim())), keepdim=True)


@operator("GlobalMaxPool")
def global_max_pool(node: OnnxNode) -> Step:
    return node.step(torch.amax, dim=list(range(2, node.x.dim())), keepdim=True)


def _axes(node: OnnxNode) -> list[int]:
    listed = node.numbers(1, "axes")
    if not listed:
        # Without axes ONNX reduces all of them, unless this says none.
        if node.attribute("noop_with_empty_axes", 0):
            return []
        raise RefusalError("it reduces all axes, that of the batch too; state the axes")
    return [node.axis(axis) for axis in listed]


@operator("ReduceMean")
def reduce_mean(node: OnnxNode) -> Step:
    return _reduced(node, torch.mean)


@operator("ReduceSum")
def reduce_sum(node: OnnxNode) -> Step:
    return _reduced(node, torch.sum)


@operator("ReduceMax")
def reduce_max(node: OnnxNode) -> Step:
    return _reduced(node, torch.amax)


def _reduced(node: OnnxNode, function: Any) -> Step:
    axes = _axes(node)
    if not axes:
        return node.step(torch.clone)
    return node.step(function, dim=axes, keepdim=bool(node.attribute("keepdims", 1)))
