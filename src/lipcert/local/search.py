"""The largest radius that can be proved, input by input."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lipcert.local.points import Point

Prove = Callable[[Point, Tensor], Tensor]
"""Proved radii, (B,), from inputs and the radii of balls around them, (B,)."""
_TRIALS = 14
_CLOSE = 1.02
"""A search ends when what failed is less than this factor above what is proved."""


def largest_radius(prove: Prove, point: Point, start: Tensor, guess: Tensor) -> Tensor:
    """(B,): radii found by doubling and bisection, at least known ones (0 where nothing is known).

    A ball of radius ρ for which the proof fails still proves a smaller radius: the
    relaxations over the larger ball hold in the smaller one. So every trial raises the
    proved radius, and the search goes on only where it can gain.
    """
    proved, failed = start.clone(), torch.full_like(start, torch.inf)
    trial = torch.maximum(guess, 1.5 * start)
    for _ in range(_TRIALS):
        open_ = (trial > proved) & (failed > _CLOSE * proved)
        index = open_.nonzero().flatten()
        if len(index) == 0:
            break
        tried = trial[index]
        found = prove(point.take(index), tried)
        proved[index] = torch.maximum(proved[index], found)
        failed[index] = torch.where(
            found < tried, torch.minimum(failed[index], tried), failed[index]
        )
        trial = _next_trial(proved, failed, trial)
    return proved


def _next_trial(proved: Tensor, failed: Tensor, trial: Tensor) -> Tensor:
    """Twice as far where nothing has failed yet, else in between; far below a failure that proved nothing."""
    between = (proved * failed).sqrt().maximum(failed / 4)
    between = torch.where(between >= failed, (proved + failed) / 2, between)
    return torch.where(torch.isinf(failed), 2 * trial, between)
