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

_TILE = 1 << 18
"""Entries of a tile of patches."""
_Key = tuple[int, Shape, Shape]
_matrices: ContextVar[dict[_Key, tuple[Tensor, Tensor]] | None] = ContextVar(
    "matrices of kernels", default=None
)


@contextmanager
def constant_kernels() -> Iterator[None]:
    """Within, kernels do not change: each is laid out as a matrix once, not for every product."""
    known: dict[_Key, tuple[Tensor, Tensor]] = {}
    token = _matrices.set(known)
    try:
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
    return _convolve(x, _matrix(weight), size, stride, padding, dilation)


def transpose(
    y: Tensor, weight: Tensor, stride: Shape, padding: Shape, shape: Shape
) -> Tensor:
    """The transpose of `convolve` without dilation, for rows of a convolution's result.

    (rows, filters, …) → (rows, channels, *shape). An entry x of the larger image meets
    the taps t ≡ x + p modulo the stride: entries of one residue are a convolution of
    stride 1 with every s-th tap, in reverse order. With s = 2 and four taps, entries with
    even x + p see the taps 2, 0, the others 3, 1.
    """
    result = y.new_zeros(len(y), *shape, weight.shape[1])
    for residues in product(*map(range, stride)):
        size = []
        for taps, s, r in zip(weight.shape[2:], stride, residues, strict=True):
            size.append(len(range(r, taps, s)))
        if 0 in size:
            continue  # no tap meets these entries
        # The entry x = s·a + r − p sums y(a − i) over the taps r + s·i.
        reach = (size[0] - 1, size[1] - 1)
        matrix = _matrix(weight, stride, residues)
        image = _convolve(y, matrix, tuple(size), (1, 1), reach, (1, 1))
        image = image.permute(0, 2, 3, 1)
        here, there = [], []
        for axis in range(2):
            some = _inside(
                image.shape[1 + axis],
                shape[axis],
                stride[axis],
                residues[axis] - padding[axis],
            )
            here.append(some[0])
            there.append(some[1])
        result[:, there[0], there[1]] = image[:, here[0], here[1]]
    return result.permute(0, 3, 1, 2)


def _inside(length: int, size: int, step: int, first: int) -> tuple[slice, slice]:
    """The a < length with 0 ≤ first + step·a < size, and these places.

    For 4 entries at −1, 1, 3, 5 of an image of 4: the second and the third, at 1 and 3.
    """
    skipped = max(0, -(first // step))
    start = first + step * skipped
    count = max(0, min(length - skipped, -((start - size) // step)))
    return slice(skipped, skipped + count), slice(start, start + step * count, step)


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
    padding: Shape,
    dilation: Shape,
) -> Tensor:
    """The convolution with a kernel of this size that was laid out as a matrix."""
    channels = x.shape[1]
    vertical, horizontal = padding
    # (rows, height, width, channels): F.pad begins with the last axis, which gets
    # nothing.
    padded = F.pad(
        x.permute(0, 2, 3, 1), (0, 0, horizontal, horizontal, vertical, vertical)
    ).contiguous()
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
    return _multiplied(patches, matrix).permute(0, 3, 1, 2)


def _multiplied(patches: Tensor, matrix: Tensor) -> Tensor:
    """(rows, height, width, filters): every patch times the matrix, tile by tile."""
    rows, height, width = patches.shape[:3]
    length, filters = matrix.shape
    result = patches.new_empty(rows, height, width, filters)
    # A tile is some lines of one image or, if images are small, several whole images.
    lines = max(1, _TILE // (width * length))  # of an image, in a tile
    together = max(1, lines // height)  # images
    lines = min(lines, height)
    buffer = patches.new_empty(min(together, rows), lines, *patches.shape[2:])
    for first in range(0, rows, together):
        count = min(together, rows - first)
        for top in range(0, height, lines):
            piece = patches[first : first + count, top : top + lines]
            tile = buffer[: piece.shape[0], : piece.shape[1]]
            # The patches are a view in which entries appear up to k² times; only the
            # tile holds copies.
            tile.copy_(piece)
            # Lines of one image, or whole images, lie one after the other.
            place = result[first : first + count, top : top + lines]
            torch.mm(tile.reshape(-1, length), matrix, out=place.view(-1, filters))
    return result
