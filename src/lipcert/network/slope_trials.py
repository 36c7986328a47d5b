"""Trials of slopes: secants of the executed nonlinearity, at many scales and across zero."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from lipcert.network.program import Shape
from lipcert.network.rule_trials import TOLERANCE, lengths, random_batch
from lipcert.network.rules.call import Call
from lipcert.network.rules.values import Refusal
from lipcert.network.slopes import Slope
from lipcert.rounding import UNIT_ROUNDOFF

_PAIRS = 24
_FEWEST_PAIRS = 2
# Of pairs of inputs.
_ENTRIES = 1 << 15


@torch.no_grad()
def check_site(call: Call, slope: Slope, shape: Shape, dtype: torch.dtype) -> None:
    """Refuse intervals of slopes that secants of the executed nonlinearity leave."""
    if dtype not in TOLERANCE:
        return
    if slope.elementwise and call.inputs[0].shape == shape:
        _check_elementwise(call, shape)
    a, b = _segments(call, call.inputs[0].shape, slope.elementwise)
    check_secants(call, slope, a, b, dtype)


def check_secants(
    call: Call, slope: Slope, a: Tensor, b: Tensor, dtype: torch.dtype
) -> None:
    """Refuse α ≤ (φ(a) − φ(b))/(a − b) ≤ β per entry, or |φ(a) − φ(b) − c(a − b)| ≤ s|a − b| in norm, if false."""
    first, second = call.run([a]), call.run([b])
    if slope.elementwise:  # which may copy its input first
        a, b = a.expand(first.shape), b.expand(first.shape)
    difference, rise = a.double() - b.double(), first.double() - second.double()
    centre, radius = (float(value) for value in slope.sector())
    size = abs(centre) + radius
    ulps = 16.0 if slope.ulps is None else slope.ulps
    unit = UNIT_ROUNDOFF[dtype] * (4.0 + 2.0 * ulps)
    # `ulps` counts units of the result or of slope times input, whichever is larger;
    # near points differ by little more.
    values = first.double().abs() + second.double().abs()
    noise = unit * (values + size * (_like(a, first) + _like(b, first)))
    if slope.elementwise:
        excess = (rise - centre * difference).abs() - radius * difference.abs() - noise
        slopes = (rise / difference).flatten()
        told = f"slopes in [{centre - radius:.6g}, {centre + radius:.6g}]"
    else:
        moved = rise - centre * difference if centre else rise
        length = lengths(difference)
        noise_norm = lengths(noise) + unit * prod(a.shape[1:]) * (lengths(a) * size)
        excess = lengths(moved) - radius * length - noise_norm
        slopes = lengths(rise) / length
        told = f"a slope of at most {centre + radius:.6g}"
    if not bool((excess <= 0).all()):
        culprit = float(slopes[excess.argmax()])
        raise Refusal(
            f"its rule states {told}, but between two inputs the slope is {culprit:.6g}"
        )


def _like(x: Tensor, result: Tensor) -> Tensor:
    """|x|, in a shape that adds to the result."""
    size = x.double().abs()
    if size.shape == result.shape:
        return size
    return size.reshape(len(size), -1).amax(1).reshape(-1, *(1,) * (result.dim() - 1))


def _segments(call: Call, shape: Shape, elementwise: bool) -> tuple[Tensor, Tensor]:
    """Pairs of inputs of many magnitudes at many distances, and some on both sides of zero.

    Entries of a pair have magnitudes of their own if they are looked at one by one, so
    that few pairs are enough.
    """
    generator = torch.Generator().manual_seed(1)
    pairs = max(_FEWEST_PAIRS, min(_PAIRS, _ENTRIES // max(prod(shape), 1)))
    size = (pairs, *shape)
    apart = size if elementwise else (pairs, *(1,) * len(shape))
    scale = 10.0 ** (10 * torch.rand(apart, generator=generator) - 5)
    step = scale * 10.0 ** (-4 * torch.rand(apart, generator=generator))
    a = scale * torch.randn(size, generator=generator)
    b = a + step * torch.randn(size, generator=generator)
    # Secants across zero, where activations have their kinks.
    b[::4] = -a[::4]
    device = call.recorded.device
    return a.to(device, call.dtype), b.to(device, call.dtype)


def _check_elementwise(call: Call, shape: Shape) -> None:
    """An entry of the result stays the same if other entries of the input change."""
    x = random_batch(2, shape, call, 5)
    generator = torch.Generator().manual_seed(6)
    kept = (torch.rand(x.shape, generator=generator) < 0.5).to(x.device)
    other = torch.where(kept, x, 3 * x.flip(0) + 1)
    first, second = call.run([x]), call.run([other])
    if first.shape != x.shape or bool((first != second)[kept].any()):
        raise Refusal(
            "its rule says that it acts on every entry by itself, but entries of its "
            "result depend on others"
        )
