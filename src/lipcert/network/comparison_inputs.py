"""The inputs with which a captured program is compared with its model."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations, product
from math import prod

import torch
from torch import Tensor, nn

from lipcert.network.kinds import recorded_shape
from lipcert.network.program import Program, Shape

_MOST_ROWS, _FEWEST_ROWS = 257, 7
_MANY_NUMBERS = 1 << 22
"""What all values of the largest batch may have together, or as many products with parameters."""
_MOST_AXES = 5
# One for each of seven rows, and again. Zeros, large and small numbers find formulas
# that change with the magnitude.
_MAGNITUDES = (1.0, 0.0, 100.0, 1e-3, 1e4, 3.0, 0.0)


def laid_out(program: Program, order: Shape, gaps: bool) -> Tensor:
    """Two rows with their axes in this order in memory: 0, 2, 3, 1 is channels_last.

    If `gaps`, they are a part of something larger, as the first channel of images is.
    """
    rows = example(program, 2)
    # Written out: an axis of length one may have any stride, and `contiguous` leaves
    # what it has.
    strides = [0] * len(order)
    step = 3 if gaps else 1
    for axis in reversed(order):
        strides[axis] = step
        step *= rows.shape[axis]
    placed = torch.empty_strided(
        rows.shape, strides, dtype=rows.dtype, device=rows.device
    )
    return placed.copy_(rows)


def share_memory(x: Tensor) -> bool:
    """Whether entries of a tensor surely lie in the same place, as those of windows that overlap do."""
    lengths = zip(x.shape, x.stride(), strict=True)
    places = 1 + sum((length - 1) * abs(stride) for length, stride in lengths)
    return x.numel() > places


def repeated(program: Program) -> Tensor:
    """The first of two rows, twice, in one place."""
    return example(program, 2)[:1].expand(2, *program.input_shape)


def of_inference_mode(program: Program) -> Tensor:
    with torch.inference_mode():
        return example(program, 2)


def unwritable(program: Program) -> dict[str, Callable[[], Tensor]]:
    """Inputs in whose place nothing may be written while gradients are recorded: what a model does then is its affair.

    In the place of rows that are `repeated`, or `of_inference_mode`, nothing may ever be
    written.
    """

    def leaf() -> Tensor:
        return example(program, 2).requires_grad_()

    def one_of_several_views() -> Tensor:
        return torch.stack([example(program, 2)] * 2).requires_grad_().unbind()[0]

    return {
        "that requires gradients": leaf,
        "that is one of several views": one_of_several_views,
    }


def memory_orders(program: Program, model: nn.Module) -> list[tuple[Shape, bool]]:
    """All orders of the axes of a batch of a small model; of a large one, channels last and the reverse.

    With each, whether there are gaps between the entries.
    """
    axes = tuple(range(len(program.input_shape) + 1))
    if len(axes) <= _MOST_AXES and many_rows(program, model) == _MOST_ROWS:
        return list(product(permutations(axes), (False, True)))[1:]
    channels_last = (0, *axes[2:], 1)
    return [(channels_last, False), (channels_last, True), (axes[::-1], False)]


def many_rows(program: Program, model: nn.Module) -> int:
    """As many rows as a batch may have that runs in no time and takes little memory, with gradients recorded."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    values = 0  # of one row, at all nodes
    for node in program.graph.nodes:
        values += prod(size for size in recorded_shape(node) if isinstance(size, int))
    size = max(parameters, values, 1)
    return min(max(_MANY_NUMBERS // size, _FEWEST_ROWS), _MOST_ROWS)


def example(program: Program, batch: int, strided: bool = False) -> Tensor:
    """Rows that look like images, like noise of several magnitudes, and zero; if `strided`, in an odd layout."""
    generator = torch.Generator().manual_seed(batch)
    x = torch.randn(
        batch, *program.input_shape, generator=generator, dtype=torch.float64
    )
    for row in range(batch):
        x[row] *= _MAGNITUDES[row % len(_MAGNITUDES)]
    # Row 1 is like an image, with entries between 0 and 1.
    x[1:2] = torch.rand(program.input_shape, generator=generator, dtype=torch.float64)
    x = x.to(program.device, program.dtype)
    if strided:  # a view in which the rows of the batch lie side by side
        return x.movedim(0, -1).repeat_interleave(2, -1)[..., 1::2].movedim(-1, 0)
    return x
