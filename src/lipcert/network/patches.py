"""Convolutions in float64 on a processor: products of patches with the kernel as a matrix.

oneDNN has no float64 convolutions, and torch's own lay out the patches of a whole image
anew for every call. Here a tile of patches that fits into the cache is copied into one
buffer, multiplied, and the buffer is used again: two to three times as fast on large
images.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lipcert.network.program import Shape

_TILE = 1 << 18
"""Entries of a tile of patches."""


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
    filters, channels, *size = weight.shape
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
    # (filters, channels, i, j) → (i·j·channels, filters), in the order of the entries
    # of a patch.
    matrix = weight.permute(2, 3, 1, 0).reshape(-1, filters)
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
            product = tile.reshape(-1, length) @ matrix
            result[first : first + count, top : top + lines] = product.view(
                *piece.shape[:3], filters
            )
    return result
