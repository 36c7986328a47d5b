"""Many patches times one matrix in float64: in tiles that fit into the cache, on threads of our own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product
from math import ceil

import numpy as np
import torch
from threadpoolctl import ThreadpoolController
from torch import Tensor

from lipcert.threads import let_torch_rest, own_threads

_TILE = 1 << 18
"""Entries of a tile of patches."""


def multiplied(patches: Tensor, matrix: Tensor) -> Tensor:
    """(rows, height, width, filters): every patch times the matrix, tile by tile."""
    rows, height, width = patches.shape[:3]
    length, filters = matrix.shape
    # A tile is some lines of one image or, if images are small, several whole images.
    lines = max(1, _TILE // (width * length))  # of an image, in a tile
    together = max(1, lines // height)  # images
    # Tiles of one size: 16 lines of which 14 would fit are twice 8, not 14 and 2.
    lines = ceil(height / ceil(height / lines))
    given, factor = patches.detach().numpy(), matrix.detach().numpy()
    result = np.empty((rows, height, width, filters))

    def multiply(places: Iterator[tuple[int, int]]) -> None:
        buffer = np.empty((min(together, rows), lines, *given.shape[2:]))
        for first, top in places:
            piece = given[first : first + together, top : top + lines]
            tile = buffer[: len(piece), : piece.shape[1]]
            # The patches are a view in which entries appear up to k² times; only the
            # tile holds copies.
            np.copyto(tile, piece)
            # Lines of one image, or whole images, lie one after the other.
            place = result[first : first + together, top : top + lines]
            out = place.reshape(-1, filters)
            np.matmul(tile.reshape(-1, length), factor, out=out)

    tiles = list(product(range(0, rows, together), range(0, height, lines)))
    _share(multiply, tiles)
    return torch.from_numpy(result)


def _share(
    multiply: Callable[[Iterator[tuple[int, int]]], None], tiles: list[tuple[int, int]]
) -> None:
    """Tiles on several threads, each with products of its own.

    Threads of a single product would wait for each other, and for those of torch.
    """
    let_torch_rest()
    # Whoever is ready takes the next one.
    left = iter(tiles)
    threads = min(own_threads(), len(tiles))
    with _blas().limit(limits=1, user_api="blas"):
        if threads <= 1:
            multiply(left)
        else:
            list(_pool(os.getpid(), threads).map(multiply, [left] * threads))


@cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Threads that stay, as the buffers of BLAS in each are costly to make; a forked process has none of them."""
    return ThreadPoolExecutor(threads, "patches")


@cache
def _blas() -> ThreadpoolController:
    """The libraries behind NumPy; looking for them takes some time."""
    return ThreadpoolController()
