"""Rules for nonlinearities that act on every entry, or along an axis."""

from __future__ import annotations

from math import exp, inf
from typing import Any

import torch
import torch.nn.functional as F

from lipcert.errors import TrainingModeError
from lipcert.network import slopes
from lipcert.network.rules.registry import Call, Constant, Extremum, Input, Refusal, Result, register_rule
from lipcert.network.slopes import Slope
from lipcert.rounding import UNIT_ROUNDOFF

aten = torch.ops.aten

_FIXED: dict[Any, Slope] = {
    aten.relu: slopes.RELU,
    aten.softshrink: slopes.SHRINK,
    aten.tanh: slopes.SMOOTH,
    aten.atan: slopes.SMOOTH,
    aten.arctan: slopes.SMOOTH,
    aten.asinh: slopes.SMOOTH,
    aten.arcsinh: slopes.SMOOTH,
    aten.log_sigmoid: slopes.SMOOTH,
    aten.selu: slopes.SELU,
    aten.sigmoid: slopes.SIGMOID,
    aten.special_expit: slopes.SIGMOID,
    aten.hardsigmoid: slopes.HARD_SIGMOID,
    aten.silu: slopes.SILU,
    aten.mish: slopes.MISH,
    aten.hardswish: slopes.HARD_SWISH,
    aten.abs: slopes.ABS,
    aten.absolute: slopes.ABS,
    aten.sin: slopes.WAVE,
    aten.cos: slopes.WAVE,
}


def _fixed(slope: Slope) -> Any:
    def rule(call: Call, x: Any, *args: Any, **kwargs: Any) -> Result:
        return slope

    return rule


for _operator, _slope in _FIXED.items():
    register_rule(_operator)(_fixed(_slope))


@register_rule(aten.hardtanh, aten.relu6)
def hardtanh(call: Call, x: Any, low: float = -1.0, high: float = 1.0) -> Result:
    return slopes.CLIP


@register_rule(aten.leaky_relu)
def leaky_relu(call: Call, x: Any, negative_slope: float = 0.01) -> Result:
    return slopes.leaky(float(negative_slope))


@register_rule(aten.rrelu)
def random_relu(
    call: Call, x: Any, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, *args: Any
) -> Result:
    if training:
        raise TrainingModeError(f"{call.name} (RReLU) is in training mode, where it is random; call model.eval() first")
    return slopes.leaky((lower + upper) / 2)


@register_rule(aten.prelu, aten._prelu_kernel)
def prelu(call: Call, x: Any, weight: Any) -> Result:
    if not isinstance(x, Input) or not isinstance(weight, Constant):
        raise Refusal("its slope depends on the network's input; use LeakyReLU")
    return slopes.prelu(weight.read)


