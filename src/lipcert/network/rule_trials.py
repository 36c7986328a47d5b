"""Rules are tried out: what they say about an operation is compared with what the operation computes.

Every linear operation is compared with the executed operator, and its adjoint with it;
every interval of slopes with secants of the executed nonlinearity at many scales. A
rule that is false is refused with a counterexample.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from lipcert.network.linear import Function, LinearOp
from lipcert.network.program import Shape
from lipcert.network.rules.call import Call
from lipcert.network.rules.pooling import Gather
from lipcert.network.rules.values import Input, Refusal
from lipcert.network.slopes import Slope
from lipcert.rounding import UNIT_ROUNDOFF

Terms = list[tuple[Input, list[LinearOp]]]
_ROWS = 3
_PAIRS = 24
_FEWEST_PAIRS = 2
_ENTRIES = 1 << 15  # of pairs of inputs
_TOLERANCE = {torch.float32: 2e-4, torch.float64: 1e-11}


def _random_inputs(call: Call) -> list[Tensor]:
    return [
        _random(_ROWS, value.shape, call, seed)
        for seed, value in enumerate(call.inputs)
    ]


def _random(rows: int, shape: Shape, call: Call, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, *shape, generator=generator).to(
        call.recorded.device, call.dtype
    )


@torch.no_grad()
def check_passed(call: Call, passed: Input) -> None:
    """Refuse a rule that passes on an input as it is, if the call returns anything else."""
    tensors = _random_inputs(call)
    expected = dict(zip(call.inputs, tensors, strict=True)).get(passed)
    if expected is None or not torch.equal(call.run(tensors), expected):
        raise Refusal("its rule passes on its input as it is, but the call changes it")


@torch.no_grad()
def check_linear(call: Call, terms: Terms, dtype: torch.dtype) -> None:
    """Refuse linear operations that do not compute what the call computes, or whose adjoint is not theirs."""
    if dtype not in _TOLERANCE or 0 in call.out_shape:
        return
    inputs = _random_inputs(call)
    # Row 1 is zero: the call returns its constants there, and a linear map has to
    # return zero, if it keeps rows apart.
    for x in inputs:
        x[1] = 0
    images = []
    moved_by_type = False
    for x, chain in _assigned(call, terms, inputs):
        image = x
        for op in chain:
            image = _checked_operation(op, image, _TOLERANCE[dtype])
            moved_by_type |= isinstance(op, Gather) and dtype != call.recorded.dtype
        images.append(image)
    found = sum(images[1:], start=images[0])
    computed = call.run(inputs)
    if tuple(computed.shape) != (_ROWS, *call.out_shape):
        raise Refusal(
            f"it maps a batch of {_ROWS} to the shape {tuple(computed.shape)}; keep the rows of a batch apart"
        )
    if moved_by_type:
        return  # positions are those of the type in which the program runs, where they have been compared
    expected = computed - computed[1:2]  # the constants that the call adds
    if not bool(torch.isfinite(found).all() & torch.isfinite(expected).all()):
        return  # weights that are not finite are refused elsewhere, by their names
    error = (found - expected).abs()
    allowed = _TOLERANCE[dtype] * float(computed.abs().max() + expected.abs().max())
    # Cheap, and enough for most. Where terms cancel, errors are relative to the terms,
    # which `_sizes` finds.
    if float(error.max()) <= allowed:
        return
    if not float(error.max()) <= allowed + _TOLERANCE[dtype] * _sizes(
        _assigned(call, terms, inputs)
    ):
        worst = error.argmax()
        raise _false(
            f"is not what the call computes: an entry of its result is {float(found.flatten()[worst]):.6g}, "
            f"that of the call {float(expected.flatten()[worst]):.6g}"
        )


def _assigned(
    call: Call, terms: Terms, inputs: list[Tensor]
) -> list[tuple[Tensor, list[LinearOp]]]:
    """The tensor that every term of a sum takes; of equal inputs, each is taken once."""
    remaining = list(zip(call.inputs, inputs, strict=True))
    assigned = []
    for value, chain in terms:
        place = [other for other, _ in remaining].index(value)
        _, x = remaining.pop(place)
        assigned.append((x, chain))
    return assigned


def _sizes(assigned: list[tuple[Tensor, list[LinearOp]]]) -> float:
    """How large terms may be before they cancel."""
    total = 0.0
    for x, chain in assigned:
        size = x.abs()
        for op in chain:
            size = op.magnitude(size) if op.covered else op.apply(size)
            size = size.abs()
        total += float(size.max())
    return total


def _checked_operation(op: LinearOp, x: Tensor, tolerance: float) -> Tensor:
    """A x, if A is linear, keeps rows apart and ⟨Ax, v⟩ = ⟨x, Aᵀv⟩."""
    y = op.apply(x)
    if tuple(y.shape) != (len(x), *op.out_shape):
        raise _false(
            f"maps a batch of {len(x)} to the shape {tuple(y.shape)}, expected {(len(x), *op.out_shape)}"
        )
    if not bool(torch.isfinite(y).all()):
        return y
    if bool(y[1].count_nonzero() > 0):
        raise _false("does not map zero to zero, or mixes the rows of a batch")
    if (
        isinstance(op, Function) and y.numel() > 0
    ):  # the others are linear by construction
        # Rows in other places: A(x₂), A(2x₀) and A(x₀ + x₂) have to follow from A(x₀)
        # and A(x₂).
        mixed = torch.stack([x[2], 2 * x[0], x[0] + x[2]])
        expected = torch.stack([y[2], 2 * y[0], y[0] + y[2]])
        allowed = 100 * tolerance * expected.abs().max()
        if not bool(((op.apply(mixed) - expected).abs() <= allowed).all()):
            raise _false("is not linear, or mixes the rows of a batch")
    generator = torch.Generator().manual_seed(7)
    v = torch.randn(len(x), *op.out_shape, generator=generator).to(y)
    try:
        back = op.adjoint(v)
    except RuntimeError as error:
        raise _false(
            f"cannot be differentiated, so it has no adjoint ({error})"
        ) from error
    left, right = _inner_products(y, v), _inner_products(x, back)
    bound = _lengths(y) * _lengths(v) + _lengths(x) * _lengths(back)
    wrong = ~((left - right).abs() <= tolerance * bound + 1e-300)
    if bool(wrong.any()):
        _check_range(y, back)
        row = int(wrong.nonzero()[0])
        raise _false(
            f"has an adjoint that is not its transpose: ⟨Ax, v⟩ = {float(left[row]):.6g}, but ⟨x, Aᵀv⟩ = "
            f"{float(right[row]):.6g}"
        )
    return y


def _check_range(*images: Tensor) -> None:
    """Refuse numbers that over- or underflow in their type, which say nothing about a rule."""
    for image in images:
        problem = ""
        if not bool(torch.isfinite(image).all()):
            problem = "large"
        elif 0 < float(image.abs().max()) < 2**20 * torch.finfo(image.dtype).tiny:
            problem = "small"
        if problem:
            raise Refusal(
                f"what it computes is too {problem} for {image.dtype}; scale its weights"
            )


def _inner_products(x: Tensor, y: Tensor) -> Tensor:
    return (x.double() * y).reshape(len(x), -1).sum(1)


def _lengths(x: Tensor) -> Tensor:
    """The l2 norm of every row, in float64; squares neither overflow nor underflow."""
    rows = x.double().reshape(len(x), prod(x.shape[1:]))
    largest = torch.cat([rows.abs(), rows.new_zeros(len(rows), 1)], dim=1).amax(1)
    scale = torch.where(largest > 0, largest, 1.0)
    lengths: Tensor = torch.linalg.vector_norm(rows / scale[:, None], dim=1) * scale
    return lengths


def _false(problem: str) -> Refusal:
    return Refusal(f"its rule gives a linear operation that {problem}")


@torch.no_grad()
def check_site(call: Call, slope: Slope, shape: Shape, dtype: torch.dtype) -> None:
    """Refuse intervals of slopes that secants of the executed nonlinearity leave."""
    if dtype not in _TOLERANCE:
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
    noise = unit * (
        first.double().abs()
        + second.double().abs()
        + size * (_like(a, first) + _like(b, first))
    )
    if slope.elementwise:
        excess = (rise - centre * difference).abs() - radius * difference.abs() - noise
        slopes = (rise / difference).flatten()
        told = f"slopes in [{centre - radius:.6g}, {centre + radius:.6g}]"
    else:
        moved = rise - centre * difference if centre else rise
        length = _lengths(difference)
        noise_norm = _lengths(noise) + unit * prod(a.shape[1:]) * (_lengths(a) * size)
        excess = _lengths(moved) - radius * length - noise_norm
        slopes = _lengths(rise) / length
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
    return a.to(call.recorded.device, call.dtype), b.to(
        call.recorded.device, call.dtype
    )


def _check_elementwise(call: Call, shape: Shape) -> None:
    """An entry of the result stays the same if other entries of the input change."""
    x = _random(2, shape, call, 5)
    generator = torch.Generator().manual_seed(6)
    kept = (torch.rand(x.shape, generator=generator) < 0.5).to(x.device)
    other = torch.where(kept, x, 3 * x.flip(0) + 1)
    first, second = call.run([x]), call.run([other])
    if first.shape != x.shape or bool((first != second)[kept].any()):
        raise Refusal(
            "its rule says that it acts on every entry by itself, but entries of its result depend on others"
        )
