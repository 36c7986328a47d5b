"""Convolutions in float64 on a processor: products of patches with the kernel as a matrix.

oneDNN has no float64 convolutions, and torch's own lay out the patches of a whole image
anew for every call. Here a tile of patches that fits into the cache is copied into one
buffer, multiplied, and the buffer is used again: two to three times as fast on large
images.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from lipcert.network.program import Shape
from lipcert.network.tiles import multiplied
from lipcert.threads import torch_restored

_Key = tuple[int, Shape, Shape]
_Sides = tuple[int, int, int, int]
"""Zeros on the left, on the right, above and below; entries are cut off where negative, as in F.pad."""


_matrices: ContextVar[dict[_Key, tuple[Tensor, Tensor]] | None] = ContextVar(
    "matrices of kernels", default=None
)


@contextmanager
def constant_kernels() -> Iterator[None]:
    """Within, kernels do not change: each is laid out as a matrix once, not for every product.

    From the first product on, torch itself has one thread.
    """
    known: dict[_Key, tuple[Tensor, Tensor]] = {}
    token = _matrices.set(known)
    try:
        with torch_restored():
            yield
    finally:
        _matrices.reset(token)
        # Whoever copied the context must not find them later.
        known.clear()


def applies(x: Tensor, groups: int, axes: int) -> bool:
    """Whether the product of patches is the faster way, and nothing has to be differentiated."""
    plain = groups == 1 and axes == 2
    recorded = torch.is_grad_enabled() and x.requires_grad
    return (
        plain and x.dtype == torch.float64 and x.device.type == "cpu" and not recorded
    )


def convolve(
    x: Tensor, weight: Tensor, stride: Shape, padding: Shape, dilation: Shape
) -> Tensor:
    """`conv2d` without groups: (rows, channels, height, width) → (rows, filters, …), channels last in memory."""
    size = tuple(weight.shape[2:])
    vertical, horizontal = padding
    sides = (horizontal, horizontal, vertical, vertical)
    return _convolve(x, _matrix(weight), size, stride, sides, dilation)


def transpose(
    y: Tensor, weight: Tensor, stride: Shape, padding: Shape, shape: Shape
) -> Tensor:
    """The transpose of `convolve` without dilation, for rows of a convolution's result.

    (rows, filters, …) → (rows, channels, *shape). An entry x of the larger image meets
    the taps t ≡ x + p modulo the stride: entries of one residue are a convolution of
    stride 1 with every s-th tap, in reverse order. With s = 2 and four taps, entries with
    even x + p see the taps 2, 0, the others 3, 1.
    """
    result = None
    for residues in product(*map(range, stride)):
        size = []
        for taps, s, r in zip(weight.shape[2:], stride, residues, strict=True):
            size.append(len(range(r, taps, s)))
        if 0 in size:
            continue  # no tap meets these entries
        rows, columns, sides = _met(y, tuple(size), stride, padding, shape, residues)
        if not rows or not columns:
            continue
        matrix = _matrix(weight, stride, residues)
        image = _convolve(y, matrix, tuple(size), (1, 1), sides, (1, 1))
        if (len(rows), len(columns)) == shape:
            return image  # all entries, of the only residue
        if result is None:
            result = y.new_zeros(len(y), *shape, weight.shape[1]).permute(0, 3, 1, 2)
        result[:, :, _slice(rows), _slice(columns)] = image
    if result is None:
        return y.new_zeros(len(y), weight.shape[1], *shape)
    return result


def _met(
    y: Tensor, taps: Shape, stride: Shape, padding: Shape, shape: Shape, residues: Shape
) -> tuple[range, range, _Sides]:
    """Rows and columns of the larger image that y meets at these residues, and the zeros that y needs around it."""
    around, places = [], []
    for axis in range(2):
        first = residues[axis] - padding[axis]
        zeros, some = _meeting(
            y.shape[2 + axis], taps[axis], shape[axis], stride[axis], first
        )
        around.append(zeros)
        places.append(some)
    (above, below), (left, right) = around
    rows, columns = places
    return rows, columns, (left, right, above, below)


def _meeting(
    length: int, taps: int, size: int, step: int, first: int
) -> tuple[tuple[int, int], range]:
    """Zeros around y, and the places x = first + step·a of the larger image that meet some of its entries.

    The entry at x sums y(a − i) over the taps i. With y of length 3 and two taps, a is 0
    to 3; if first is −1 and the step 2, x is −1, 1, 3, 5, of which 1 and 3 are in an
    image of 4: y is needed from 0 to 2, with no zero on either side.
    """
    start = max(0, -(first // step))
    stop = min(length + taps - 1, -((first - size) // step))
    # What is needed of y goes from start − (taps − 1) to stop − 1.
    around = (taps - 1 - start, stop - length)
    return around, range(first + step * start, first + step * stop, step)


def _slice(places: range) -> slice:
    return slice(places.start, places.stop, places.step)


def _matrix(weight: Tensor, stride: Shape = (), residues: Shape = ()) -> Tensor:
    """(taps·channels, filters): the kernel in the order of the entries of a patch.

    With residues, that of the transpose: every s-th tap in reverse order, (taps·filters,
    channels).
    """
    known = _matrices.get()
    key = (id(weight), stride, residues)
    if known is not None and key in known:
        return known[key][1]
    kernel = weight
    if residues:
        taps = weight[:, :, residues[0] :: stride[0], residues[1] :: stride[1]]
        kernel = taps.flip(2, 3).transpose(0, 1)
    # (filters, channels, i, j) → (i·j·channels, filters).
    matrix = kernel.permute(2, 3, 1, 0).reshape(-1, kernel.shape[0]).contiguous()
    if known is not None:
        # With the weight itself, so that no other tensor gets its id.
        known[key] = weight, matrix
    return matrix


def _convolve(
    x: Tensor,
    matrix: Tensor,
    size: Shape,
    stride: Shape,
    sides: _Sides,
    dilation: Shape,
) -> Tensor:
    """The convolution with a kernel of this size that was laid out as a matrix."""
    channels = x.shape[1]
    # (rows, height, width, channels): F.pad begins with the last axis, which gets
    # nothing.
    padded = F.pad(x.permute(0, 2, 3, 1), (0, 0, *sides)).contiguous()
    out = []
    for axis in range(2):
        reach = dilation[axis] * (size[axis] - 1) + 1
        out.append((padded.shape[1 + axis] - reach) // stride[axis] + 1)
    # Entry [b, y, x, i, j, c] of the patches is padded[b, y·stride + i·dilation,
    # x·stride + j·dilation, c].
    step = padded.stride()
    strides = [
        step[0],
        step[1] * stride[0],
        step[2] * stride[1],
        step[1] * dilation[0],
        step[2] * dilation[1],
        step[3],
    ]
    patches = padded.as_strided((len(x), *out, *size, channels), strides)
    return multiplied(patches, matrix).permute(0, 3, 1, 2)
