"""Rows of tensors: some of them, or put together from parts."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

Piece = tuple[int, int]
"""(part, row of that part)."""


class Rows:
    """Some of the rows that a node carries, in a given order."""

    def __init__(self, positions: list[int], size: int) -> None:
        self.positions = positions
        self._placement = Placement([size], [[(0, place)] for place in positions])

    def select(self, value: Tensor) -> Tensor:
        return self._placement.assemble([value])


class Placement:
    """Assembles rows from parts: rows given by several parts add up, rows given by none are zero.

    Consecutive rows move together. One split per part and one concatenation move
    everything: they keep the memory format, and differentiating them copies every row
    once. For example, from parts a of 3 rows and b of 2 rows, the rows a₀, a₁ + b₀, a₂
    + b₁, 0 are three segments: a₀, then (a₁, a₂) + (b₀, b₁), then 0; a is split into 1
    + 2 rows.
    """

    def __init__(self, lengths: list[int], rows: list[list[Piece]]) -> None:
        """`lengths[p]` is the number of rows of part p; `rows[k]` lists the pieces that add up to row k."""
        self._segments: list[tuple[list[Piece], int]] = []
        for pieces in rows:
            if self._segments:
                first, count = self._segments[-1]
                # The next rows of the same parts: the segment grows.
                if pieces == [(part, row + count) for part, row in first]:
                    self._segments[-1] = (first, count + 1)
                    continue
            self._segments.append((pieces, 1))
        # Where each part is to be split, so that every segment is made of whole pieces.
        cuts = [{0, length} for length in lengths]
        for pieces, count in self._segments:
            for part, row in pieces:
                cuts[part] |= {row, row + count}
        self._cuts = [sorted(places) for places in cuts]

    def assemble(self, parts: list[Tensor]) -> Tensor:
        """The rows, from the parts."""
        split: dict[Piece, Tensor] = {}
        for p, (part, cuts) in enumerate(zip(parts, self._cuts, strict=True)):
            pieces: tuple[Tensor, ...] = (part,)
            if len(cuts) > 2:
                sizes = [end - start for start, end in pairwise(cuts)]
                pieces = part.split_with_sizes(sizes)
            # Pieces by the rows at which they begin; the last cut is the end of the
            # part and begins none.
            for start, piece in zip(cuts, pieces, strict=False):
                split[p, start] = piece
        segments = []
        for terms, count in self._segments:
            total = None
            for term in terms:
                total = split[term] if total is None else total + split[term]
            if total is None:
                zero = torch.zeros_like(parts[0][:1])
                total = zero.expand(count, *parts[0].shape[1:])
            segments.append(total)
        if len(segments) == 1:
            return segments[0]
        return torch.cat(segments)
