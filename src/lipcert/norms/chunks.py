"""Differentiable estimates of many norms in bounded memory: some pairs at a time, recomputed in the backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from math import prod

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lipcert.errors import TooLargeError
from lipcert.network.normal_form import Network
from lipcert.network.program import constants_computed_once
from lipcert.network.sweep import Pair, Sweep
from lipcert.norms.estimate import Vectors, estimate_norms
from lipcert.norms.rotation import Rotation
from lipcert.resources import shown_bytes

_COPIES = 2
"""Tensors of the size of a value that a differentiable product keeps for each row."""


class Chunk:
    """Pairs of a sweep that travel together."""

    def __init__(
        self, whole: Sweep, pairs: Sequence[Pair], size: int, memory: int
    ) -> None:
        """`size` is what its derivative takes, `memory` what it may take, in bytes."""
        self._size, self._memory = size, memory
        self.sweep = whole
        # A sweep of its own calls only the operations on the paths of its pairs.
        if len(pairs) < len(whole.pairs):
            self.sweep = Sweep(whole.network, max(j for j, _ in pairs), only=set(pairs))
        self.rotation = Rotation(self.sweep)
        self._is_whole = self.sweep is whole
        # If site 0 starts (1, 0), (2, 0), (3, 0) and the chunk has (1, 0), (3, 0), its
        # rows of that tensor are 0 and 2.
        self._rows: dict[int, list[int]] = {}  # of the tensors of all pairs
        for i, own in self.sweep.starts.items():
            self._rows[i] = [whole.starts[i].index(pair) for pair in own]

    def iterated(
        self, vectors: Vectors, iterations: int, turn: int, accelerated: bool
    ) -> Vectors:
        """The vectors of the chunk after some iterations, from those of all pairs; never the same tensors."""
        own = vectors
        if not self._is_whole:
            own = {i: vectors[i][rows] for i, rows in self._rows.items()}
        # `write` changes the tensors of all pairs in place; what autograd keeps for the
        # derivative must be others.
        if iterations == 0:
            return {i: x.clone() for i, x in own.items()}
        return self.rotation.iterate(own, iterations, turn, accelerated)

    def norms(self, vectors: Vectors) -> Tensor:
        """‖Bx‖ of the pairs; if there are other chunks, what its derivative needs is computed again for it."""
        if not torch.is_grad_enabled():
            return estimate_norms(self.sweep, vectors)
        if self._size > self._memory:
            raise TooLargeError(
                f"the derivative of one norm takes {shown_bytes(self._size)}, "
                f"{shown_bytes(self._memory)} may be used; "
                "estimate under torch.no_grad(), leave long maps to products "
                "(span=4), or give more (memory=)"
            )
        if self._is_whole:
            return estimate_norms(self.sweep, vectors)
        # The graph of a chunk is dropped and built again when its turn comes in the
        # backward pass, so that no two chunks are in memory at a time. Nothing in it is
        # random.
        norms: Tensor = checkpoint(
            estimate_norms,
            self.sweep,
            vectors,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=_the_same_constants,
        )
        return norms

    def write(self, vectors: Vectors, target: Mapping[int, Tensor]) -> None:
        """Put the vectors of the chunk where those of all pairs are."""
        for i, rows in self._rows.items():
            if self._is_whole:
                target[i].copy_(vectors[i])
            else:
                target[i][rows] = vectors[i]


def _the_same_constants() -> tuple[
    AbstractContextManager[None], AbstractContextManager[None]
]:
    """Contexts of both passes through a chunk: each computes all constants that it needs, so that both do the same."""
    # Constants that the first pass finds computed already would be missing among the
    # tensors that it saves, and checkpoint would find that the second pass saves
    # others.
    return constants_computed_once(), constants_computed_once()


def chunks(sweep: Sweep, memory: int) -> list[Chunk]:
    """All pairs of a sweep in as few chunks as the memory allows, in order; a pair that needs more has its own."""
    groups: list[list[Pair]] = []
    sizes: list[int] = []
    for pair, size in row_bytes(sweep.network, sweep.pairs).items():
        # Pairs come by j, then i, so that those of a chunk end at neighbouring sites
        # and share most of their paths.
        if not groups or sizes[-1] + size > memory:
            groups.append([])
            sizes.append(0)
        groups[-1].append(pair)
        sizes[-1] += size
    made = []
    for group, size in zip(groups, sizes, strict=True):
        made.append(Chunk(sweep, group, size, memory))
    return made


def row_bytes(network: Network, pairs: Sequence[Pair]) -> dict[Pair, int]:
    """Bytes that the derivative of ‖B_ji x‖ needs: the values of all nodes between the sites."""
    # before[v + 1] − before[u] counts the entries of the nodes u, …, v.
    before = [0]  # entries of the nodes before each
    for node in network.nodes:
        before.append(before[-1] + prod(node.shape))
    entry = _COPIES * network.dtype.itemsize
    sizes = {}
    for j, i in pairs:
        start, end = network.sites[i].output, network.sites[j].source
        sizes[j, i] = entry * (before[end + 1] - before[start])
    return sizes
