"""Trials of rules that users register, beyond those that every rule has to pass (see `rule_trials`).

They look at inputs of many magnitudes, at slopes on a grid or in the steepest direction
that a search finds, and at what a rule says about rounding: that no entry of a matrix
is negative, how many products an entry sums, how many units in the last place a
nonlinearity may be off.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from lipcert.network.kinds import is_torchs
from lipcert.network.linear import Function, LinearOp
from lipcert.network.rules.call import Call
from lipcert.network.rules.registry import find_rule, operator_name
from lipcert.network.rules.values import Input, Refusal
from lipcert.network.slope_trials import check_secants
from lipcert.network.slopes import Slope
from lipcert.rounding import UNIT_ROUNDOFF

_SCALES = (1e-6, 1e-3, 1.0, 10.0, 1e2, 1e3, 1e4, 1e6)
_PROBES = 8
_ROWS = 32
_TOLERANCE = 1e-3
# Of all grids together.
_POINTS = 1 << 21
_FEWEST_POINTS, _MOST_POINTS = 32, 1 << 12
_NEAR = 12.0  # where a grid is even: what activations do, they do there
_ALIKE = 97  # points whose entries are nearly alike
_SEARCHES, _SEARCH_STEPS, _STRIDE, _SEARCH_SLACK = 24, 12, 1e-2, 1e-6


def is_users(call: Call) -> bool:
    """Whether an operation is a module with a rule, an operator of others, or one with a rule of the user's."""
    if call.module is not None or not is_torchs(call.node):
        return True
    # A user's rule may have taken the place of ours for an operator of torch.
    rule = find_rule(operator_name(call.node.target))
    return not str(getattr(rule, "__module__", "")).startswith("lipcert.")


@torch.no_grad()
def check_users_passed(call: Call, passed: Input) -> None:
    """Refuse a rule that passes on an input as it is, if the call changes it at some scale."""
    place = call.inputs.index(passed)
    generator = torch.Generator().manual_seed(13)
    trials = []
    for scale in _SCALES:
        drawn = (
            scale * torch.randn(_ROWS, *given.shape, generator=generator)
            for given in call.inputs
        )
        trials.append([x.to(call.recorded.device, call.dtype) for x in drawn])
    if len(call.inputs) == 1:
        trials.append([_grid(call)])
    for tensors in trials:
        changed = (call.run(tensors) != tensors[place]).nonzero()
        if len(changed):
            entry = float(tensors[place][tuple(changed[0])])
            raise Refusal(
                f"its rule passes on its input as it is, but the call changes {entry:.6g}"
            )


def _inputs(call: Call, rows: int) -> list[Tensor]:
    """Rows of normally distributed entries, at each of the scales."""
    generator = torch.Generator().manual_seed(11)
    batches = []
    for scale in _SCALES:
        x = scale * torch.randn(rows, *call.inputs[0].shape, generator=generator)
        batches.append(x.to(call.recorded.device, call.dtype))
    return batches


@torch.no_grad()
def check_users_linear(call: Call, op: LinearOp) -> None:
    """Refuse a linear rule that is wrong at some scale, or in what it says about rounding."""
    zero = torch.zeros(
        1, *call.inputs[0].shape, device=call.recorded.device, dtype=call.dtype
    )
    # Rules give the linear part: what the call adds, a bias, is taken off.
    constant = call.run([zero])
    first, *others = _inputs(call, rows=2)
    for x in (_grid(call), first, *others):
        factor = x.abs().max() / first.abs().max()
        found, expected = op.apply(x), call.run([x]) - constant
        # Homogeneity finds what only looks linear near zero, as tanh and clamp do.
        scaled = factor * op.apply(x / factor)
        # Row by row, for those of a grid differ in size.
        size = _largest(expected) + _largest(constant) + _largest(found)
        error = torch.maximum((found - expected).abs(), (found - scaled).abs())
        wrong = ~(_largest(error) <= _TOLERANCE * size)
        if bool(wrong.any()):
            largest = float(_largest(x[wrong])[0])
            raise Refusal(
                "its rule gives a linear operation that is false for inputs of "
                f"size {largest:.3g}"
            )
    if isinstance(op, Function):
        _check_rounding_facts(op, x)


def _largest(x: Tensor) -> Tensor:
    """(B,): the largest absolute value of every row; 0 of an empty one."""
    return x.reshape(len(x), -1).abs().amax(1) if x.numel() else x.new_zeros(len(x))


def _check_rounding_facts(op: Function, x: Tensor) -> None:
    if op.nonnegative:
        image = op.apply(x.abs())
        if float(image.min()) < -_TOLERANCE * float(image.abs().max()):
            raise Refusal(
                "its rule says nonnegative=True, but positive inputs give "
                "negative results"
            )
    if op.terms < 0:
        return
    # Aᵀe_k is row k of the matrix: its entries that are not zero are the products that
    # entry k of the result sums.
    outputs = x.new_zeros(_PROBES, *op.out_shape)
    places = torch.linspace(0, outputs[0].numel() - 1, _PROBES).long()
    outputs.reshape(_PROBES, -1)[torch.arange(_PROBES), places] = 1.0
    # of the matrix.
    rows = op.adjoint(outputs).reshape(_PROBES, -1)
    products = int((rows != 0).sum(1).max())
    if products > max(op.terms, 1):
        raise Refusal(
            f"its rule says terms={op.terms}, but an entry of its result sums "
            f"{products} products"
        )
    if op.terms == 0 and bool(((rows != 0) & (rows != 1)).any()):
        raise Refusal(
            "its rule says terms=0, that it only moves entries, but it multiplies them"
        )


