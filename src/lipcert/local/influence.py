"""Which nonlinearities cost the rows of the logits most."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lipcert.local.pulling import pull_back
from lipcert.local.state import Deviations


def costly_entries(state: Deviations, rows: Tensor, share: float) -> dict[int, Tensor]:
    """(B, …) for every node that sites read: the entries that make up a share of what its sites cost the rows.

    All entries of sites that are not elementwise, and of all sites if rows reach none
    that is.
    """
    chosen = {
        v: torch.ones_like(state.below[v], dtype=torch.bool)
        for v in state.prepared.sites_of_source
    }
    if share < 1:
        for k, cost in _costs(state, rows).items():
            v = state.prepared.exact.sites[k].source
            # Sites that read the same node have been looked at before.
            first = k == min(state.prepared.sites_of_source[v])
            largest = _largest(cost, share).reshape(chosen[v].shape)
            chosen[v] = largest if first else chosen[v] | largest
    return chosen


def _costs(state: Deviations, rows: Tensor) -> dict[int, Tensor]:
    """|y|(μ_high − μ_low) of every elementwise site, (B, …), summed over the rows.

    The constant of a row contains y⁺μ_low + y⁻μ_high, so that its derivatives by the
    intercepts are y⁺ and y⁻.
    """
    prepared, walls = state.prepared, state.walls
    elementwise = {k for k, site in state.sites.items() if site.grid is not None}
    ends = {}
    for k in elementwise:
        lines = walls.relaxations[k]
        ends[k] = lines.low.clone(), lines.high.clone()
    with torch.inference_mode(False), torch.enable_grad():
        for both in ends.values():
            for end in both:
                end.requires_grad_()
        relaxations = dict(walls.relaxations)
        for k, (low, high) in ends.items():
            relaxations[k] = replace(relaxations[k], low=low, high=high)  # type: ignore[type-var]
        pulled = pull_back(
            prepared,
            replace(walls, relaxations=relaxations),
            state.ball.norm,
            {prepared.exact.sites[-1].source: rows},
            torch.zeros(rows.shape[:2], dtype=torch.float64, device=rows.device),
        )
        flat = [end for both in ends.values() for end in both]
        # Rows may end at a site that is not elementwise, and tell nothing of others.
        if not pulled.constant.requires_grad:
            return {}
        slopes = torch.autograd.grad(
            pulled.constant.sum(), flat, allow_unused=True, materialize_grads=True
        )
    costs = {}
    for i, (k, (low, high)) in enumerate(ends.items()):
        size = slopes[2 * i] - slopes[2 * i + 1]
        costs[k] = (size * (high - low)).detach()[:, 0]
    return costs


def _largest(costs: Tensor, share: float) -> Tensor:
    """Which entries of each input are the largest ones, as many as make up a share of all."""
    flat = costs.flatten(1)
    ordered, order = flat.sort(dim=1, descending=True)
    before = ordered.cumsum(1) - ordered
    # All if nothing costs anything.
    wanted = before <= share * flat.sum(1, keepdim=True)
    return torch.zeros_like(wanted).scatter(1, order, wanted)
