"""Slopes inside a network for the sake of the rows of its logits: one search for all of them together.

The intervals of a layer depend on the slopes for its rows, the lines of that layer on
the intervals, and so on to the differences of logits. All of that is the arithmetic of
the proof itself, and differentiable: α-CROWN's search (Xu et al., 2021), in which every
step is a proof. Rows get slopes of their own, for every nonlinearity before them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lipcert.local.fans import Ascent, Fan, Positions, better, fan_of, with_fans
from lipcert.local.funnels import flat
from lipcert.local.pulling import Pulled, Rows, pull_back, signed_unit_rows
from lipcert.local.replaced import Replaced, bounded_site, needs_rows
from lipcert.local.state import Deviations

_RATE = 0.2
_LAST_RATE = 0.05
_DECAY = 0.98
_TRIED = 6
_RECENT = 3
_FINAL_GAIN = 4
"""What lines that are proved one by one gain over mixtures, in steps."""
_MOST_ENTRIES = 1 << 24
"""Of all slopes; if they are more, nothing is searched for."""


@dataclass
class _Layer:
    """The rows of the inputs of one site, or those of the logits (site None), and their slopes by site."""

    site: int | None
    places: Tensor
    rows: Rows
    constant: Tensor
    positions: dict[int, Positions] = field(default_factory=dict)


def search_jointly(
    state: Deviations, rows: Tensor, best: Pulled, margins: Tensor, steps: int
) -> Pulled:
    """Better bounds for rows of the logits of one input; `state` is all that is known before the search."""
    if _slope_count(state, rows.shape[1]) > _MOST_ENTRIES:
        return best
    layers = _layers(state, rows)
    radius = state.ball.radius
    ascent: Ascent | None = None
    worst: list[float] = []
    with torch.inference_mode(False), torch.enable_grad():
        for _ in range(steps):
            pulled = _pulled(state, layers[-1], _inner_fans(state, layers))
            best = better(best, pulled, radius)
            left = (pulled.at(radius) + margins).clamp(max=0)
            if bool((best.at(radius) + margins > 0).all()) or not left.requires_grad:
                return best
            worst.append(float(left.detach().amin()))
            if _hopeless(worst, steps):
                return best
            if ascent is None:
                ascent = Ascent(_positions(layers), _RATE, _DECAY)
            ascent.step(-left.sum())
    return _finished(state, layers, best, margins, steps)


def _finished(
    state: Deviations, layers: list[_Layer], best: Pulled, margins: Tensor, steps: int
) -> Pulled:
    """Lines that are proved one by one, at last; and more steps for the last rows, which are few."""
    radius, last = state.ball.radius, layers[-1]
    with torch.no_grad():
        fans = _inner_fans(state, layers, proved=True)
    ascent = Ascent(last.positions.values(), _LAST_RATE, _DECAY)
    for step in range(steps + 1):
        with torch.set_grad_enabled(step < steps):
            pulled = _pulled(state, last, fans, proved=step == steps)
            best = better(best, pulled, radius)
            left = (pulled.at(radius) + margins).clamp(max=0)
            if not left.requires_grad or bool((left == 0).all()):
                break
            ascent.step(-left.sum())
    return best


def _positions(layers: list[_Layer]) -> list[Positions]:
    return [positions for layer in layers for positions in layer.positions.values()]


def _hopeless(worst: list[float], steps: int) -> bool:
    """Whether the worst row would not be proved even if all steps gained as much as the last ones: gains shrink."""
    if len(worst) <= _TRIED:
        return False
    gain = max(worst[-1] - worst[-1 - _RECENT], 0.0) / _RECENT
    return worst[-1] + gain * (steps - len(worst) + _FINAL_GAIN) < 0


def _open_places(state: Deviations) -> dict[int, Tensor]:
    """(1, R) for every site: the entries of its input for which narrower intervals can change its lines."""
    prepared = state.prepared
    places = {}
    for k, site in enumerate(prepared.exact.sites[1:-1], start=1):
        v = site.source
        # What a nonlinearity returns, LayerNorm say, has no rows of its own.
        has_rows = v in state.walls.allowances and v not in prepared.prefix
        if state.sites[k].grid is not None and has_rows:
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
                layer.positions[k] = Positions()
    return layers


def _pulled(
    state: Deviations, layer: _Layer, fans: dict[int, Fan], proved: bool = False
) -> Pulled:
    walls = with_fans(state.walls, fans, layer.positions, proved)
    return pull_back(state.prepared, walls, state.ball.norm, layer.rows, layer.constant)


def _inner_fans(
    state: Deviations, layers: list[_Layer], proved: bool = False
) -> dict[int, Fan]:
    """The lines of all sites, from the positions of all layers but the last; every layer narrows the intervals of its
    site."""
    fans = {k: fan_of(site) for k, site in state.sites.items() if site.grid is not None}
    for layer in layers:
        if layer.site is not None:
            pulled = _pulled(state, layer, fans, proved)
            fans[layer.site] = fan_of(_narrowed(state, layer, pulled))
    return fans


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
    narrower = bounded_site(
        site, state.centre[u], state.centre[v], ends[0], ends[1], inward, prepared
    )
    # Lines over the wider interval hold still; a search begins with them.
    return replace(narrower, relaxation=state.sites[layer.site].relaxation)
