"""What cannot be bounded, and what to do instead: by operator, and by the module that it belongs to."""

from __future__ import annotations

from typing import Any

import torch

from lipcert.network.rules.registry import Call, Refusal, Result, register_rule

aten = torch.ops.aten

DEFAULT = "register a rule with @lipcert.register_rule, or rewrite it with supported operations"
_STATISTIC = (
    "it divides by a statistic of its input, so its slope is only bounded by 1/√eps, which is of no use; "
    "use BatchNorm, which is fixed in eval mode"
)
_QUOTIENT = (
    "it divides by a norm of its input, so its slope is not bounded near zero; leave it out, or "
    "use BatchNorm, which is fixed in eval mode"
)
_ATTENTION = "attention is not globally Lipschitz; lipcert bounds feed-forward networks"
_RECURRENT = "recurrent layers are not supported; lipcert bounds feed-forward networks"
_GATE = "a product of two tensors that depend on the input is not Lipschitz; use a network without gating"
_LOGITS = "it does not change the prediction: remove it and certify the logits"
_JUMPS = "it jumps, so no constant bounds its slope; use a continuous activation such as Softshrink or ReLU"
_STEEP = "its slope is not bounded; use an activation with bounded slopes, such as tanh or softplus"

_OPERATORS: dict[str, tuple[Any, ...]] = {
    _STATISTIC: (aten.layer_norm, aten.native_layer_norm, aten.group_norm, aten.native_group_norm, aten.instance_norm,
                 aten.rms_norm),
    _ATTENTION: (aten.scaled_dot_product_attention,),
    _RECURRENT: (aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu, aten.lstm_cell, aten.gru_cell, aten.rnn_tanh_cell,
                 aten.rnn_relu_cell),
    _GATE: (aten.glu,),
    _LOGITS: (aten.log_softmax, aten._log_softmax),
    _JUMPS: (aten.hardshrink, aten.sign, aten.sgn, aten.round, aten.floor, aten.ceil, aten.trunc, aten.floor_divide,
             aten.remainder, aten.fmod, aten.frac, aten.heaviside),
    _STEEP: (aten.exp, aten.exp2, aten.expm1, aten.pow, aten.float_power, aten.square, aten.sqrt, aten.log, aten.log2,
             aten.log10, aten.log1p, aten.reciprocal, aten.rsqrt, aten.sinh, aten.cosh, aten.tan, aten.prod),
}  # fmt: skip
MODULES = {
    "LayerNorm": _STATISTIC,
    "GroupNorm": _STATISTIC,
    "InstanceNorm1d": _STATISTIC,
    "InstanceNorm2d": _STATISTIC,
    "InstanceNorm3d": _STATISTIC,
    "RMSNorm": _STATISTIC,
    "LocalResponseNorm": _QUOTIENT,
    "MultiheadAttention": _ATTENTION,
    "TransformerEncoderLayer": _ATTENTION,
    "TransformerEncoder": _ATTENTION,
    "Transformer": _ATTENTION,
    "LSTM": _RECURRENT,
    "GRU": _RECURRENT,
    "RNN": _RECURRENT,
    "LSTMCell": _RECURRENT,
    "GRUCell": _RECURRENT,
    "RNNCell": _RECURRENT,
    "LogSoftmax": _LOGITS,
}
"""Modules of torch.nn that are refused as a whole, whichever of their operations has no rule."""


def _refuse(remedy: str) -> Any:
    def rule(call: Call, *args: Any, **kwargs: Any) -> Result:
        if remedy in (_STEEP, _JUMPS):
            raise Refusal(f"{remedy}; or {DEFAULT}")
        raise Refusal(remedy)

    return rule


for _remedy, _keys in _OPERATORS.items():
    register_rule(*_keys)(_refuse(_remedy))
