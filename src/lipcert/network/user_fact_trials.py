"""Trials of what users' rules say about a nonlinearity beyond its slopes: curvature, kinks, monotone, extremum, group.

Bounds over balls and scales of channels rest on these. A fact that is false is refused
with a counterexample.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from lipcert.network.rules.call import Call
from lipcert.network.rules.values import Refusal
from lipcert.network.slopes import Slope
from lipcert.rounding import UNIT_ROUNDOFF

_ENTRIES = 1 << 15
_FEWEST, _MOST = 4, 1 << 12  # rows
_SCALES = (1e-3, 1e-1, 1.0, 10.0, 1e3)
_SLACK = 1e-4


@torch.no_grad()
def check_users_facts(call: Call, slope: Slope) -> None:
    """Refuse facts that what the call computes contradicts."""
    empty = prod(call.inputs[0].shape) == 0 or 0 in call.out_shape
    if call.dtype not in UNIT_ROUNDOFF or empty:
        return
    if slope.elementwise:
        if slope.curvature is not None:
            _check_curvature(call, slope, slope.curvature)
        return
    if slope.monotone:
        _check_monotone(call, slope)
    if slope.extremum:
        _check_extremum(call, slope.extremum)
    if slope.group:
        _check_group(call, slope)


def _rows(call: Call) -> int:
    return max(_FEWEST, min(_MOST, _ENTRIES // prod(call.inputs[0].shape)))


def _typed(call: Call, x: Tensor) -> Tensor:
    return x.to(call.recorded.device, call.dtype)


def _noise(call: Call, slope: Slope, size: Tensor) -> Tensor:
    """By how much results may be off, if they and the slope times inputs are of this size."""
    ulps = 16.0 if slope.ulps is None else slope.ulps
    return UNIT_ROUNDOFF[call.dtype] * (4.0 + 2.0 * ulps) * size + 1e-300


def _check_curvature(call: Call, slope: Slope, curvature: float) -> None:
    """Slopes of two chords side by side differ by at most curvature times half their length, unless a kink is near."""
    inputs = _chords(call)
    values = [call.run([x]).double() for x in inputs]
    low, middle, high = (x.double().expand(values[0].shape) for x in inputs)
    left, right = middle - low, high - middle
    size = values[0].abs() + values[1].abs() + values[2].abs()
    size = size + float(slope.lipschitz()) * (low.abs() + middle.abs() + high.abs())
    # Slopes of chords are means of φ′ over them, and the middles of both chords are
    # (left + right)/2 apart. Both sides are multiplied by left·right, so that nothing
    # is divided by short chords.
    bend = ((values[2] - values[1]) * left - (values[1] - values[0]) * right).abs()
    allowed = curvature * left * right * (left + right) / 2 * (1 + _SLACK)
    excess = bend - allowed - _noise(call, slope, size) * (left + right)
    # Across a kink, φ′ may jump.
    looked_at = (left > 0) & (right > 0)
    for kink in slope.kinks:
        place = torch.as_tensor(kink() if callable(kink) else kink).to(middle)
        margin = 1e-6 * (place.abs() + left + right)
        looked_at &= (high + margin < place) | (place < low - margin)
    excess = torch.where(looked_at, excess, -1.0)
    if bool((excess > 0).any()):
        spans = left * right * (left + right)
        worst = int((excess / spans.clamp(min=1e-300)).argmax())
        ends = (float(low.flatten()[worst]), float(high.flatten()[worst]))
        found = 2 * bend.flatten()[worst] / spans.flatten()[worst]
        raise Refusal(
            f"its rule says curvature={curvature:g}, but its slope changes "
            f"{float(found):.3g} times as much as its "
            f"input between {ends[0]:.6g} and {ends[1]:.6g}, where the "
            "rule names no kink"
        )


def _chords(call: Call) -> list[Tensor]:
    """Low, middle and high, as they are rounded: chords are measured between the numbers that the call sees."""
    generator = torch.Generator().manual_seed(17)
    shape = (_rows(call), *call.inputs[0].shape)

    def uniform() -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    # Half of the points are where activations bend, the others are of all magnitudes
    # from 1e-4 to 1e4.
    moderate = uniform() < 0.5
    scale = torch.where(moderate, 3.0, 10.0 ** (8 * uniform() - 4))
    middle = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
    reach = scale * 10.0 ** (-3 * uniform())
    return [_typed(call, middle + side * reach) for side in (-1, 0, 1)]


def _check_monotone(call: Call, slope: Slope) -> None:
    """No entry of the result falls when entries of the input grow."""
    generator = torch.Generator().manual_seed(19)
    shape = (max(_FEWEST, _rows(call) // len(_SCALES)), *call.inputs[0].shape)
    for scale in _SCALES:
        x = scale * torch.randn(shape, generator=generator)
        # In some rows few entries grow.
        one_each = (shape[0], *(1,) * (len(shape) - 1))
        share = torch.rand(one_each, generator=generator)
        grows = torch.rand(shape, generator=generator) < share
        # x ≤ more, entry by entry.
        more = x + grows * scale * torch.rand(shape, generator=generator)
        x, more = _typed(call, x), _typed(call, more)
        before, after = call.run([x]).double(), call.run([more]).double()
        fall = before - after
        size = torch.maximum(before.abs(), after.abs()).max()
        size = size + float(slope.lipschitz()) * more.double().abs().max()
        if bool((fall > _noise(call, slope, size)).any()):
            worst = int(fall.argmax())
            values = (float(before.flatten()[worst]), float(after.flatten()[worst]))
            raise Refusal(
                "its rule says monotone=True, but an entry of its result falls from "
                f"{values[0]:.6g} to "
                f"{values[1]:.6g} when entries of its input grow"
            )


def _check_extremum(call: Call, sign: int) -> None:
    """Every entry of the result is the largest (smallest) of its own entries of the input."""
    generator = torch.Generator().manual_seed(23)
    size, rows = prod(call.inputs[0].shape), min(_rows(call), 256)
    told = f"its rule says extremum={sign}"
    # No two entries are equal.
    orders = [torch.randperm(size, generator=generator) for _ in range(rows)]
    order = torch.stack(orders)
    # A permutation of −size//2, …: distinct integers, exact in float32, which tell from
    # where a result was taken.
    x = _typed(call, (order - size // 2).reshape(rows, *call.inputs[0].shape))
    results = call.run([x]).double().reshape(rows, -1).cpu()
    # (rows, results): a result of −2 among 6 entries is number 1 in order of size. What
    # is not one of them is refused.
    places = (results + size // 2).clamp(0, size - 1).nan_to_num().long()
    if not torch.equal((places - size // 2).double(), results):
        wrong = results[(places - size // 2).double() != results]
        raise Refusal(
            f"{told}, but an entry of its result, {float(wrong[0]):.6g}, is no "
            "entry of its input"
        )
    # Which entries of the input these are.
    decides = order.argsort(1).gather(1, places)
    _check_owners(order - size // 2, decides, results, sign, told)


def _check_owners(
    inputs: Tensor, decides: Tensor, results: Tensor, sign: int, told: str
) -> None:
    """An entry of the input, (rows, size), decides one result at most, (rows, results), and never exceeds it."""
    # owner[e] is a result that entry e has decided, in any of the rows; −1 if it never
    # has.
    owner = torch.full((inputs.shape[1],), -1)
    results_of = torch.arange(results.shape[1]).expand_as(decides)
    owner[decides.flatten()] = results_of.flatten()
    if bool((owner[decides] != results_of).any()):
        entry = int(decides[owner[decides] != results_of][0])
        raise Refusal(
            f"{told}, but several entries of its result are decided by entry "
            f"{entry} of its input"
        )
    # Whatever decides a result in one row belongs to its set, so that in no other row
    # may it exceed that result.
    owned = (owner >= 0).nonzero().flatten()
    own = inputs.double()[:, owned]
    beyond = sign * (own - results[:, owner[owned]])
    if bool((beyond > 0).any()):
        row, column = (int(i) for i in (beyond > 0).nonzero()[0])
        raise Refusal(
            f"{told}, but an entry of its result is "
            f"{float(results[row, owner[owned[column]]]):.6g} where entry "
            f"{int(owned[column])} of its input, which decides it elsewhere, is "
            f"{float(own[row, column]):.6g}"
        )


def _check_group(call: Call, slope: Slope) -> None:
    """Entries of a group of channels stay the same if others change."""
    shape, group = call.inputs[0].shape, slope.group
    same = shape and call.out_shape and shape[0] == call.out_shape[0]
    if not same or shape[0] % group:
        raise Refusal(
            f"its rule says group={group}, but its input has the shape {shape} and "
            f"its result {call.out_shape}, "
            f"expected as many channels in both, in groups of {group}; leave group= out"
        )
    generator = torch.Generator().manual_seed(29)
    rows = max(_FEWEST, _rows(call) // len(_SCALES))
    for scale in _SCALES:
        x = scale * torch.randn(rows, *shape, generator=generator)
        # One draw per group, for all its channels: 0 1 → 0 0 1 1 for pairs.
        draws = torch.rand(rows, shape[0] // group, generator=generator)
        kept = (draws < 0.5).repeat_interleave(group, 1)
        mask = kept.reshape(rows, shape[0], *(1,) * (len(shape) - 1))
        others = scale * torch.randn(rows, *shape, generator=generator)
        inputs = x, torch.where(mask, x, others)
        first, second = (call.run([_typed(call, t)]).double() for t in inputs)
        still = kept.reshape(rows, shape[0], *(1,) * (first.dim() - 2))
        still = still.to(first.device).expand_as(first)
        change = torch.where(still, (first - second).abs(), 0.0)
        size = first.abs().max() + float(slope.lipschitz()) * scale
        if bool((change > _noise(call, slope, size)).any()):
            channel = int((change > _noise(call, slope, size)).nonzero()[0, 1])
            raise Refusal(
                f"its rule says group={group}, but entries of channel {channel} of "
                "its result change by up to "
                f"{float(change.max()):.3g} when only channels of other groups do"
            )
