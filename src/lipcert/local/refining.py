"""Narrower intervals for the inputs of sites: rows are pulled back for the entries for which it matters."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from lipcert.local.funnels import flat
from lipcert.local.pulling import pull_back, signed_unit_rows
from lipcert.local.receptive_fields import Frame
from lipcert.local.replaced import needs_rows
from lipcert.local.state import Deviations
from lipcert.local.window_rows import pull_windows
from lipcert.local.windows import Places, Scene

_ROWS_BYTES = 1 << 22
"""Rows are pulled back so many at a time that they stay in the cache; several times that is what they need."""
_PASSES = 4
"""How much more than the largest window a row needs on its way."""


def refine_deviations(
    state: Deviations, v: int, chosen: dict[int, Tensor] | None = None
) -> tuple[Tensor, Tensor] | None:
    """How far the entries of a node fall and rise, where its rows show it; None if rows cannot help.

    chosen: the entries for which rows are pulled back if they can help, by node; all by
    default.
    """
    prepared = state.prepared
    if v in prepared.prefix and prepared.prefix_norms(v, state.ball.norm) is not None:
        return None
    needed = torch.zeros_like(state.below[v], dtype=torch.bool)
    for k in prepared.sites_of_source[v]:
        needed |= needs_rows(
            prepared.exact.sites[k], state.centre[v], state.below[v], state.above[v]
        )
    if chosen is not None:
        needed &= chosen[v]
    if not bool(needed.any()):
        return None
    frames = prepared.frames(v)
    if frames is not None and prepared.funnel(state.ball.norm).node is None:
        return _by_windows(state, v, needed, frames)
    return _by_rows(state, v, needed)


def _by_windows(
    state: Deviations, v: int, needed: Tensor, frames: dict[int, Frame]
) -> tuple[Tensor, Tensor]:
    below, above = state.below[v].clone(), state.above[v].clone()
    scene = Scene(state.prepared.exact, v, frames)
    every = needed.nonzero()
    entries = [
        prod(frame.size) * state.prepared.exact.nodes[u].shape[0]
        for u, frame in frames.items()
    ]
    chunk = max(1, _ROWS_BYTES // (2 * _PASSES * 8 * max(entries)))
    for some in torch.split(every, chunk):
        places = Places(*some.unbind(1))
        signs = torch.ones(2 * len(some), dtype=torch.float64, device=some.device)
        signs[
            len(some) :
        ] = -1.0  # rows of +1 show how far entries fall, rows of −1 how far they rise
        both = places.twice()
        pulled = pull_windows(scene, state.walls, state.ball.norm, both, signs)
        low, high = (-pulled.at(state.ball.radius[both.image])).clamp(min=0).chunk(2)
        index = some.unbind(1)
        below[index] = torch.minimum(below[index], low)
        above[index] = torch.minimum(above[index], high)
    return below, above


def _by_rows(state: Deviations, v: int, needed: Tensor) -> tuple[Tensor, Tensor]:
    prepared = state.prepared
    # Intervals need fewer digits than what the roundings of the program cost anyway.
    quick = prepared.network.dtype == torch.float32
    wanted = flat(needed)
    most = int(wanted.sum(1).max())
    # The wanted places of every input come first; inputs that want fewer are filled up
    # with others, to no harm.
    order = wanted.to(torch.int8).argsort(stable=True, dim=1, descending=True)[:, :most]
    below, above = flat(state.below[v]).clone(), flat(state.above[v]).clone()
    for places in torch.split(order, _chunk(state, v), dim=1):
        rows, constant = signed_unit_rows(
            prepared, v, places, state.walls.allowances[v]
        )
        pulled = pull_back(
            prepared, state.walls, state.ball.norm, rows, constant, quick
        )
        low, high = (-pulled.at(state.ball.radius)).clamp(min=0).chunk(2, dim=1)
        below.scatter_(1, places, torch.minimum(below.gather(1, places), low))
        above.scatter_(1, places, torch.minimum(above.gather(1, places), high))
    shape = state.centre[v].shape
    return below.reshape(shape), above.reshape(shape)


def _chunk(state: Deviations, v: int) -> int:
    """How many places can have their rows pulled back at a time."""
    largest = max(prod(node.shape) for node in state.prepared.exact.nodes[: v + 1])
    return max(1, _ROWS_BYTES // (2 * len(state.centre[0]) * largest * 8))
