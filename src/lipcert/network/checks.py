"""Rules are tried out: what they say about an operation is compared with what the operation computes.

Every linear operation is compared with the executed operator, and its adjoint with it; every interval of slopes with
secants of the executed nonlinearity at many scales. A rule that is false is refused with a counterexample.
"""

from __future__ import annotations

from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from lipcert.network.linear import Function, Gather, LinearOp
from lipcert.network.normal_form import Node
from lipcert.network.program import Shape
from lipcert.network.rules.call import Call, Input, Refusal, Sum
from lipcert.network.slopes import Slope
from lipcert.rounding import UNIT_ROUNDOFF

_ROWS = 3
_PAIRS = 24
_FEWEST_PAIRS = 2
_ENTRIES = 1 << 15  # of pairs of inputs
_TOLERANCE = {torch.float32: 2e-4, torch.float64: 1e-11}


def _random(rows: int, shape: Shape, like: Call, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, *shape, generator=generator).to(like.device, like.dtype)


@torch.no_grad()
def check_node(call: Call, node: Node, result: Any, dtype: torch.dtype) -> None:
    """Refuse linear operations that do not compute what the call computes, or whose adjoint is not theirs."""
    if dtype not in _TOLERANCE or 0 in call.out_shape:
        return
    chains = _chains(call, result)
    inputs = [_random(_ROWS, value.shape, call, seed) for seed, value in enumerate(call.inputs)]
    for x in inputs:
        x[1] = 0
    images = []
    for place, chain in chains:
        x = inputs[place]
        for op in chain:
            x = _checked_operation(op, x, dtype)
        images.append(x)
    found = sum(images[1:], start=images[0])
    computed = call.run(inputs)
    if tuple(computed.shape) != (_ROWS, *call.out_shape):
        raise _false(f"maps a batch of {_ROWS} to the shape {tuple(found.shape)}, expected {(_ROWS, *call.out_shape)}")
    if any(isinstance(op, Gather) for _, chain in chains for op in chain) and dtype != call.executed:
        return  # positions are those of the type in which the program runs, where they have been compared
    expected = computed - computed[1:2]  # the constants that the call adds
    if not bool(torch.isfinite(found).all() & torch.isfinite(expected).all()):
        return  # weights that are not finite are refused elsewhere, by their names
    error = (found - expected).abs()
    scale = float(computed.abs().max() + expected.abs().max())
    worst = float(error.max()) if error.numel() else 0.0
    allowed = _TOLERANCE[dtype] * scale
    if not worst <= allowed and not worst <= allowed + _TOLERANCE[dtype] * _sizes(chains, inputs):
        raise _false(
            f"is not what the call computes: an entry of its result is {float(found.flatten()[error.argmax()]):.6g}, "
            f"that of the call {float(expected.flatten()[error.argmax()]):.6g}"
        )


@torch.no_grad()
def check_passed(call: Call, passed: Input) -> None:
    """Refuse a rule that passes on an input as it is, if the call returns anything else."""
    tensors = {value: _random(_ROWS, value.shape, call, seed) for seed, value in enumerate(call.inputs)}
    if passed not in tensors or not torch.equal(call.run([tensors[v] for v in call.inputs]), tensors[passed]):
        raise Refusal("its rule passes on its input as it is, but the call changes it")


def _chains(call: Call, result: Any) -> list[tuple[int, list[LinearOp]]]:
    """For every term of a sum, which of the inputs it takes and the operations on it."""
    terms = result.terms if isinstance(result, Sum) else [(call.inputs[0], result)]
    places: list[Input] = call.inputs
    chains, used = [], set()
    for value, chain in terms:
        place = next(k for k, other in enumerate(places) if other == value and k not in used)
        used.add(place)
        chains.append((place, [chain] if isinstance(chain, LinearOp) else list(chain)))
    return chains


def _sizes(chains: list[tuple[int, list[LinearOp]]], inputs: list[Tensor]) -> float:
    """How large terms may be before they cancel."""
    total = 0.0
    for place, chain in chains:
        x = inputs[place].abs()
        for op in chain:
            x = op.magnitude(x) if op.covered else op.apply(x).abs()
        total += float(x.abs().max()) if x.numel() else 0.0
    return total


def _checked_operation(op: LinearOp, x: Tensor, dtype: torch.dtype) -> Tensor:
    """A x, if A is linear, keeps rows apart and ⟨Ax, v⟩ = ⟨x, Aᵀv⟩."""
    y = op.apply(x)
    if tuple(y.shape) != (len(x), *op.out_shape):
        raise _false(f"maps a batch of {len(x)} to the shape {tuple(y.shape)}, expected {(len(x), *op.out_shape)}")
    tolerance = _TOLERANCE[dtype]
    if not bool(torch.isfinite(y).all()):
        return y
    if bool(y[1].count_nonzero() > 0):
        raise _false("does not map zero to zero, or mixes the rows of a batch")
    if isinstance(op, Function):  # the others are linear by construction
        mixed = torch.stack([x[2], 2 * x[0], x[0] + x[2]])
        expected = torch.stack([y[2], 2 * y[0], y[0] + y[2]])
        size = float(expected.abs().max()) if y.numel() else 0.0
        if not bool(((op.apply(mixed) - expected).abs() <= 100 * tolerance * size).all()):
            raise _false("is not linear, or mixes the rows of a batch")
    generator = torch.Generator().manual_seed(7)
    v = torch.randn(len(x), *op.out_shape, generator=generator).to(y)
    try:
        back = op.adjoint(v)
    except RuntimeError as error:
        raise _false(f"cannot be differentiated, so it has no adjoint ({error})") from error
    left, right = (y.double() * v).reshape(len(x), -1).sum(1), (x.double() * back).reshape(len(x), -1).sum(1)
    bound = _lengths(y) * _lengths(v)
    bound = bound + _lengths(x) * _lengths(back)
    if not bool(((left - right).abs() <= tolerance * bound + 1e-300).all()):
        raise _false(
            f"has an adjoint that is not its transpose: ⟨Ax, v⟩ = {float(left[0]):.6g}, but ⟨x, Aᵀv⟩ = "
            f"{float(right[0]):.6g}"
        )
    return y


