"""The inputs with which a captured program is compared with its model."""

from __future__ import annotations

from itertools import permutations
from math import prod

import torch
from torch import Tensor, nn

from lipcert.network.kinds import recorded_shape
from lipcert.network.program import Program, Shape

_MOST_ROWS, _FEWEST_ROWS = 257, 7
_MANY_NUMBERS = 1 << 22
"""What all values of the largest batch may have together, or as many products with parameters."""
_MOST_AXES = 4
# One for each of seven rows, and again. Zeros, large and small numbers find formulas
# that change with the magnitude.
_MAGNITUDES = (1.0, 0.0, 100.0, 1e-3, 1e4, 3.0, 0.0)


def laid_out(program: Program, order: Shape) -> Tensor:
    """Two rows with their axes in this order in memory: 0, 2, 3, 1 is channels_last."""
    # [0, 2, 3, 1] puts axis 1 last; its place among the laid out axes is 3.
    places = [order.index(axis) for axis in range(len(order))]
    return example(program, 2).permute(order).contiguous().permute(places)


def memory_orders(program: Program, model: nn.Module) -> list[Shape]:
    """All orders of the axes of a batch of a small model; of a large one, channels last and the reverse."""
    axes = tuple(range(len(program.input_shape) + 1))
    if len(axes) <= _MOST_AXES and many_rows(program, model) == _MOST_ROWS:
        return list(permutations(axes))[1:]
    return [(0, *axes[2:], 1), axes[::-1]]


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
