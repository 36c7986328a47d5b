"""All maps B_ji of a network in one batch (the paper's Algorithm 2, for any DAG).

A *pair* (j, i) stands for B_ji, the linear map from the output of site i to the input of site j. One row of the batch
travels for each pair; a node carries the rows of the pairs whose paths lead through it, so a sweep calls every linear
operation once, however many pairs there are.
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


class Sweep:
    """The schedule for the pairs (j, i), i < j ≤ last, that a linear path joins, or for `only` some of them.

    `starts[i]` lists the pairs that begin at
    site i and `ends[j]` those that end at site j, in the order of the rows of the corresponding tensors; `pairs` lists
    all, by j, then i.
    """

    def __init__(self, network: Network, last: int, only: Collection[Pair] | None = None) -> None:
        self.network = network
        after, before = network.reach()
        sites = network.sites
        joined = [(j, i) for j in range(1, last + 1) for i in range(j) if sites[j].source in after[i]]
        self.pairs: list[Pair] = joined if only is None else [pair for pair in joined if pair in only]
        self.starts = {i: rows for i in range(last) if (rows := [p for p in self.pairs if p[1] == i])}
        self.ends = {j: rows for j in range(1, last + 1) if (rows := [p for p in self.pairs if p[0] == j])}
        carried = [
            [(j, i) for j, i in self.pairs if v in after[i] and v in before[j - 1]] for v in range(len(network.nodes))
        ]
        self._position = [{pair: k for k, pair in enumerate(rows)} for rows in carried]
        self._start_rows = {i: self._rows(sites[i].output, rows) for i, rows in self.starts.items()}
        self._ends_at: list[list[tuple[int, _Rows]]] = [[] for _ in network.nodes]
        for j, rows in self.ends.items():
            self._ends_at[sites[j].source].append((j, self._rows(sites[j].source, rows)))
        self._links = [self._links_into(v) for v in range(len(network.nodes))]
        self._place_forward, self._place_adjoint = self._placements()

    def forward(self, starts: dict[int, Tensor]) -> dict[int, Tensor]:
        """B_ji x_ji for all pairs: from the rows of x at each start site i to the rows of B x at each end site j."""
        values: dict[int, Tensor] = {}
        ends: dict[int, Tensor] = {}
        for v in range(len(self.network.nodes)):
            if not self._position[v]:
                continue
            parts = [link.op.apply(link.take.select(values[link.source])) for link in self._links[v]]
            site = self.network.site_of_output.get(v)
            if site in self._start_rows:
                parts.append(starts[site])
            values[v] = self._place_forward[v].assemble(parts)
            for j, rows in self._ends_at[v]:
                ends[j] = rows.select(values[v])
        return ends

    def adjoint(self, ends: dict[int, Tensor]) -> dict[int, Tensor]:
        """B_jiᵀ y_ji for all pairs: from the rows of y at each end site j to the rows of Bᵀy at each start site i."""
        parts: list[list[Tensor]] = [[] for _ in self.network.nodes]
        starts: dict[int, Tensor] = {}
        for v in reversed(range(len(self.network.nodes))):
            if not self._position[v]:
                continue
            y = self._place_adjoint[v].assemble([ends[j] for j, _ in self._ends_at[v]] + parts[v])
            parts[v] = []
            site = self.network.site_of_output.get(v)
            if site in self._start_rows:
                starts[site] = self._start_rows[site].select(y)
            for link in self._links[v]:
                parts[link.source].append(link.op.adjoint(link.put.select(y)))
        return starts

    def _links_into(self, v: int) -> list[_Link]:
        links = []
        for edge in self.network.nodes[v].edges:
            common = [pair for pair in self._position[edge.source] if pair in self._position[v]]
            if common:
                links.append(_Link(edge.source, edge.op, self._rows(edge.source, common), self._rows(v, common)))
        return links

    def _placements(self) -> tuple[list[_Placement], list[_Placement]]:
        """Where the parts of a node go, in the order in which `forward` and `adjoint` produce them."""
        size = len(self.network.nodes)
        into: list[list[_Rows]] = [[link.put for link in links] for links in self._links]
        for i, rows in self._start_rows.items():
            into[self.network.sites[i].output].append(rows)
        back: list[list[_Rows]] = [[rows for _, rows in self._ends_at[v]] for v in range(size)]
        for v in reversed(range(size)):
            for link in self._links[v]:
                back[link.source].append(link.take)
        counts = [len(position) for position in self._position]
        forward = [_Placement.of(into[v], counts[v]) for v in range(size)]
        return forward, [_Placement.of(back[v], counts[v]) for v in range(size)]

    def _rows(self, v: int, pairs: list[Pair]) -> _Rows:
        return _Rows([self._position[v][pair] for pair in pairs], len(self._position[v]))


class _Rows:
    """Some of the rows that a node carries, in a given order."""

    def __init__(self, positions: list[int], size: int) -> None:
        self.positions = positions
        self._runs = _Placement([list(range(size))], [[(0, k)] for k in positions])

    def select(self, value: Tensor) -> Tensor:
        return self._runs.assemble([value])


class _Placement:
    """Assembles rows from parts: rows given by several parts add up, rows given by none are zero.

    Consecutive rows move together. One split per part and one concatenation move everything: they keep the memory
    format, and differentiating them copies every row once.
    """

    def __init__(self, parts: list[list[int]], rows: list[list[tuple[int, int]]]) -> None:
        """`parts[p]` are the rows of part p; `rows[k]` lists the (part, row of that part) that make up row k."""
        segments: list[tuple[list[tuple[int, int]], int]] = []
        for terms in rows:
            if segments:
                previous, length = segments[-1]
                if terms == [(part, row + length) for part, row in previous]:
                    segments[-1] = (previous, length + 1)
                    continue
            segments.append((terms, 1))
        starts = [
            sorted({0} | {edge for terms, n in segments for q, row in terms if q == p for edge in (row, row + n)})
            for p in range(len(parts))
        ]
        self._sizes = [
            [b - a for a, b in pairwise([*edges, len(part)]) if b > a]
            for edges, part in zip(starts, parts, strict=True)
        ]
        self._segments = [([(p, starts[p].index(row)) for p, row in terms], length) for terms, length in segments]

    @classmethod
    def of(cls, parts: list[_Rows], size: int) -> _Placement:
        """The rows 0..size−1 of a node from parts that know their positions in it."""
        positions = [part.positions for part in parts]
        return cls(positions, [[(p, at.index(k)) for p, at in enumerate(positions) if k in at] for k in range(size)])

    def assemble(self, parts: list[Tensor]) -> Tensor:
        pieces = [
            (part,) if len(sizes) == 1 else part.split_with_sizes(sizes)
            for part, sizes in zip(parts, self._sizes, strict=True)
        ]
        rows = [self._sum([pieces[p][k] for p, k in terms], length, parts[0]) for terms, length in self._segments]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    @staticmethod
    def _sum(terms: list[Tensor], length: int, like: Tensor) -> Tensor:
        if not terms:
            return torch.zeros_like(like[:1]).expand(length, *like.shape[1:])
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return total


@dataclass(frozen=True)
class _Link:
    """Rows that travel into a node: out of `source`, through an operation."""

    source: int
    op: LinearOp
    take: _Rows
    put: _Rows
