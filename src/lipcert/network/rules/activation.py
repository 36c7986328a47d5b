"""Rules for nonlinearities."""

from __future__ import annotations

import operator
from math import isfinite
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lipcert.network import slopes
from lipcert.network.linear import Shape
from lipcert.network.rules.registry import Call, Constant, Input, Refusal, Result, register_rule
from lipcert.network.slopes import Slope


def _register(slope: Slope, *keys: Any) -> None:
    def rule(call: Call, *args: Any, **kwargs: Any) -> Result:
        return slope

    register_rule(*keys)(rule)


_register(slopes.RELU, nn.ReLU, torch.relu, torch.relu_, F.relu, F.relu_, "relu", "relu_")
_register(slopes.CLIP, nn.ReLU6, F.relu6, nn.Hardtanh, F.hardtanh, F.hardtanh_)
_register(slopes.SHRINK, nn.Softshrink, F.softshrink)
_register(
    slopes.SMOOTH,
    nn.Tanh,
    torch.tanh,
    F.tanh,
    "tanh",
    "tanh_",
    nn.Tanhshrink,
    F.tanhshrink,
    nn.LogSigmoid,
    F.logsigmoid,
)
_register(slopes.SMOOTH, nn.Softsign, F.softsign)
_register(slopes.SELU, nn.SELU, F.selu, F.selu_, torch.selu, torch.selu_)
_register(slopes.SIGMOID, nn.Sigmoid, torch.sigmoid, F.sigmoid, "sigmoid", "sigmoid_")
_register(slopes.HARD_SIGMOID, nn.Hardsigmoid, F.hardsigmoid)
_register(slopes.SILU, nn.SiLU, F.silu)
_register(slopes.MISH, nn.Mish, F.mish)
_register(slopes.HARD_SWISH, nn.Hardswish, F.hardswish)
_register(slopes.ABS, torch.abs, operator.abs, "abs", "abs_")
_register(slopes.SOFTMAX, nn.Softmax, F.softmax, torch.softmax, "softmax", nn.Softmax2d)
_register(slopes.SOFTMIN, nn.Softmin)


@register_rule(nn.LeakyReLU)
def leaky_module(call: Call, x: Input) -> Result:
    return slopes.leaky(call.module.negative_slope)  # type: ignore[union-attr, arg-type]


@register_rule(F.leaky_relu, F.leaky_relu_)
def leaky_function(call: Call, input: Input, negative_slope: float = 0.01, inplace: bool = False) -> Result:
    return slopes.leaky(float(negative_slope))


@register_rule(nn.PReLU)
def prelu_module(call: Call, x: Input) -> Result:
    module: Any = call.module
    return slopes.prelu(lambda: module.weight)


@register_rule(F.prelu, torch.prelu, "prelu")
def prelu_function(call: Call, input: Input, weight: Constant) -> Result:
    return slopes.prelu(weight.read)


@register_rule(nn.ELU)
def elu_module(call: Call, x: Input) -> Result:
    return slopes.elu(float(call.module.alpha))  # type: ignore[union-attr, arg-type]


@register_rule(F.elu, F.elu_)
def elu_function(call: Call, input: Input, alpha: float = 1.0, inplace: bool = False) -> Result:
    return slopes.elu(float(alpha))


@register_rule(nn.CELU)
def celu_module(call: Call, x: Input) -> Result:
    return _celu(float(call.module.alpha))  # type: ignore[union-attr, arg-type]


@register_rule(F.celu, F.celu_, torch.celu)
def celu_function(call: Call, input: Input, alpha: float = 1.0, inplace: bool = False) -> Result:
    return _celu(float(alpha))


def _celu(alpha: float) -> Result:
    if alpha <= 0:
        raise Refusal(f"with alpha={alpha} its slopes are unbounded; use alpha > 0")
    return slopes.SMOOTH


@register_rule(nn.Softplus)
def softplus_module(call: Call, x: Input) -> Result:
    module: Any = call.module
    return _softplus(module.beta, module.threshold)


@register_rule(F.softplus)
def softplus_function(call: Call, input: Input, beta: float = 1.0, threshold: float = 20.0) -> Result:
    return _softplus(beta, threshold)