def _lengths(x: Tensor) -> Tensor:
    """The l2 norm of every row, in float64; squares neither overflow nor underflow."""
    rows = x.double().reshape(len(x), -1)
    largest = torch.linalg.vector_norm(rows, ord=inf, dim=1) if rows.shape[1] else rows.new_zeros(len(rows))
    scale = torch.where(largest > 0, largest, torch.ones_like(largest))
    lengths: Tensor = torch.linalg.vector_norm(rows / scale[:, None], dim=1) * scale
    return lengths


def _false(problem: str) -> Refusal:
    return Refusal(f"its rule gives a linear operation that {problem}")


@torch.no_grad()
def check_site(call: Call, slope: Slope, shape: Shape, dtype: torch.dtype) -> None:
    """Refuse intervals of slopes that secants of the executed nonlinearity leave."""
    if dtype not in _TOLERANCE:
        return
    _check_secants(call, slope, shape, dtype)
    if slope.elementwise:
        _check_elementwise(call, shape)


def _check_secants(call: Call, slope: Slope, shape: Shape, dtype: torch.dtype) -> None:
    """α ≤ (φ(a) − φ(b))/(a − b) ≤ β per entry, or |φ(a) − φ(b) − c(a − b)| ≤ s|a − b| in norm; many a and b."""
    a, b = _segments(call, call.inputs[0].shape, slope.elementwise)
    first, second = call.run([a]), call.run([b])
    if slope.elementwise:  # which may copy its input first
        a, b = a.expand(first.shape), b.expand(first.shape)
    difference, rise = a.double() - b.double(), first.double() - second.double()
    centre, radius = (float(value) for value in slope.sector())
    size = abs(centre) + radius
    unit = UNIT_ROUNDOFF[dtype] * (4.0 + 2.0 * (slope.ulps if slope.ulps is not None else 16.0))
    noise = unit * (first.double().abs() + second.double().abs() + size * (_like(a, first) + _like(b, first)))
    if slope.elementwise:
        excess = (rise - centre * difference).abs() - radius * difference.abs() - noise
        culprit = float((rise / difference).flatten()[excess.argmax()])
        told = f"slopes in [{centre - radius:.6g}, {centre + radius:.6g}]"
    else:
        moved = rise - centre * difference if centre else rise
        length = _lengths(difference)
        noise_norm = _lengths(noise) + unit * prod(shape) * (_lengths(a) * size)
        excess = _lengths(moved) - radius * length - noise_norm
        culprit = float((_lengths(rise) / length)[excess.argmax()])
        told = f"a slope of at most {centre + radius:.6g}"
    if not bool((excess <= 0).all()):
        raise Refusal(f"its rule states {told}, but between two inputs the slope is {culprit:.6g}")


def _like(x: Tensor, result: Tensor) -> Tensor:
    """|x|, in a shape that adds to the result."""
    size = x.double().abs()
    return (
        size
        if size.shape == result.shape
        else size.reshape(len(size), -1).amax(1).reshape(-1, *(1,) * (result.dim() - 1))
    )


def _segments(call: Call, shape: Shape, elementwise: bool) -> tuple[Tensor, Tensor]:
    """Pairs of inputs of many magnitudes at many distances, and some on both sides of zero.

    Entries of a pair have magnitudes of their own if they are looked at one by one, so that few pairs are enough.
    """
    generator = torch.Generator().manual_seed(1)
    pairs = max(_FEWEST_PAIRS, min(_PAIRS, _ENTRIES // max(prod(shape), 1)))
    size = (pairs, *shape)
    apart = size if elementwise else (pairs, *(1,) * len(shape))
    scale = 10.0 ** (6 * torch.rand(apart, generator=generator) - 3)
    step = scale * 10.0 ** (-4 * torch.rand(apart, generator=generator))
    a = scale * torch.randn(size, generator=generator)
    b = a + step * torch.randn(size, generator=generator)
    b[::4] = -a[::4]
    return a.to(call.device, call.dtype), b.to(call.device, call.dtype)


def _check_elementwise(call: Call, shape: Shape) -> None:
    """An entry of the result stays the same if other entries of the input change."""
    if call.inputs[0].shape != shape:
        return
    x = _random(2, shape, call, 5)
    generator = torch.Generator().manual_seed(6)
    kept = (torch.rand(x.shape, generator=generator) < 0.5).to(x.device)
    other = torch.where(kept, x, 3 * x.flip(0) + 1)
    first, second = call.run([x]), call.run([other])
    if first.shape != x.shape or bool((first != second)[kept].any()):
        raise Refusal("its rule says that it acts on every entry by itself, but entries of its result depend on others")
