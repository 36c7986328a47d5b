"""Rules for nonlinearities that act on every entry."""

from __future__ import annotations

from dataclasses import replace
from math import exp, frexp, log
from typing import Any

import torch
import torch.nn.functional as F

from lipcert.errors import TrainingModeError
from lipcert.network import slopes
from lipcert.network.program import Live
from lipcert.network.rules.call import Call
from lipcert.network.rules.registry import Rule, register_rule, rule_for
from lipcert.network.rules.values import Constant, Input, Refusal, Result
from lipcert.network.slopes import Slope
from lipcert.rounding import UNIT_ROUNDOFF

_FIXED = {
    "relu": slopes.RELU,
    "relu6": slopes.clipping(0.0, 6.0),
    "tanh": slopes.TANH,
    "atan arctan": slopes.ATAN,
    "asinh arcsinh": slopes.ASINH,
    "log_sigmoid": slopes.LOG_SIGMOID,
    "selu": slopes.SELU,
    "sigmoid special_expit": slopes.SIGMOID,
    "hardsigmoid": slopes.HARD_SIGMOID,
    "silu": slopes.SILU,
    "mish": slopes.MISH,
    "hardswish": slopes.HARD_SWISH,
    "abs absolute": slopes.ABS,
    "sin cos": slopes.WAVE,
}


def _always(slope: Slope) -> Rule:
    def rule(call: Call, *args: Any, **kwargs: Any) -> Result:
        return slope

    return rule


for _operators, _slope in _FIXED.items():
    rule_for(_operators)(_always(_slope))
# x/(|x| + 1), which torch writes as a quotient; the capture puts its parts together.
register_rule(F.softsign)(_always(slopes.SOFTSIGN))


@rule_for("hardtanh")
def hardtanh(call: Call, x: Any, lower: float = -1.0, upper: float = 1.0) -> Result:
    return slopes.clipping(float(lower), float(upper))


@rule_for("softshrink")
def softshrink(call: Call, x: Any, width: float = 0.5) -> Result:
    return slopes.shrinking(float(width))


@rule_for("leaky_relu")
def leaky_relu(call: Call, x: Any, negative_slope: float = 0.01) -> Result:
    return slopes.leaky(float(negative_slope))


@rule_for("rrelu")
def random_relu(call: Call, *args: Any, **kwargs: Any) -> Result:
    """In eval mode it is captured as a LeakyReLU."""
    raise TrainingModeError(
        f"{call.name} (RReLU) is in training mode, where it is random; call "
        "model.eval() first"
    )


@rule_for("prelu _prelu_kernel")
def prelu(call: Call, x: Any, weight: Any) -> Result:
    if not isinstance(x, Input) or not isinstance(weight, Constant):
        raise Refusal("its slope depends on the network's input; use LeakyReLU")
    return slopes.prelu(weight.read)


_MODERATE = 2.0**20
"""Parameters and their inverses up to this keep what is computed inside a nonlinearity from under- and overflowing."""


def _check_moderate(**parameters: float) -> None:
    for name, value in parameters.items():
        if not 1 / _MODERATE <= abs(value) <= _MODERATE:
            raise Refusal(
                f"with {name}={value:g} numbers inside it may under- or overflow; "
                "use one closer to 1"
            )


@rule_for("elu")
def elu(
    call: Call, x: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0
) -> Result:
    """scale·x above zero, scale·alpha·(exp(input_scale·x) − 1) below; torch writes SELU and CELU in place so."""
    _check_moderate(scale=scale, input_scale=input_scale)
    if alpha != 0:
        _check_moderate(alpha=alpha)
    if scale == 1 and input_scale == 1:
        return slopes.elu(float(alpha))
    if input_scale < 0:
        raise Refusal(
            f"with input_scale={input_scale} its slopes are unbounded; "
            "use a positive one"
        )
    # The slope is `scale` above zero, and scale·alpha·input_scale·exp(…) below, with
    # exp between 0 and 1.
    ends = (0.0, float(scale), scale * alpha * input_scale)
    low, high = min(ends), max(ends)
    slack = _rounded_products(call) * max(-low, high)
    # If no slope is negative, 0 is exact; other ends move outwards by what the rounding
    # of their factors can cost.
    if low < 0:
        low -= slack
    curvature = abs(scale * alpha * input_scale * input_scale) * (
        1 + _rounded_products(call)
    )
    return Slope(low, high + slack, ulps=6.0, kinks=(0.0,), curvature=curvature)


