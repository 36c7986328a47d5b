"""All maps B_ji of a network in one batch (the paper's Algorithm 2, for any DAG).

A *pair* (j, i) stands for B_ji, the linear map from the output of site i to the input
of site j. One row of the batch travels for each pair; a node carries the rows of the
pairs whose paths lead through it, so a sweep calls every linear operation once, however
many pairs there are.

For input → f → g → output with a skip connection from the input to g, the pairs are (f,
input), (g, input), (g, f) and (output, g). The input starts the rows of (f, input) and
(g, input), and the sum before g carries (g, input), (g, f): to f, the input passes on
its first row; to the sum, it passes on its second one, and f adds the other.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from lipcert.network.linear import LinearOp
from lipcert.network.normal_form import Network

Pair = tuple[int, int]
Piece = tuple[int, int]
"""(part, row of that part)."""


def joined_pairs(network: Network, last: int) -> list[Pair]:
    """The pairs (j, i), i < j ≤ last, that a linear path joins, by j, then i."""
    # Elsewhere B_ji is zero, and costs nothing.
    after, _ = network.reach()
    pairs = []
    for j in range(1, last + 1):
        for i in range(j):
            if network.sites[j].source in after[i]:
                pairs.append((j, i))
    return pairs


class Sweep:
    """The schedule for the pairs (j, i), i < j ≤ last, that a linear path joins, or for `only` some of them.

    `starts[i]` lists the pairs that begin at site i and `ends[j]` those that end at
    site j, in the order of the rows of the corresponding tensors; `pairs` lists all, by
    j, then i.
    """

    def __init__(
        self, network: Network, last: int, only: Collection[Pair] | None = None
    ) -> None:
        self.network = network
        self.pairs: list[Pair] = []
        self.starts: dict[int, list[Pair]] = {}
        self.ends: dict[int, list[Pair]] = {}
        # Which row of a node's tensor belongs to which pair: {(1, 0): 0, (2, 0): 1} on
        # paths from the input to the sites 1 and 2. All rows of a node go through an
        # operation together.
        self._position: list[dict[Pair, int]] = [{} for _ in network.nodes]
        # Nodes that can be reached from i and from which j can be reached: those on the
        # paths that make up B_ji.
        after, before = network.reach()
        for j, i in joined_pairs(network, last):
            if only is None or (j, i) in only:
                self._add(
                    (j, i), after[i] & before[j - 1]
                )  # `before` begins with site 1
        # Pairs come by j, so that start sites were met in any order.
        self.starts = dict(sorted(self.starts.items()))
        self._schedule()

    def _add(self, pair: Pair, path: set[int]) -> None:
        """A row for a pair on every node of the paths that join it."""
        j, i = pair
        self.pairs.append(pair)
        self.starts.setdefault(i, []).append(pair)
        self.ends.setdefault(j, []).append(pair)
        for v in path:
            self._position[v][pair] = len(self._position[v])

    def _schedule(self) -> None:
        """Which rows travel along which edge, and where the parts of a node go, in the order of their production."""
        # From here on rows are fixed; what is left are the parts of which the rows of
        # each node are the sum. Parts are listed in the order in which `forward` and
        # `adjoint` will produce them: both rely on it.
        nodes, sites = self.network.nodes, self.network.sites
        self._links: list[list[_Link]] = [[] for _ in nodes]
        self._ends_at: list[list[tuple[int, _Rows]]] = [[] for _ in nodes]
        forward: list[list[_Rows]] = [[] for _ in nodes]
        adjoint: list[list[_Rows]] = [[] for _ in nodes]
        self._read_last: list[list[int]] = [
            [] for _ in nodes
        ]  # values that nobody behind a node reads
        read: set[int] = set()
        for j, pairs in self.ends.items():
            rows = self._rows(sites[j].source, pairs)
            self._ends_at[sites[j].source].append((j, rows))
            adjoint[sites[j].source].append(rows)
        for v in reversed(range(len(nodes))):
            for edge in nodes[v].edges:
                common = [
                    pair
                    for pair in self._position[edge.source]
                    if pair in self._position[v]
                ]
                # If u has (1, 0), (2, 0), (3, 0) and v (2, 0), (3, 0), (3, 1): rows 1,
                # 2 of u become 0, 1 of v.
                if common:
                    take, put = self._rows(edge.source, common), self._rows(v, common)
                    self._links[v].append(_Link(edge.source, edge.op, take, put))
                    forward[v].append(put)
                    adjoint[edge.source].append(take)
                    if (
                        edge.source not in read
                    ):  # nodes come from the last one: this is its last reader
                        read.add(edge.source)
                        self._read_last[v].append(edge.source)
        # The vectors themselves are the only part at the output of their site, which
        # has no edges into it.
        self._start_rows = {}
        for i, pairs in self.starts.items():
            self._start_rows[i] = self._rows(sites[i].output, pairs)
            forward[sites[i].output].append(self._start_rows[i])
        self._place_forward = self._placements(forward)
        self._place_adjoint = self._placements(adjoint)

    def _rows(self, v: int, pairs: list[Pair]) -> _Rows:
        return _Rows(
            [self._position[v][pair] for pair in pairs], len(self._position[v])
        )

    def _placements(self, parts: list[list[_Rows]]) -> list[_Placement]:
        placements = []
        for rows, position in zip(parts, self._position, strict=True):
            # By rows of the node: which rows of which parts add up to each.
            pieces: list[list[Piece]] = [[] for _ in position]
            for part, some in enumerate(rows):
                for row, place in enumerate(some.positions):
                    pieces[place].append((part, row))
            placements.append(
                _Placement([len(some.positions) for some in rows], pieces)
            )
        return placements

    def forward(self, starts: dict[int, Tensor]) -> dict[int, Tensor]:
        """B_ji x_ji for all pairs: from the rows of x at each start site i to the rows of B x at each end site j."""
        values: dict[int, Tensor] = {}
        ends: dict[int, Tensor] = {}
        for v in range(len(self.network.nodes)):
            if not self._position[v]:
                continue
            parts = []
            for link in self._links[v]:
                parts.append(link.op.apply(link.take.select(values[link.source])))
            site = self.network.site_of_output.get(v)
            if site in self._start_rows:
                parts.append(starts[site])
            values[v] = self._place_forward[v].assemble(parts)
            for j, rows in self._ends_at[v]:
                ends[j] = rows.select(values[v])
            # Memory is what limits the number of rows: values go as soon as their last
            # reader has them.
            for source in self._read_last[v]:
                del values[source]
        return ends

    def adjoint(self, ends: dict[int, Tensor]) -> dict[int, Tensor]:
        """B_jiᵀ y_ji for all pairs: from the rows of y at each end site j to the rows of Bᵀy at each start site i."""
        parts: list[list[Tensor]] = [[] for _ in self.network.nodes]
        starts: dict[int, Tensor] = {}
        for v in reversed(range(len(self.network.nodes))):
            if not self._position[v]:
                continue
            ending = [ends[j] for j, _ in self._ends_at[v]]
            y = self._place_adjoint[v].assemble(ending + parts[v])
            # What the readers of v sent back is in y now, and their tensors are free
            # again.
            parts[v] = []
            site = self.network.site_of_output.get(v)
            if site in self._start_rows:
                starts[site] = self._start_rows[site].select(y)
            for link in self._links[v]:
                parts[link.source].append(link.op.adjoint(link.put.select(y)))
        return starts


class _Rows:
    """Some of the rows that a node carries, in a given order."""

    def __init__(self, positions: list[int], size: int) -> None:
        self.positions = positions
        self._placement = _Placement(
            [size], [[(0, position)] for position in positions]
        )

    def select(self, value: Tensor) -> Tensor:
        return self._placement.assemble([value])


class _Placement:
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
                pieces = part.split_with_sizes(
                    [end - start for start, end in pairwise(cuts)]
                )
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
                total = torch.zeros_like(parts[0][:1]).expand(
                    count, *parts[0].shape[1:]
                )
            segments.append(total)
        if len(segments) == 1:
            return segments[0]
        return torch.cat(segments)


@dataclass(frozen=True)
class _Link:
    """Rows that travel into a node: out of `source`, through an operation."""

    source: int
    op: LinearOp
    take: _Rows
    put: _Rows
