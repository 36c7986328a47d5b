"""Turns in the power iteration: pairs that span many sites take part in some iterations only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lipcert.network.sweep import Pair, Sweep
from lipcert.norms.acceleration import ConjugateGradients
from lipcert.norms.estimate import Vectors, power_step


class Rotation:
    """Turns unit vectors towards the top right singular vectors of all pairs, by sweeps with A = BᵀB.

    Far pairs take turns, so that the cost of an iteration grows with the depth of a
    network, not its square: those that span at most four sites take part in every
    iteration, those up to eight in every second, farther ones in every fourth. There
    are many of them, they change slowly, and every site halves their share of the bound
    (for ReLU).
    """

    PERIOD = 4

    def __init__(self, sweep: Sweep) -> None:
        self._starts = sweep.starts
        self.period = 1
        """How many iterations until every pair has had its turn."""
        # Pairs of a start site that take part at the same times: by site, stride and
        # remainder.
        groups: dict[tuple[int, int, int], list[Pair]] = {}
        for j, i in sweep.pairs:
            stride = self._stride(j - i)
            # (turn + i + j) % stride decides about a turn: pairs of equal stride and
            # remainder move together.
            groups.setdefault((i, stride, (i + j) % stride), []).append((j, i))
            self.period = max(self.period, stride)
        self._groups = list(groups.values())
        self._phases = [sweep]
        if self.period > 1:
            # One schedule for each remainder of the turn: strides are 1, 2 and 4, all
            # of which divide the period.
            turns = [self._turn(turn, sweep.pairs) for turn in range(self.period)]
            self._phases = [
                Sweep(sweep.network, max(sweep.ends), only=turn) for turn in turns
            ]

    def _stride(self, span: int) -> int:
        if span <= 4:
            return 1
        if span <= 8:
            return 2
        return self.PERIOD

    def _turn(self, turn: int, pairs: Sequence[Pair]) -> set[Pair]:
        """The pairs that take part in the iterations turn, turn + period, …"""
        return {(j, i) for j, i in pairs if (turn + i + j) % self._stride(j - i) == 0}

    @torch.no_grad()
    def iterate(
        self, vectors: Vectors, iterations: int, turn: int = 0, accelerated: bool = True
    ) -> Vectors:
        """Iterations from the given turn on; vectors of pairs that wait, and rows that B maps to zero, stay.

        Without acceleration, all are power steps.
        """
        phases = [self._phases[k % self.period] for k in range(turn, turn + iterations)]
        if accelerated:
            return self._accelerated(vectors, phases)
        vectors = dict(vectors)
        for phase in phases:
            moving = {}
            for i, pairs in phase.starts.items():
                moving[i] = _select(vectors[i], self._starts[i], pairs)
            for i, moved in power_step(phase, moving).items():
                # All rows as they were, then those that have moved, which count.
                parts = [(self._starts[i], vectors[i]), (phase.starts[i], moved)]
                vectors[i] = _merge(parts, self._starts[i])
        return vectors

    def _accelerated(self, vectors: Vectors, phases: Sequence[Sweep]) -> Vectors:
        # A search keeps the last step of its vectors, which must move together: one
        # search for each group.
        searches: dict[int, list[ConjugateGradients]] = {i: [] for i in self._starts}
        for group in self._groups:
            i = group[0][1]
            searches[i].append(
                ConjugateGradients(group, _select(vectors[i], self._starts[i], group))
            )
        for phase in phases:
            probes, active = {}, {}
            for i, pairs in phase.starts.items():
                # A group moves as a whole or not at all: its first pair tells.
                active[i] = [
                    search for search in searches[i] if search.pairs[0] in pairs
                ]
                probes[i] = _merge(
                    [(search.pairs, search.probe()) for search in active[i]], pairs
                )
            for i, images in phase.adjoint(phase.forward(probes)).items():
                for search in active[i]:
                    search.advance(_select(images, phase.starts[i], search.pairs))
        result = {}
        for i, members in searches.items():
            result[i] = _merge(
                [(search.pairs, search.result()) for search in members], self._starts[i]
            )
        return result


def _select(rows: Tensor, pairs: Sequence[Pair], wanted: Sequence[Pair]) -> Tensor:
    """The rows of the wanted pairs, from those of all `pairs`."""
    if wanted == pairs:
        return rows
    # Slices keep the memory format of the rows, an index would not.
    chosen = []
    for pair in wanted:
        k = pairs.index(pair)
        chosen.append(rows[k : k + 1])
    return torch.cat(chosen)


def _merge(
    parts: Sequence[tuple[Sequence[Pair], Tensor]], pairs: Sequence[Pair]
) -> Tensor:
    """The rows of all `pairs` from those of groups of them; the last group that has a pair counts."""
    group, rows = parts[-1]
    if group == pairs:
        return rows
    by_pair = {}
    for group, rows in parts:
        for k, pair in enumerate(group):
            by_pair[pair] = rows[k : k + 1]
    return torch.cat([by_pair[pair] for pair in pairs])