@register_rule(aten.elu)
def elu(call: Call, x: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Result:
    """scale·x above zero, scale·alpha·(exp(input_scale·x) − 1) below; torch writes SELU and CELU in place so."""
    if scale == 1 and input_scale == 1:
        return slopes.elu(float(alpha))
    if input_scale < 0:
        raise Refusal(f"with input_scale={input_scale} its slopes are unbounded; use a positive one")
    ends = (0.0, float(scale), scale * alpha * input_scale)
    slack = 4 * UNIT_ROUNDOFF[torch.float64] * max(abs(end) for end in ends)
    return Slope(min(ends) - slack if min(ends) else 0.0, max(ends) + slack, ulps=6.0)


@register_rule(aten.celu)
def celu(call: Call, x: Any, alpha: float = 1.0) -> Result:
    if alpha <= 0:
        raise Refusal(f"with alpha={alpha} its slopes are unbounded; use alpha > 0")
    return slopes.SMOOTH


@register_rule(aten.softplus)
def softplus(call: Call, x: Any, beta: float = 1.0, threshold: float = 20.0) -> Result:
    """torch returns x itself where beta·x exceeds the threshold: a jump of log(1 + e^−threshold)/beta."""
    if beta <= 0:
        raise Refusal(f"beta={beta} must be positive")
    dtype = call.executed if call.typed else torch.float64
    if threshold <= 0 or exp(-threshold) > threshold * UNIT_ROUNDOFF.get(dtype, 1.0):
        raise Refusal(
            f"threshold={threshold} makes a jump in {dtype} where torch switches to the identity; "
            "use nn.Softplus(threshold=40)"
        )
    return slopes.SMOOTH


@register_rule(aten.gelu)
def gelu(call: Call, x: Any, *, approximate: str = "none") -> Result:
    return slopes.GELU_TANH if approximate == "tanh" else slopes.GELU


@register_rule(aten.softmax, aten._softmax)
def softmax(call: Call, x: Any, dim: int, *args: Any) -> Result:
    return slopes.along_axis(slopes.SOFTMAX, call.axis(dim))


@register_rule(aten.threshold)
def threshold(call: Call, x: Any, limit: float, value: float) -> Result:
    """x above the limit, a fixed value below it."""
    if limit != value:
        raise Refusal(f"it jumps from {value:g} to {limit:g}, so no constant bounds its slope; use ReLU")
    return slopes.CLIP


@register_rule(aten.clamp, aten.clamp_min, aten.clamp_max, aten.clip)
def clamp(call: Call, x: Any, *limits: Any, **kwargs: Any) -> Result:
    inputs = call.inputs
    if len(inputs) != 1 or not isinstance(x, Input):
        raise Refusal("its limits depend on the network's input; use torch.maximum or torch.minimum")
    return slopes.CLIP


@register_rule(aten.maximum, aten.minimum, aten.max, aten.min)
def extremum(call: Call, a: Any, b: Any = None, keepdim: bool = False) -> Result:
    """Of two tensors, or along an axis."""
    sign = -1 if "min" in str(call.node.target) else 1  # type: ignore[union-attr]
    if isinstance(b, int):
        return reduced_extremum(call, a, b, keepdim)
    if b is None:
        raise Refusal("it is taken over everything, the batch included; give it an axis")
    if isinstance(a, Input) and isinstance(b, Input):
        return Extremum(a, b, sign)
    return slopes.CLIP


@register_rule(aten.amax, aten.amin)
def reduced_extremum(call: Call, x: Any, dims: Any = (), keepdim: bool = False) -> Result:
    """The largest or smallest entries along axes: of entries that no two results share."""
    _first_result(call)
    for dim in dims if isinstance(dims, list | tuple) else [dims]:
        call.axis(dim)
    if not isinstance(dims, int) and len(dims) == 0:
        raise Refusal("it is taken over everything, the batch included; give it an axis")
    return slopes.lipschitz_map(1.0)


@register_rule(aten.sort)
def sort(call: Call, x: Any, *args: Any, dim: int | None = None, **kwargs: Any) -> Result:
    """Sorting brings no two vectors farther apart."""
    _first_result(call)
    numbers = [value for value in args if not isinstance(value, bool) and value is not None]
    place = dim if dim is not None else (numbers[-1] if numbers else -1)
    return slopes.along_axis(slopes.lipschitz_map(1.0), call.axis(place))


@register_rule(aten.msort)
def sort_first_axis(call: Call, x: Any) -> Result:
    raise Refusal("it sorts along the batch axis; use torch.sort with dim")


@register_rule(aten.kthvalue, aten.median)
def order_statistic(call: Call, x: Any, *args: Any, dim: int | None = None, **kwargs: Any) -> Result:
    """One of the sorted entries."""
    _first_result(call)
    numbers = [value for value in args if not isinstance(value, bool)]
    is_median = "median" in str(call.node.target)  # type: ignore[union-attr]
    place = dim if dim is not None else (numbers[-1] if len(numbers) > (not is_median) else None)
    if place is None and is_median:
        raise Refusal("it is taken over everything, the batch included; give it an axis")
    return slopes.along_axis(slopes.lipschitz_map(1.0), call.axis(-1 if place is None else place))


@register_rule(aten.topk)
def topk(call: Call, x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Result:
    """A part of the sorted entries."""
    _first_result(call)
    if not sorted:
        raise Refusal("without sorted=True the order of its entries is not defined")
    return slopes.along_axis(slopes.lipschitz_map(1.0), call.axis(dim))


@register_rule(aten.logsumexp)
def logsumexp(call: Call, x: Any, dims: Any, keepdim: bool = False) -> Result:
    """Its gradient is a softmax, whose norm is at most 1."""
    for dim in dims if isinstance(dims, list | tuple) else [dims]:
        call.axis(dim)
    return slopes.lipschitz_map(1.0, ulps=32.0)


@register_rule(aten.linalg_vector_norm)
def vector_norm(
    call: Call, x: Any, order: float = 2.0, dims: Any = None, keepdim: bool = False, **kwargs: Any
) -> Result:
    """The length of a vector changes by no more than the vector does; so does its largest entry."""
    if order not in (2, inf) or dims is None:
        raise Refusal("only l2 and l∞ norms along given axes are supported; use order 2 and dim")
    for dim in dims if isinstance(dims, list | tuple) else [dims]:
        call.axis(dim)
    return slopes.lipschitz_map(1.0, ulps=None)  # squares underflow long before their root is small


@register_rule(aten.linalg_norm, aten.linalg_matrix_norm)
def norm(call: Call, x: Any, order: Any = None, dims: Any = None, *args: Any, **kwargs: Any) -> Result:
    """Frobenius norms of matrices, and l2 norms of vectors."""
    is_matrix = "matrix" in str(call.node.target)  # type: ignore[union-attr]
    dims = [-2, -1] if is_matrix and dims is None else dims
    axes = [dims] if isinstance(dims, int) else dims
    if not (order in (None, "fro") or (order == 2 and axes is not None and len(axes) == 1)):
        raise Refusal("only l2 norms along given axes are supported; use torch.linalg.vector_norm with dim")
    return vector_norm(call, x, 2.0, axes)


@register_rule(F.softsign)
def softsign(call: Call, x: Any) -> Result:
    """x/(|x| + 1), which torch writes as a quotient; the capture puts its parts together."""
    return slopes.SMOOTH


def _first_result(call: Call) -> None:
    if call.index not in (None, 0):
        raise Refusal("the positions of entries are not continuous; use the values only")
