"""Slopes inside a network for the sake of the rows of its logits: one search for all of them together.

The intervals of a layer depend on the slopes for its rows, the lines of that layer on
the intervals, and so on to the differences of logits. All of that is the arithmetic of
the proof itself, and differentiable: α-CROWN's search (Xu et al., 2021), in which every
step is a proof. Rows get slopes of their own, for every nonlinearity before them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lipcert.local.funnels import flat
from lipcert.local.moving_slopes import MovingSlopes, better, with_lines
from lipcert.local.pulling import Pulled, Rows, pull_back, signed_unit_rows
from lipcert.local.replaced import Replaced, needs_rows, replace_site
from lipcert.local.state import Deviations

_RATE = 0.1
_DECAY = 0.98
_MOST_ENTRIES = 1 << 24
"""Of all slopes; if they are more, nothing is searched for."""


@dataclass
class _Layer:
    """The rows of the inputs of one site, or those of the logits (site None), and their slopes by site."""

    site: int | None
    places: Tensor
    rows: Rows
    constant: Tensor
    slopes: dict[int, MovingSlopes] = field(default_factory=dict)


def search_jointly(
    state: Deviations, rows: Tensor, best: Pulled, margins: Tensor, steps: int
) -> Pulled:
    """Better bounds for rows of the logits of one input; `state` is all that is known before the search."""
    if _slope_count(state, rows.shape[1]) > _MOST_ENTRIES:
        return best
    layers = _layers(state, rows)
    parameters = []
    for layer in layers:
        for slopes in layer.slopes.values():
            parameters += slopes.parts()
    if not parameters:
        return best
    optimizer = torch.optim.Adam(parameters, lr=_RATE)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, _DECAY)
    radius = state.ball.radius
    with torch.inference_mode(False), torch.enable_grad():
        for _ in range(steps):
            pulled = _walk(state, layers)
            bounds = pulled.at(radius)
            best = better(best, pulled, radius)
            loss = -(bounds + margins).clamp(max=0).sum()
            if bool((best.at(radius) + margins > 0).all()) or not loss.requires_grad:
                break
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            for layer in layers:
                for slopes in layer.slopes.values():
                    slopes.clamp()
    return best


def _open_places(state: Deviations) -> dict[int, Tensor]:
    """(1, R) for every site: the entries of its input for which narrower intervals can change its lines."""
    prepared = state.prepared
    places = {}
    for k, site in enumerate(prepared.exact.sites[1:-1], start=1):
        v = site.source
        if state.sites[k].grid is not None and v not in prepared.prefix:
            needed = flat(
                needs_rows(site, state.centre[v], state.below[v], state.above[v])
            )
            places[k] = needed[0].nonzero().T
    return places


def _slope_count(state: Deviations, last_rows: int) -> int:
    """How many slopes `_layers` makes: two for every nonlinearity before each row, rows of both signs."""
    places = _open_places(state)
    before, total = 0, 0
    for k, replaced in state.sites.items():
        if k in places:
            total += 2 * places[k].shape[1] * 2 * before
        if replaced.grid is not None:
            before += state.centre[state.prepared.exact.sites[k].source].numel()
    return total + 2 * last_rows * before


def _layers(state: Deviations, rows: Tensor) -> list[_Layer]:
    """The rows of every layer whose nonlinearities are not settled, and those of the logits last."""
    prepared = state.prepared
    layers: list[_Layer] = []
    for k, places in _open_places(state).items():
        if places.shape[1]:
            v = prepared.exact.sites[k].source
            at, constant = signed_unit_rows(
                prepared, v, places, state.walls.allowances[v]
            )
            layers.append(_Layer(k, places, at, constant))
    last = prepared.exact.sites[-1].source
    none = torch.zeros(1, 0, dtype=torch.long, device=rows.device)
    constant = torch.zeros(rows.shape[:2], dtype=torch.float64, device=rows.device)
    layers.append(_Layer(None, none, {last: rows}, constant))
    for layer in layers:
        for k, replaced in state.sites.items():
            if replaced.grid is not None and (layer.site is None or k < layer.site):
                layer.slopes[k] = MovingSlopes(replaced, layer.constant.shape[1])
    return layers


def _walk(state: Deviations, layers: list[_Layer]) -> Pulled:
    """The bounds of the last rows, from the slopes of all layers; every layer narrows the intervals of its site."""
    sites = dict(state.sites)
    for layer in layers:
        walls = with_lines(state.walls, sites, layer.slopes)
        pulled = pull_back(
            state.prepared, walls, state.ball.norm, layer.rows, layer.constant
        )
        if layer.site is None:
            return pulled
        sites[layer.site] = _narrowed(state, layer, pulled)
    raise AssertionError("the rows of the logits come last")


def _narrowed(state: Deviations, layer: _Layer, pulled: Pulled) -> Replaced:
    """A site whose input is in the intervals that rows have shown, where these are narrower than known ones."""
    assert layer.site is not None
    prepared = state.prepared
    site = prepared.exact.sites[layer.site]
    u, v = site.source, site.output
    low, high = (-pulled.at(state.ball.radius)).clamp(min=0).chunk(2, dim=1)
    ends = []
    for known, shown in ((state.below, low), (state.above, high)):
        before = flat(known[u])
        narrow = torch.minimum(before.gather(1, layer.places), shown.detach())
        known[u] = before.scatter(1, layer.places, narrow).reshape(
            known[u].shape
        )  # what is proved once stays known
        # The narrower end, with the gradient of the one that has just been shown: it
        # would vanish otherwise.
        moving = narrow + (shown - shown.detach())
        ends.append(before.scatter(1, layer.places, moving).reshape(known[u].shape))
    inward = torch.zeros_like(state.centre[u])
    if u in prepared.folding:
        inward = state.walls.allowances[u].reshape(inward.shape)
    return replace_site(
        site, state.centre[u], state.centre[v], ends[0], ends[1], inward, prepared
    )
