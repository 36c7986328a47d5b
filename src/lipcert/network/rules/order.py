"""Rules for nonlinearities along axes: softmax, extrema, sorting and norms."""

from __future__ import annotations

from math import inf
from typing import Any

from lipcert.network import slopes
from lipcert.network.rules.call import Call
from lipcert.network.rules.registry import rule_for
from lipcert.network.rules.values import (
    Constant,
    Extremum,
    Input,
    Refusal,
    Result,
    SortedPair,
)
from lipcert.network.softmax_tangent import Softmax
from lipcert.network.tangents import local_slope


def check_values(call: Call) -> None:
    """Refuse the second result of operators that return entries and their positions."""
    if call.index not in (None, 0):
        raise Refusal(
            "the positions of entries are not continuous; use the values only"
        )


@rule_for("softmax _softmax")
def softmax(call: Call, x: Any, dim: int, *args: Any) -> Result:
    axis = call.axis(dim)
    if call.local:
        return local_slope(Softmax(axis + 1, call.input.shape[axis]))
    return slopes.along_axis(slopes.SOFTMAX, call.axis(dim))


@rule_for("maximum minimum max min")
def extremum(call: Call, a: Any, b: Any = None, *args: Any) -> Result:
    """Of two tensors, or along an axis."""
    if not isinstance(b, Input | Constant):
        return extremum_along_axes(call)
    # max(x, c) is c up to c and x from there on; min the other way round: a clamp with
    # one limit.
    if isinstance(a, Constant):
        return slopes.clipping(a.read)
    if isinstance(b, Constant):
        return slopes.clipping(b.read)
    sign = 1
    if call.operator.startswith("min"):
        sign = -1
    return Extremum(a, b, sign)


@rule_for("amax amin")
def extremum_along_axes(call: Call, *args: Any) -> Result:
    """The largest or smallest entries along axes: of entries that no two results share."""
    check_values(call)
    call.axes()
    # |max a − max b| ≤ ‖a − b‖ over each set, and as no two sets share an entry,
    # squares add up to at most ‖a − b‖².
    sign = -1 if "min" in call.operator else 1
    return slopes.lipschitz_map(1.0, monotone=True, extremum=sign)


@rule_for("sort topk kthvalue median")
def sort(call: Call, *args: Any, **kwargs: Any) -> Result:
    """Sorting brings no two vectors farther apart, and some of the sorted entries are no farther apart than all."""
    check_values(call)
    (axis,) = call.axes()
    if call.argument("sorted") is False:
        raise Refusal("without sorted=True the order of its entries is not defined")
    # Where means may pass linearly, (mean ∓ |difference|/2) is tighter than a map of
    # which only its constant is known.
    if (
        (call.local or call.apart)
        and call.operator == "sort"
        and call.input.shape[axis] == 2
    ):
        return SortedPair(axis, bool(call.argument("descending")))
    return slopes.along_axis(slopes.lipschitz_map(1.0, monotone=True), axis)


@rule_for("logsumexp")
def logsumexp(call: Call, *args: Any) -> Result:
    """Its gradient is a softmax, whose norm is at most 1."""
    call.axes()
    return slopes.lipschitz_map(1.0, ulps=32.0, monotone=True)


@rule_for("linalg_vector_norm")
def vector_norm(call: Call, *args: Any, **kwargs: Any) -> Result:
    """The length of a vector changes by no more than the vector does; so does its largest entry."""
    if call.argument("ord") not in (2, inf) or call.argument("dim") is None:
        raise Refusal(
            "only l2 and l∞ norms along given axes are supported; use order 2 and dim"
        )
    call.axes()
    return slopes.lipschitz_map(
        1.0, ulps=None
    )  # squares underflow long before their root is small


@rule_for("linalg_norm linalg_matrix_norm")
def norm(call: Call, *args: Any, **kwargs: Any) -> Result:
    """Frobenius norms of matrices, and l2 norms of vectors."""
    order, dims = call.argument("ord"), call.argument("dim")
    is_length = dims is not None and (
        order in (None, "fro") or (order == 2 and len(dims) == 1)
    )
    if not is_length:
        raise Refusal(
            "only l2 norms along given axes are supported; use "
            "torch.linalg.vector_norm with dim"
        )
    call.axes()
    return slopes.lipschitz_map(1.0, ulps=None)
