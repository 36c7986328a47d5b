"""What cannot be bounded, and what to do instead: by operator, and by the module that it belongs to."""

from __future__ import annotations

from typing import Any

from lipcert.network.normalised import Normalisation
from lipcert.network.rules.call import Call
from lipcert.network.rules.registry import Rule, rule_for
from lipcert.network.rules.values import Constant, Input, Refusal, Result
from lipcert.network.tangents import local_slope

DEFAULT = (
    "register a rule with @lipcert.register_rule, or rewrite it with "
    "supported operations"
)
_STATISTIC = (
    "it divides by a statistic of its input, so its slope is only bounded by "
    "1/√eps, which is of no use; "
    "use BatchNorm, which is fixed in eval mode, or for LayerNorm "
    "lipcert.certify_local, which bounds it over a ball"
)
_QUOTIENT = (
    "it divides by a power of its input, for which there is no rule; leave "
    "it out, or use BatchNorm"
)
_POWER = (
    "it takes powers and roots, for which there is no rule; use average or max-pooling"
)
_ATTENTION = (
    "attention is not globally Lipschitz; lipcert.certify_local bounds it over a "
    "ball where it is written out with "
    "matmul and softmax"
)
_RECURRENT = "recurrent layers are not supported; lipcert bounds feed-forward networks"
_LOGITS = (
    "at the end of a model it does not change the prediction: remove it and certify "
    "the logits; inside of one there is "
    "no rule for it: use another activation"
)
_JUMPS = (
    "it jumps, so no constant bounds its slope; use a continuous activation "
    "such as Softshrink or ReLU"
)
_STEEP = (
    "its slope is not bounded; use an activation with bounded slopes, "
    "such as tanh or softplus"
)
_PRODUCT = "a product of two tensors that depend on the input is not Lipschitz; use"

_OPERATORS = {
    "native_layer_norm group_norm native_group_norm instance_norm rms_norm": _STATISTIC,
    "scaled_dot_product_attention": _ATTENTION,
    "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell "
    "rnn_tanh_cell rnn_relu_cell": _RECURRENT,
    "glu": f"{_PRODUCT} a network without gating, or lipcert.certify_local with "
    "the product written out",
    "bilinear": f"{_PRODUCT} nn.Linear",
    "addmv baddbmm addbmm addr": "write it as a product and a sum, bias + a @ b",
    "msort": "it sorts along the batch axis; use torch.sort with dim",
    "upsample_bicubic2d": "interpolation mode 'bicubic': use nearest or (bi/tri)linear",
    "empty_like new_empty": "its entries are not set; use torch.zeros_like or "
    "x.new_zeros",
    "log_softmax _log_softmax": _LOGITS,
    "hardshrink sign sgn round floor ceil trunc floor_divide remainder "
    "fmod frac heaviside": f"{_JUMPS}; or {DEFAULT}",
    "exp exp2 expm1 pow float_power square sqrt log log2 log10 "
    "log1p reciprocal rsqrt": f"{_STEEP}; or {DEFAULT}",
    "sinh cosh tan prod": f"{_STEEP}; or {DEFAULT}",
}
_MODULES = {
    "LayerNorm GroupNorm InstanceNorm1d InstanceNorm2d "
    "InstanceNorm3d RMSNorm": _STATISTIC,
    "LocalResponseNorm": _QUOTIENT,
    "LPPool1d LPPool2d LPPool3d": _POWER,
    "MultiheadAttention TransformerEncoderLayer "
    "TransformerEncoder Transformer": _ATTENTION,
    "LSTM GRU RNN LSTMCell GRUCell RNNCell": _RECURRENT,
    "LogSoftmax": _LOGITS,
}
MODULES: dict[str, str] = {}
"""Remedies for modules of torch.nn that are refused as a whole, whichever of their operations has no rule."""
for _names, _remedy in _MODULES.items():
    MODULES.update(dict.fromkeys(_names.split(), _remedy))


def _refuse(remedy: str) -> Rule:
    def rule(call: Call, *args: Any, **kwargs: Any) -> Result:
        raise Refusal(remedy)

    return rule


for _operators, _remedy in _OPERATORS.items():
    rule_for(_operators)(_refuse(_remedy))


@rule_for("layer_norm")
def layer_norm(
    call: Call,
    x: Any,
    shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *args: Any,
) -> Result:
    """Bounded over balls only."""
    # A box is needed: over all inputs, the slope is only bounded by 1/√eps.
    if (
        not call.local
        or not isinstance(x, Input)
        or len(shape) > len(x.shape)
        or eps <= 0
    ):
        raise Refusal(_STATISTIC)
    if isinstance(weight, Input) or isinstance(bias, Input):
        raise Refusal(
            "its weight or bias depends on the network's input; multiply "
            "and add afterwards"
        )
    reads = [
        value.read if isinstance(value, Constant) else None for value in (weight, bias)
    ]
    return local_slope(Normalisation(len(shape), float(eps), *reads))