def _rounded_products(call: Call) -> float:
    """By how much a product of the numbers of an operator, or an inverse, may be off relatively."""
    return 4 * UNIT_ROUNDOFF.get(call.recorded.dtype, UNIT_ROUNDOFF[torch.float64])


@rule_for("celu")
def celu(call: Call, x: Any, alpha: float = 1.0) -> Result:
    if alpha <= 0:
        raise Refusal(f"with alpha={alpha} its slopes are unbounded; use alpha > 0")
    _check_moderate(alpha=alpha)
    # torch multiplies by 1/alpha and by alpha: for a power of two both are exact, and
    # no slope exceeds 1.
    exact = frexp(alpha)[0] == 0.5  # else the product of alpha and its inverse is not 1
    slack = 0.0 if exact else _rounded_products(call)
    return replace(slopes.smooth((1 + 1e-15 + slack) / alpha, 0.0), beta=1 + slack)


@rule_for("softplus")
def softplus(call: Call, x: Any, beta: float = 1.0, threshold: float = 20.0) -> Result:
    """torch returns x itself where beta·x exceeds the threshold: a jump of log(1 + e^−threshold)/beta."""
    if beta <= 0:
        raise Refusal(f"beta={beta} must be positive")
    _check_moderate(beta=beta)
    narrow = call.recorded.dtype
    if threshold > 0.99 * log(torch.finfo(narrow).max):
        raise Refusal(
            f"exp overflows in {narrow} below threshold={threshold}; use "
            "nn.Softplus(threshold=40)"
        )
    # A model without tensors runs in the type of its input: there, the jump has to
    # drown in float64, too.
    dtype = torch.float64
    if call.typed:
        dtype = call.recorded.dtype
    # The jump is at most e^−threshold/beta. It drowns if it is below the rounding of
    # the result, u·threshold/beta.
    if threshold <= 0 or exp(-threshold) > threshold * UNIT_ROUNDOFF.get(dtype, 1.0):
        raise Refusal(
            f"threshold={threshold} makes a jump in {dtype} where torch "
            "switches to the identity; "
            "use nn.Softplus(threshold=40)"
        )
    return slopes.smooth(beta / 4)


@rule_for("gelu")
def gelu(call: Call, x: Any, *, approximate: str = "none") -> Result:
    if approximate == "tanh":
        return slopes.GELU_TANH
    return slopes.GELU


@rule_for("threshold")
def threshold(call: Call, x: Any, limit: float, value: float) -> Result:
    """x above the limit, a fixed value below it."""
    # Only with the fixed value at the limit itself are both branches joined.
    if limit != value:
        raise Refusal(
            f"it jumps from {value:g} to {limit:g}, so no constant bounds "
            "its slope; use ReLU"
        )
    return slopes.clipping(float(limit))


@rule_for("clamp clamp_min clamp_max clip")
def clamp(call: Call, x: Any, *limits: Any, **kwargs: Any) -> Result:
    if len(call.inputs) != 1 or not isinstance(x, Input):
        raise Refusal(
            "its limits depend on the network's input; use torch.maximum "
            "or torch.minimum"
        )
    return slopes.clipping(*_limits(call))


def _limits(call: Call) -> list[float | Live]:
    """The limits of a clamp, numbers or tensors."""
    limits: list[float | Live] = []
    for name in ("min", "max"):
        limit = call.argument(name)
        if isinstance(limit, Constant):
            limits.append(limit.read)
        elif limit is not None:
            limits.append(float(limit))
    return limits
