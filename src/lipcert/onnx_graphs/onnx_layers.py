"""Linear layers and normalisation of ONNX: Gemm, MatMul, Conv, ConvTranspose, BatchNormalization."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lipcert.onnx_graphs.onnx_node import OnnxNode, RefusalError, Step, operator
from lipcert.onnx_graphs.onnx_padding import padded, window

_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@operator("Gemm")
def gemm(node: OnnxNode) -> Step:
    """α·A·B + β·C, with the input as A."""
    node.only(transA=0)
    weight = node.needed(1)  # (in, out), or (out, in) if transposed
    if not node.attribute("transB", 0):
        weight = weight.T
    # α and β become part of the weights, so that the step is an ordinary linear layer.
    weight = weight * node.attribute("alpha", 1.0)
    bias = node.tensor(2)
    if bias is not None:
        # C may be a number, (out,) or (1, out).
        bias = (
            (bias * node.attribute("beta", 1.0)).broadcast_to(1, len(weight))[0].clone()
        )
    return node.step(F.linear, {"weight": weight.contiguous(), "bias": bias})


def _from_left(x: Tensor, other: Tensor) -> Tensor:
    return torch.matmul(other, x)


@operator("MatMul")
def matmul(node: OnnxNode) -> Step:
    if not isinstance(node.inputs[0], Tensor):
        other = torch.from_numpy(node.inputs[0].copy()).to(_activation(node).dtype)  # type: ignore[union-attr]
        return node.step(_from_left, {"other": other})
    # A product of two activations. Whether it has a rule is decided when the module is
    # captured.
    if isinstance(node.inputs[1], Tensor):
        return node.step(torch.matmul)
    weight = node.needed(1)
    if weight.dim() == 2:  # as a linear layer, which it is
        return node.step(F.linear, {"weight": weight.T.contiguous()})
    return node.step(torch.matmul, {"other": weight})


def _activation(node: OnnxNode) -> Tensor:
    for value in node.inputs:
        if isinstance(value, Tensor):
            return value
    raise RefusalError("none of its inputs depends on the input of the network")


def _kernel(node: OnnxNode) -> tuple[Tensor, int]:
    """The weights of a convolution, and how many spatial axes it has."""
    weight = node.needed(1)
    rank = weight.dim() - 2
    if rank not in _CONVOLUTIONS:
        raise RefusalError(f"it has {rank} spatial axes, expected 1 to 3")
    return weight, rank


@operator("Conv")
def convolution(node: OnnxNode) -> Step:
    weight, rank = _kernel(node)
    shape = window(node, list(weight.shape[2:]))
    tensors = {"weight": weight, "bias": node.tensor(2)}
    options: dict[str, Any] = {
        "stride": shape.stride,
        "dilation": shape.dilation,
        "groups": node.attribute("group", 1),
    }
    # torch pads alike on both sides; uneven padding is a step before the convolution.
    if shape.is_symmetric:
        return node.step(_CONVOLUTIONS[rank], tensors, padding=shape.before, **options)
    return node.step(
        padded, tensors, function=_CONVOLUTIONS[rank], pads=shape.torch_pads, **options
    )


def _cropped(
    x: Tensor, function: Any, crop: list[tuple[int, int]], **options: Any
) -> Tensor:
    y: Tensor = function(x, **options)
    for axis, (before, after) in enumerate(crop, start=2):
        # Padding of a transposed convolution removes entries of its result.
        y = y.narrow(axis, before, y.shape[axis] - before - after)
    return y


@operator("ConvTranspose")
def transposed_convolution(node: OnnxNode) -> Step:
    weight, rank = _kernel(node)
    extra = list(node.attribute("output_padding", [0] * rank))
    shape = window(node, list(weight.shape[2:]), transposed=extra)
    options: dict[str, Any] = {
        "stride": shape.stride, "dilation": shape.dilation, "groups": node.attribute("group", 1),
        "output_padding": extra,
    }  # fmt: skip
    tensors = {"weight": weight, "bias": node.tensor(2)}
    if shape.is_symmetric:
        return node.step(_TRANSPOSED[rank], tensors, padding=shape.before, **options)
    # torch crops alike on both sides; the rest is cut off here.
    crop = list(zip(shape.before, shape.after, strict=True))
    return node.step(
        _cropped, tensors, function=_TRANSPOSED[rank], crop=crop, **options
    )


@operator("BatchNormalization")
def batch_normalization(node: OnnxNode) -> Step:
    # Statistics of the batch would mix its rows.
    node.only(training_mode=0, spatial=1)
    places = {"weight": 1, "bias": 2, "running_mean": 3, "running_var": 4}
    tensors: dict[str, Tensor | None] = {
        name: node.needed(place) for name, place in places.items()
    }
    return node.step(
        F.batch_norm, tensors, training=False, eps=node.attribute("epsilon", 1e-5)
    )