def _softplus(beta: float, threshold: float) -> Result:
    if threshold < 20:
        raise Refusal(
            f"threshold={threshold} makes a visible jump where torch switches to the identity; use threshold ≥ 20"
        )
    if beta <= 0:
        raise Refusal(f"beta={beta} must be positive")
    return slopes.softplus(beta, threshold)


@register_rule(nn.GELU)
def gelu_module(call: Call, x: Input) -> Result:
    return slopes.GELU_TANH if call.module.approximate == "tanh" else slopes.GELU  # type: ignore[union-attr]


@register_rule(F.gelu)
def gelu_function(call: Call, input: Input, approximate: str = "none") -> Result:
    return slopes.GELU_TANH if approximate == "tanh" else slopes.GELU


@register_rule(
    torch.clamp, torch.clip, "clamp", "clamp_", "clip", "clamp_min", "clamp_max", torch.clamp_min, torch.clamp_max
)
def clamp(call: Call, x: Input, *limits: Any, **kwargs: Any) -> Result:
    call.input  # noqa: B018  refuses limits that depend on the input
    return slopes.CLIP


@register_rule(torch.maximum, torch.minimum, torch.max, torch.min, "maximum", "minimum", "max", "min")
def clip_by_constant(call: Call, a: Any, b: Any = None, **kwargs: Any) -> Result:
    if kwargs or isinstance(b, int) or b is None or len(call.inputs) != 1:
        raise Refusal("only the maximum or minimum with a constant tensor is supported; use max-pooling or MaxMin")
    return slopes.CLIP


@register_rule(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
def max_pool_module(call: Call, x: Input) -> Result:
    module: Any = call.module
    return max_pool_function(call, x, module.kernel_size, module.stride, module.padding, module.dilation)


@register_rule(F.max_pool1d, F.max_pool2d, F.max_pool3d, torch.max_pool1d, torch.max_pool2d, torch.max_pool3d)
def max_pool_function(
    call: Call,
    input: Input,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Result:
    size = input.shape[1:]
    dims = len(size)
    kernel = _tuple(kernel_size, dims)
    stride = _tuple(stride, dims) if stride else kernel
    return slopes.max_pool(size, kernel, stride, _tuple(padding, dims), _tuple(dilation, dims), call.out_shape[1:])


@register_rule(
    nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d,
    nn.AdaptiveMaxPool3d,
    F.adaptive_max_pool1d,
    F.adaptive_max_pool2d,
    F.adaptive_max_pool3d,
)
def adaptive_max_pool(call: Call, *args: Any, **kwargs: Any) -> Result:
    if any(n % m for n, m in zip(call.input.shape[1:], call.out_shape[1:], strict=True)):
        raise Refusal("its windows overlap unevenly; use an output size that divides the input size")
    return slopes.lipschitz_map(1.0, l1=1.0, linf=1.0, group=1)


_UNBOUNDED = (
    "it divides by a statistic of its input, so its slope is unbounded; use BatchNorm, which is fixed in eval mode"
)
_ATTENTION = "attention is not globally Lipschitz; lipcert bounds feed-forward networks"
_RECURRENT = "recurrent layers are not supported; lipcert bounds feed-forward networks"
_LOGITS = "it does not change the prediction: remove it and certify the logits"
_NEVER: dict[str, tuple[Any, ...]] = {
    _UNBOUNDED: (
        nn.LayerNorm, nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.RMSNorm,
        nn.LocalResponseNorm, F.layer_norm, F.group_norm, F.instance_norm, F.normalize, F.local_response_norm,
    ),
    _ATTENTION: (
        nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder, nn.Transformer,
        F.scaled_dot_product_attention,
    ),
    _RECURRENT: (nn.LSTM, nn.GRU, nn.RNN),
    _LOGITS: (nn.LogSoftmax, F.log_softmax, torch.log_softmax, "log_softmax"),
}  # fmt: skip


def _refuse(remedy: str) -> Any:
    def rule(call: Call, *args: Any, **kwargs: Any) -> Result:
        raise Refusal(remedy)

    return rule


for _remedy, _keys in _NEVER.items():
    register_rule(*_keys)(_refuse(_remedy))


def _tuple(value: Any, dims: int) -> Shape:
    values = (value,) * dims if isinstance(value, int) else tuple(value)
    if len(values) != dims or not all(isfinite(v) for v in values):
        raise Refusal(f"expected {dims} sizes, got {values}")
    return values