@torch.no_grad()
def check_users_slope(call: Call, slope: Slope) -> None:
    """Refuse a nonlinearity that is steeper somewhere than its rule says, or off by more units in the last place."""
    if (
        call.dtype not in UNIT_ROUNDOFF
        or prod(call.inputs[0].shape) == 0
        or 0 in call.out_shape
    ):
        return
    if not slope.elementwise:
        _search_steeper(call, slope)
        return
    # Neighbours of the grid are the ends of secants, so that no interval between the
    # first and the last is left out.
    points = _grid(call)
    check_secants(call, slope, points[:-1], points[1:], call.dtype)
    _check_ulps(call, slope)


def _grid(call: Call) -> Tensor:
    """Points for every entry, in rows of growing size, each entry's between those of the others.

    Half of them are even from −12 to 12, the others of all magnitudes from 1e-4 to 1e6:
    a slope that is false on an interval of some width is found, at however few entries
    the call has.
    """
    shape = call.inputs[0].shape
    count = max(_FEWEST_POINTS, min(_MOST_POINTS, _POINTS // prod(shape)))
    even = torch.linspace(-_NEAR, _NEAR, count // 2, dtype=torch.float64)
    far = torch.logspace(-4, 6, count // 4, dtype=torch.float64)
    points = torch.cat([-far, even, far]).sort().values.reshape(-1, *(1,) * len(shape))
    generator = torch.Generator().manual_seed(31)
    # Entries are looked at all at once. Different factors put the points of each
    # between those of the others.
    own = 0.75 + 0.5 * torch.rand(shape, generator=generator, dtype=torch.float64)
    return (points * own).to(call.recorded.device, call.dtype)


def _search_steeper(call: Call, slope: Slope) -> None:
    """Secants in the direction to which v ← Jᵀ(φ(x + hv) − φ(x)) leads, at points of all scales."""
    generator = torch.Generator().manual_seed(37)
    shape, flat = call.inputs[0].shape, (-1, *(1,) * len(call.inputs[0].shape))
    sizes = torch.cat([torch.logspace(-3, 3, _SEARCHES), torch.ones(_ALIKE)]).reshape(
        flat
    )
    x = sizes * torch.randn(len(sizes), *shape, generator=generator)
    # What depends on many entries at once may show only where they are alike, and drawn
    # entries never are.
    x[_SEARCHES:] = (
        torch.linspace(-_NEAR / 4, _NEAR / 4, _ALIKE).reshape(flat)
        + _STRIDE * x[_SEARCHES:]
    )
    x = x.to(call.recorded.device, call.dtype)
    stride = (_STRIDE * sizes).to(x)
    # A power iteration with JᵀJ, in which a secant takes the place of Jv: v turns to
    # where φ is steepest.
    v = torch.randn(len(sizes), *shape, generator=generator).to(x)
    low, high = (float(end) for end in slope.interval())
    slack = _SEARCH_SLACK * (
        high - low
    )  # of a map that is as steep as its rule says, whose parts are rounded
    slope = replace(slope, alpha=low - slack, beta=high + slack)
    for _ in range(_SEARCH_STEPS):
        v = v / torch.linalg.vector_norm(v.reshape(len(v), -1), dim=1).clamp(
            min=1e-30
        ).reshape(flat)
        check_secants(call, slope, x, x + stride * v, call.dtype)
        rise = call.run([x + stride * v]) - call.run([x])
        with torch.enable_grad():
            start = x.clone().requires_grad_()
            try:
                (v,) = torch.autograd.grad(call.run([start]), start, rise)
            except RuntimeError:
                # It has no derivative, and nothing to follow.
                return


def _check_ulps(call: Call, slope: Slope) -> None:
    """Refuse a nonlinearity that is off by more units in the last place than its rule says."""
    if slope.ulps is None or call.module is None or call.dtype != torch.float32:
        return
    # The same code in float64 stands for the exact function.
    exact = deepcopy(call.module).double()
    steepest = float(slope.lipschitz())
    for x in _inputs(call, rows=8):
        result, expected = call.run([x]).double(), exact(x.double())
        size = expected.abs() + steepest * x.double().abs()
        allowed = 2 * slope.ulps * UNIT_ROUNDOFF[call.dtype] * size + 1e-30
        error = (result - expected).abs()
        if not bool((error <= allowed).all()):
            worst = float(
                (error / (2 * UNIT_ROUNDOFF[call.dtype] * size + 1e-30)).max()
            )
            raise Refusal(
                f"its rule says ulps={slope.ulps:g}, but a result is off by "
                f"{worst:.3g} of them"
            )
