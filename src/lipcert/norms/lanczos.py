"""Lanczos processes for many maps at a time: all pairs of a sweep in one batch.

A is BᵀB for pairs whose smaller side is the output of site i, and BBᵀ for those whose
smaller side is the input of site j.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from lipcert.network.normal_form import Network
from lipcert.network.program import Shape
from lipcert.network.sweep import Pair, Sweep
from lipcert.norms.lanczos_process import Process
from lipcert.progress import Report, no_report

_DROPPED = 0.8
_LOOKS = 2
"""Steps after which it is asked again whether they are enough."""
_ROWS = 6
"""Rows of every pair that are in memory at a time, beside its basis."""


def cost(steps: int, path: float, n: int) -> float:
    """Multiplications of this many steps with a matrix of order n: two products each, and the orthogonalisation."""
    return 2 * steps * path + steps**2 * n


def memory(network: Network, pair: Pair, steps: int) -> int:
    """Bytes for one pair: the basis, and a row at the widest nodes."""
    n = order(network, pair)
    widest = max(prod(node.shape) for node in network.nodes)
    return 8 * (min(steps, n) * n + _ROWS * widest)


def order(network: Network, pair: Pair) -> int:
    """n of the matrix A of a pair."""
    j, i = pair
    return min(network.out_size(i), network.in_size(j))


@torch.no_grad()
def run_lanczos(
    network: Network,
    steps: Mapping[Pair, int],
    seed: tuple[int, ...],
    progress: Report = no_report,
    enough: Callable[[Pair, Process], bool] = lambda pair, process: False,
) -> dict[Pair, Process]:
    """As many steps for every pair, fewer if it has enough; its start depends on the seed and the pair only."""
    processes: dict[Pair, Process] = {}
    for pair, (_, shape) in _smaller_sides(network, steps).items():
        start = _random_vector(prod(shape), (*seed, *pair)).to(network.device)
        most = min(steps[pair], prod(shape))
        processes[pair] = Process(start.reshape(1, *shape), most)
    work = sum(process.left() for process in processes.values())
    batch = _Batch(network, list(steps))
    while batch.pairs:
        batch.advance(processes)
        for pair in batch.pairs:
            process = processes[pair]
            # Chance is in the start alone, and one event, |⟨u, b⟩| ≤ τ, is all that can
            # fail, after however many steps: to look at the bound and then stop does
            # not make it less certain.
            looks = not process.done and process.steps % _LOOKS == 0
            if looks and enough(pair, process):
                process.finish()
        # A new schedule costs a little: pairs that are done travel along until they are
        # more than a fifth.
        active = [pair for pair in batch.pairs if not processes[pair].done]
        if len(active) < _DROPPED * len(batch.pairs):
            batch = _Batch(network, active)
        progress(1 - sum(process.left() for process in processes.values()) / work)
    return processes


def _random_vector(n: int, key: tuple[int, ...]) -> Tensor:
    # A hash of the seed and the pair: starts of different pairs do not depend on each
    # other. Not torch's generator, which has 2^32 different starts, known to everybody.
    # Normally distributed entries have a direction that is uniform on the sphere, as
    # the theorem asks.
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))
    return torch.from_numpy(generator.standard_normal(n))


def _smaller_sides(
    network: Network, pairs: Iterable[Pair]
) -> dict[Pair, tuple[bool, Shape]]:
    """Whether A acts on the output of site i, the smaller side, and the shape of its vectors."""
    sides = {}
    for j, i in sorted(pairs):
        if network.out_size(i) <= network.in_size(j):
            sides[j, i] = True, network.nodes[network.sites[i].output].shape
        else:
            sides[j, i] = False, network.nodes[network.sites[j].source].shape
    return sides


class _Batch:
    """Pairs that travel together: with BᵀB from the outputs of sites, with BBᵀ from the inputs."""

    def __init__(self, network: Network, pairs: Sequence[Pair]) -> None:
        self.pairs = pairs
        last = max((j for j, _ in pairs), default=0)
        # BᵀB and BBᵀ have the same largest eigenvalue; the smaller one has shorter
        # vectors, and a smaller √n.
        sides = _smaller_sides(network, pairs)
        from_start = {pair for pair in pairs if sides[pair][0]}
        self._from_start = Sweep(network, last, only=from_start)
        self._from_end = Sweep(network, last, only=set(pairs) - from_start)

    def advance(self, processes: Mapping[Pair, Process]) -> None:
        """One step of all pairs."""
        start, end = self._from_start, self._from_end
        images = start.forward(_vectors(processes, start.starts))
        _advance(processes, start.starts, start.adjoint(images))
        images = end.adjoint(_vectors(processes, end.ends))
        _advance(processes, end.ends, end.forward(images))


def _vectors(
    processes: Mapping[Pair, Process], rows: Mapping[int, Sequence[Pair]]
) -> dict[int, Tensor]:
    """By site, one row for each of its pairs: the vector of its process."""
    vectors = {}
    for site, pairs in rows.items():
        vectors[site] = torch.cat([processes[pair].vector for pair in pairs])
    return vectors


def _advance(
    processes: Mapping[Pair, Process],
    rows: Mapping[int, Sequence[Pair]],
    images: Mapping[int, Tensor],
) -> None:
    """Take in the rows of A q; a process that is done ignores its own."""
    for site, pairs in rows.items():
        for row, pair in enumerate(pairs):
            # Rows are in the order of `pairs`, as `_vectors` has put them together.
            if not processes[pair].done:
                processes[pair].advance(images[site][row])
