"""How far every value of the executed program can be from its value at the centre, over a ball; node by node.

v̂ are values as executed. For a node, Δ_w = Σ_e A_e Δ_e + δ_w with |δ_w| ≤ η_w, for
roundings at the centre and at the other point (see `allowances`). M = |v̂| + D bounds
values over the ball. D, a bound on |Δ|, is the smallest of

    Σ_e |A_e| D_e + η,      Σ_e ‖row of A_e‖·m_e + η,      ρ‖row from the input‖ + η…,

with m ≥ ‖Δ‖; at the inputs of sites, rows are pulled back (see `pulling`) wherever that
can change what follows.
"""

from __future__ import annotations

from math import inf, prod

import torch
from torch import Tensor

from lipcert.local.allowances import charge, roundings_of
from lipcert.local.funnels import dual_norms, flat
from lipcert.local.prepared import Prepared
from lipcert.local.pulling import Ball
from lipcert.local.refining import refine_deviations
from lipcert.local.replaced import is_flat, needs_rows
from lipcert.local.replacing import replace_site
from lipcert.local.state import Deviations
from lipcert.local.zonotopes import Zonotope
from lipcert.network.tangents import LocalSlope
from lipcert.rounding import gamma


@torch.no_grad()
def follow(
    prepared: Prepared,
    ball: Ball,
    centre: dict[int, Tensor],
    known: Deviations | None = None,
    chosen: dict[int, Tensor] | None = None,
    columns_only: bool = False,
) -> Deviations:
    """Walk through the network from the input to the output.

    known: what an earlier walk has shown; there are no columns then.
    chosen: the entries for which rows are pulled back, by node; else all that are not
    settled.
    columns_only: no rows where there are columns.
    """
    state = Deviations(prepared, ball, centre)
    network = prepared.exact
    _enter(state)
    if state.prepared.columned and len(state.centre[0]) == 1 and known is None:
        state.zonotope = Zonotope(prepared, ball)
        state.zonotope.enter()
    for v in range(1, len(network.nodes)):
        if state.zonotope is not None:
            state.zonotope.forget(v)
        site = network.site_of_output.get(v)
        if site is None:
            _linear_node(state, v)
            if known is not None:
                _narrow(state, v, known.below[v], known.above[v])
            spread = v in prepared.sites_of_source and _spread(state, v)
            refined = None
            if v in prepared.sites_of_source and not (spread and columns_only):
                refined = refine_deviations(state, v, chosen)
            if refined is not None:
                _set_reach(state, v, *refined)
            if known is not None or refined is not None:
                # Values are smaller than they seemed before.
                charge(state, v, state.roundings[v].allowance(state.magnitude(v)))
        else:
            _site_output(state, v, site)
    return state


def _enter(state: Deviations) -> None:
    """|Δ| ≤ ρ for every entry of the input, exactly: inputs are not rounded."""
    centre, radius = state.centre[0], state.ball.radius
    entries = prod(centre.shape[1:])
    state.reach[0] = radius.reshape(-1, *(1,) * (centre.dim() - 1)).expand_as(centre)
    state.norms[0] = (
        radius if state.ball.norm == 2 else radius * (entries**0.5 * (1 + gamma(4)))
    )
    state.noise[0] = torch.zeros_like(centre)
    state.below[0] = state.above[0] = state.reach[0]
    state.largest.append(flat(state.magnitude(0)).amax(1))


def _spread(state: Deviations, v: int) -> bool:
    """Whether there are columns at a node; what they show of its entries."""
    zonotope = state.zonotope
    if zonotope is None or v not in state.prepared.columned:
        return False
    zonotope.measure(v)
    _narrow(state, v, *zonotope.interval(v))
    matters = torch.zeros_like(state.below[v], dtype=torch.bool)
    last = max(state.prepared.columned & state.prepared.sites_of_source.keys())
    for k in state.prepared.sites_of_source[v]:
        site, interval = (
            state.prepared.exact.sites[k],
            (state.centre[v], state.below[v], state.above[v]),
        )
        # Errors of settled entries only count for what columns meet later.
        matters |= (
            needs_rows(site, *interval) if v == last else ~is_flat(site, *interval)
        )
    zonotope.sharpen(v, matters)
    _narrow(state, v, *zonotope.interval(v))
    return True


def _narrow(state: Deviations, v: int, below: Tensor, above: Tensor) -> None:
    _set_reach(
        state,
        v,
        torch.minimum(state.below[v], below),
        torch.minimum(state.above[v], above),
    )


