"""Activations and arithmetic of ONNX."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lipcert.onnx_graphs.onnx_node import OnnxNode, RefusalError, Step, operator

_PLAIN: dict[str, Any] = {
    "Relu": F.relu, "Sigmoid": torch.sigmoid, "Tanh": torch.tanh, "Softplus": F.softplus, "Softsign": F.softsign,
    "HardSwish": F.hardswish, "Mish": F.mish, "Abs": torch.abs, "Neg": torch.neg, "Erf": torch.erf, "Sin": torch.sin,
    "Cos": torch.cos, "Atan": torch.atan,
}  # fmt: skip
_BINARY: dict[str, Any] = {
    "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Div": torch.div, "Sum": torch.add, "Max": torch.maximum,
    "Min": torch.minimum,
}  # fmt: skip


@operator(*_PLAIN)
def plain(node: OnnxNode) -> Step:
    return node.step(_PLAIN[node.kind])


@operator("LeakyRelu")
def leaky_relu(node: OnnxNode) -> Step:
    return node.step(F.leaky_relu, negative_slope=node.attribute("alpha", 0.01))


@operator("Elu")
def elu(node: OnnxNode) -> Step:
    return node.step(F.elu, alpha=node.attribute("alpha", 1.0))


@operator("Celu")
def celu(node: OnnxNode) -> Step:
    return node.step(F.celu, alpha=node.attribute("alpha", 1.0))


@operator("Selu")
def selu(node: OnnxNode) -> Step:
    # torch has the constants of SELU built in; a node with others is another function.
    for name, value in (("alpha", 1.6732632), ("gamma", 1.0507010)):
        if abs(node.attribute(name, value) - value) > 1e-6:
            raise RefusalError(f"{name} is {node.attribute(name)}, expected {value}")
    return node.step(F.selu)


@operator("Gelu")
def gelu(node: OnnxNode) -> Step:
    return node.step(F.gelu, approximate=node.attribute("approximate", "none"))


def _hard_sigmoid(x: Tensor, alpha: float, beta: float) -> Tensor:
    return (alpha * x + beta).clamp(0.0, 1.0)


@operator("HardSigmoid")
def hard_sigmoid(node: OnnxNode) -> Step:
    return node.step(
        _hard_sigmoid,
        alpha=node.attribute("alpha", 0.2),
        beta=node.attribute("beta", 0.5),
    )


@operator("PRelu")
def prelu(node: OnnxNode) -> Step:
    slope = node.needed(1)
    channels = node.x.shape[1]
    # ONNX aligns shapes from the right: beside (B, C, H, W), (C, 1, 1) is a slope per
    # channel, (C,) one per column.
    per_channel = (
        slope.dim() == node.x.dim() - 1 and slope.numel() == slope.shape[0] == channels
    )
    if slope.numel() != 1 and not per_channel:
        raise RefusalError(
            f"its slope has the shape {tuple(slope.shape)}, expected one "
            "or one per channel"
        )
    return node.step(F.prelu, {"weight": slope.reshape(-1)})


@operator("Clip")
def clip(node: OnnxNode) -> Step:
    limits: dict[str, float] = {}
    for place, name in ((1, "min"), (2, "max")):
        # Limits are inputs from opset 11 on, attributes before.
        given = node.constant(place)
        limit = node.attribute(name) if given is None else float(given.reshape(-1)[0])
        if limit is not None:
            limits[name] = limit
    # torch.clamp without any limit is an error.
    if not limits:
        return node.step(torch.clone)
    return node.step(torch.clamp, **limits)


def _of_flat(x: Tensor, function: Any, axis: int) -> Tensor:
    """What versions before 13 do: all axes from this one on count as one."""
    y: Tensor = function(x.flatten(axis), -1)
    return y.reshape(x.shape)


@operator("Softmax", "LogSoftmax")
def softmax(node: OnnxNode) -> Step:
    function = torch.softmax if node.kind == "Softmax" else torch.log_softmax
    # The meaning of `axis` has changed, and so has its default.
    if node.opset >= 13:
        return node.step(function, dim=node.axis(node.attribute("axis", -1)))
    axis = node.axis(node.attribute("axis", 1))
    if axis == node.x.dim() - 1:
        return node.step(function, dim=axis)
    return node.step(_of_flat, function=function, axis=axis)


@operator("Cast")
def cast(node: OnnxNode) -> Step:
    kinds = {1: torch.float32, 11: torch.float64}
    # A cast to fewer bits is no Lipschitz map; one to the type that is there already
    # changes nothing.
    if kinds.get(node.attribute("to")) != node.x.dtype:
        raise RefusalError(
            f"it makes {node.x.dtype} another type, which is not supported; remove it"
        )
    return node.step(torch.clone)


def _reversed(x: Tensor, other: Tensor, function: Any) -> Tensor:
    y: Tensor = function(other, x)
    return y


@operator(*_BINARY)
def binary(node: OnnxNode) -> Step:
    if len(node.inputs) == 1:
        return node.step(torch.clone)
    if len(node.inputs) != 2:
        raise RefusalError(f"it has {len(node.inputs)} inputs, expected 2")
    function = _BINARY[node.kind]
    left, right = node.inputs
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        # Of other ranks, broadcasting would align the batch of one with another axis of
        # the other.
        if (
            left.shape[0] != node.batch
            or right.shape[0] != node.batch
            or left.dim() != right.dim()
        ):
            raise RefusalError("its inputs do not have the batch as their first axis")
        return node.step(function)
    constant, activation = (right, left) if isinstance(left, Tensor) else (left, right)
    if not isinstance(activation, Tensor) or constant is None:
        raise RefusalError("an input is missing")
    other = torch.from_numpy(np.array(constant)).to(activation.dtype)
    # (1, C) or (C,) is the same for every row; (B, C) would be a different constant for
    # each.
    if other.dim() > activation.dim() or (
        other.dim() == activation.dim() and other.shape[0] != 1
    ):
        raise RefusalError(
            f"a constant of shape {tuple(other.shape)} treats the rows of a "
            "batch differently"
        )
    # 5 − x and 5 / x: the step takes activations first.
    if node.kind in ("Sub", "Div") and constant is left:
        return node.step(_reversed, {"other": other}, function=function)
    return node.step(function, {"other": other})
