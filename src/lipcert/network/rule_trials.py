"""Rules are tried out: what they say about an operation is compared with what the operation computes.

Every linear operation is compared with the executed operator, and its adjoint with it;
every interval of slopes with secants of the executed nonlinearity (see `slope_trials`).
A rule that is false is refused with a counterexample.
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

Terms = list[tuple[Input, list[LinearOp]]]
_ROWS = 3
TOLERANCE = {torch.float32: 2e-4, torch.float64: 1e-11}


def _random_inputs(call: Call) -> list[Tensor]:
    shapes = [value.shape for value in call.inputs]
    return [random_batch(_ROWS, shape, call, k) for k, shape in enumerate(shapes)]


def random_batch(rows: int, shape: Shape, call: Call, seed: int) -> Tensor:
    """Normal numbers where the call computes and in its type, always the same ones of a seed."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(rows, *shape, generator=generator)
    return drawn.to(call.recorded.device, call.dtype)


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
    if dtype not in TOLERANCE or 0 in call.out_shape:
        return
    inputs = _random_inputs(call)
    # Row 1 is zero: the call returns its constants there, and a linear map has to
    # return zero, if it keeps rows apart.
    for x in inputs:
        x[1] = 0
    images = [
        _checked_chain(chain, x, TOLERANCE[dtype])
        for x, chain in _assigned(call, terms, inputs)
    ]
    found = sum(images[1:], start=images[0])
    computed = call.run(inputs)
    if tuple(computed.shape) != (_ROWS, *call.out_shape):
        raise Refusal(
            f"it maps a batch of {_ROWS} to the shape {tuple(computed.shape)}; keep the rows of a batch apart"
        )
    gathers = any(isinstance(op, Gather) for _, chain in terms for op in chain)
    if gathers and dtype != call.recorded.dtype:
        return  # positions are those of the type in which the program runs, where they have been compared
    expected = computed - computed[1:2]  # the constants that the call adds
    if not bool(torch.isfinite(found).all() & torch.isfinite(expected).all()):
        return  # weights that are not finite are refused elsewhere, by their names
    error = (found - expected).abs()
    allowed = TOLERANCE[dtype] * float(computed.abs().max() + expected.abs().max())
    # Cheap, and enough for most. Where terms cancel, errors are relative to the terms,
    # which `_sizes` finds.
    if float(error.max()) <= allowed:
        return
    allowed += TOLERANCE[dtype] * _sizes(_assigned(call, terms, inputs))
    if not float(error.max()) <= allowed:
        worst = error.argmax()
        entries = float(found.flatten()[worst]), float(expected.flatten()[worst])
        raise _false(
            f"is not what the call computes: an entry of its result is {entries[0]:.6g}, "
            f"that of the call {entries[1]:.6g}"
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


def _checked_chain(chain: list[LinearOp], x: Tensor, tolerance: float) -> Tensor:
    for op in chain:
        x = _checked_operation(op, x, tolerance)
    return x


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
    # The others are linear by construction.
    if isinstance(op, Function) and y.numel() > 0:
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
        problem = f"cannot be differentiated, so it has no adjoint ({error})"
        raise _false(problem) from error
    left, right = _inner_products(y, v), _inner_products(x, back)
    bound = lengths(y) * lengths(v) + lengths(x) * lengths(back)
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


def lengths(x: Tensor) -> Tensor:
    """The l2 norm of every row, in float64; squares neither overflow nor underflow."""
    rows = x.double().reshape(len(x), prod(x.shape[1:]))
    largest = torch.cat([rows.abs(), rows.new_zeros(len(rows), 1)], dim=1).amax(1)
    scale = torch.where(largest > 0, largest, 1.0)
    result: Tensor = torch.linalg.vector_norm(rows / scale[:, None], dim=1) * scale
    return result


def _false(problem: str) -> Refusal:
    return Refusal(f"its rule gives a linear operation that {problem}")