def _linear_node(state: Deviations, v: int) -> None:
    prepared, node = state.prepared, state.prepared.exact.nodes[v]
    batch = len(state.centre[0])
    values = torch.zeros(
        batch, *node.shape, dtype=torch.float64, device=prepared.exact.device
    )
    boxes, by_rows, noise = values, values, values
    norm = torch.zeros_like(state.ball.radius)
    # Bounds on entries by boxes and by norms, and one on the norm of all entries.
    for edge, size, rows in zip(
        node.edges, prepared.norms[v], prepared.rows[v], strict=True
    ):
        u = edge.source
        values = values + edge.op.magnitude(state.magnitude(u))
        boxes = boxes + edge.op.magnitude(state.reach[u])
        by_rows = by_rows + rows * state.norms[u].reshape(-1, *(1,) * len(node.shape))
        norm = norm + size * state.norms[u]
        if u in state.noise and v in prepared.prefix:
            noise = noise + edge.op.magnitude(state.noise[u])
    if v not in state.centre:
        state.centre[v] = _computed(state, v)
    state.largest.append(flat(values).amax(1))
    state.roundings[v] = roundings_of(state, v, values)
    round_up = 1 + 2 * prepared.proof[v]
    state.reach[v] = torch.full_like(values, inf)
    # Twice: what a node rounds is less if its values are known to be small.
    for _ in range(2):
        allowance = state.roundings[v].allowance(state.magnitude(v))
        # Norms win where many entries are summed, which cannot all be extreme at once.
        reach = torch.minimum(boxes, by_rows) * round_up + allowance
        if v in prepared.prefix:
            state.noise[v] = noise * round_up + allowance
            reach = torch.minimum(reach, _by_prefix(state, v))
        state.norms[v] = norm * round_up + dual_norms(flat(allowance), 2)
        _set_reach(state, v, reach, reach)
    charge(state, v, allowance)
    if state.zonotope is not None and v in prepared.columned:
        state.zonotope.linear(v, allowance)


def _set_reach(state: Deviations, v: int, below: Tensor, above: Tensor) -> None:
    state.below[v], state.above[v] = below, above
    state.reach[v] = torch.maximum(below, above)
    state.norms[v] = torch.minimum(state.norms[v], dual_norms(flat(state.reach[v]), 2))


def _computed(state: Deviations, v: int) -> Tensor:
    """The value of a node that is only a step of the analysis, or an inner step of an operation."""
    total: Tensor | None = None
    for edge in state.prepared.exact.nodes[v].edges:
        part = edge.op.apply(state.centre[edge.source])
        total = part if total is None else total + part
    assert total is not None
    return total


def _by_prefix(state: Deviations, v: int) -> Tensor:
    """ρ‖row‖ and what rounding adds, at a node of the linear prefix."""
    norms = state.prepared.prefix_norms(v, state.ball.norm)
    if norms is None:
        return torch.full_like(state.noise[v], inf)
    radius = state.ball.radius.reshape(-1, *(1,) * norms.dim())
    return (radius * norms + state.noise[v]) * (1 + gamma(4))


def _site_output(state: Deviations, v: int, index: int) -> None:
    """Replace a nonlinearity by lines, and take the range of its output from them."""
    prepared, site = state.prepared, state.prepared.exact.sites[index]
    u = site.source
    if (
        v not in state.centre
    ):  # the absolute value of a difference, in a maximum of two branches
        assert site.function is not None
        state.centre[v] = site.function(state.centre[u])
    inward = torch.zeros_like(state.centre[u])
    if u in prepared.folding:
        inward = state.walls.allowances[u].reshape(inward.shape)
    centre, value = state.centre[u], state.centre[v]
    replaced = replace_site(
        site, centre, value, state.below[u], state.above[u], inward, prepared
    )
    state.sites[index] = replaced
    state.walls.relaxations[index] = replaced.relaxation
    assert site.slope is not None
    state.norms[v] = torch.full_like(state.ball.radius, inf)
    # Others have no global constant: their norms come from the ranges of entries.
    if not isinstance(site.slope, LocalSlope):
        rounding = dual_norms(flat(replaced.error), 2)
        state.norms[v] = (
            float(site.slope.lipschitz()) * state.norms[u] * (1 + gamma(4))
            + 2 * rounding
        )
    _set_reach(state, v, replaced.below, replaced.above)
    if state.zonotope is not None and v in prepared.columned:
        state.zonotope.site(v, u, replaced)
    state.largest.append(flat(state.magnitude(v)).amax(1))
