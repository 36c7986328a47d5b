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

from torch import Tensor

from lipcert.network.linear import LinearOp
from lipcert.network.normal_form import Edge, Network
from lipcert.network.row_placement import Piece, Placement, Rows

Pair = tuple[int, int]


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
                # `before` begins with site 1.
                self._add((j, i), after[i] & before[j - 1])
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
        self._ends_at: list[list[tuple[int, Rows]]] = [[] for _ in nodes]
        forward: list[list[Rows]] = [[] for _ in nodes]
        adjoint: list[list[Rows]] = [[] for _ in nodes]
        # Values that nobody behind a node reads.
        self._read_last: list[list[int]] = [[] for _ in nodes]
        read: set[int] = set()
        for j, pairs in self.ends.items():
            rows = self._rows(sites[j].source, pairs)
            self._ends_at[sites[j].source].append((j, rows))
            adjoint[sites[j].source].append(rows)
        for v in reversed(range(len(nodes))):
            for edge in nodes[v].edges:
                link = self._link(edge, v)
                if link is None:
                    continue
                self._links[v].append(link)
                forward[v].append(link.put)
                adjoint[link.source].append(link.take)
                # Nodes come from the last one: this is the last reader.
                if link.source not in read:
                    read.add(link.source)
                    self._read_last[v].append(link.source)
        # The vectors themselves are the only part at the output of their site, which
        # has no edges into it.
        self._start_rows = {}
        for i, pairs in self.starts.items():
            self._start_rows[i] = self._rows(sites[i].output, pairs)
            forward[sites[i].output].append(self._start_rows[i])
        self._place_forward = self._placements(forward)
        self._place_adjoint = self._placements(adjoint)

    def _link(self, edge: Edge, v: int) -> _Link | None:
        """The rows that travel along an edge into node v: those of the pairs that both of its ends carry."""
        u, position = edge.source, self._position[v]
        common = [pair for pair in self._position[u] if pair in position]
        # If u has (1, 0), (2, 0), (3, 0) and v (2, 0), (3, 0), (3, 1): rows 1, 2 of u
        # become 0, 1 of v.
        if not common:
            return None
        return _Link(u, edge.op, self._rows(u, common), self._rows(v, common))

    def _rows(self, v: int, pairs: list[Pair]) -> Rows:
        position = self._position[v]
        return Rows([position[pair] for pair in pairs], len(position))

    def _placements(self, parts: list[list[Rows]]) -> list[Placement]:
        placements = []
        for rows, position in zip(parts, self._position, strict=True):
            # By rows of the node: which rows of which parts add up to each.
            pieces: list[list[Piece]] = [[] for _ in position]
            for part, some in enumerate(rows):
                for row, place in enumerate(some.positions):
                    pieces[place].append((part, row))
            lengths = [len(some.positions) for some in rows]
            placements.append(Placement(lengths, pieces))
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


@dataclass(frozen=True)
class _Link:
    """Rows that travel into a node: out of `source`, through an operation."""

    source: int
    op: LinearOp
    take: Rows
    put: Rows
