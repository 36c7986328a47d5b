"""Intervals of all entries at once, forwards: how a ball of inputs spreads through a convolutional network.

At every node w, deviations of executed values are

    Δ_w = J_w Δ_0 + G_w t + c_w + e_w,      ‖Δ_0‖ ≤ ρ,  |t| ≤ 1,  |e_w| ≤ E_w:

the linear map from the input with one slope λ for every nonlinearity, one column of G
for each nonlinearity that is not settled (half the distance between its two lines of
slope λ; their middle goes into c), and rounding. So

    |Δ_w − c_w| ≤ S_w + E_w,      S_w = ρ‖rows of J_w‖ + Σ|G_w|,

with the dual norm. All sites share this work, whereas rows (see `pulling`) are pulled
back anew for each of them. Columns are computed in float32; a sum of n products is off
by γ_n times the sum of the absolute products, so

    E_w = Σ_e |A_e| E_e + η_w + γ_n Σ_e |A_e| (S_e + |c_e|).

This grows by the row sums of |A|, without any cancellation: where that is too much,
rows are pulled back instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lipcert.local.columns import Bundle, pushed, single_columns
from lipcert.local.prepared import Prepared
from lipcert.local.pulling import Ball
from lipcert.local.replaced import Replaced
from lipcert.local.rounding_rows import rounding_by_rows
from lipcert.local.windows import Scene
from lipcert.rounding import gamma

_TILE = 8
"""Columns of entries in tiles of this size are kept in one bundle."""
_MOST_COLUMNS = 8192
"""Of G; the smaller ones are added to E instead, so that time and memory stay bounded."""
_SMALL = 0.2
"""Rounding errors of less than this share of an interval are left as they are."""
_VANISHED = 1e-24
"""More than what entries lose where products in float32 underflow, 2⁻¹²⁶ each."""

_VANISHED_SQUARE = 1e-37
"""More than 2⁻¹²⁶, the most that a square loses there."""


@dataclass
class Zonotope:
    """The state of the walk for one input; images of float64, (C, H, W), but for the columns."""

    prepared: Prepared
    ball: Ball
    bundles: dict[int, dict[int, Bundle]] = field(default_factory=dict)
    middle: dict[int, Tensor] = field(default_factory=dict)
    sizes: dict[int, Tensor] = field(default_factory=dict)
    errors: dict[int, Tensor] = field(default_factory=dict)
    own_errors: dict[int, Tensor] = field(default_factory=dict)
    slopes: dict[int, Tensor] = field(default_factory=dict)
    bundle_count: int = 0
    column_count: int = 0

    @property
    def full(self) -> bool:
        """Whether all columns are used, so that what is not settled since then counts as errors."""
        return self.column_count >= _MOST_COLUMNS

    def enter(self) -> None:
        """J is the identity at the input."""
        shape = self.prepared.exact.input_shape
        image = torch.zeros(
            shape, dtype=torch.float64, device=self.prepared.exact.device
        )
        self.bundles[0] = self._tiles(torch.ones_like(image), ball=True)
        self.middle[0], self.errors[0] = image, image
        self.sizes[0] = torch.ones_like(image) * self.ball.radius[0]

    def linear(self, v: int, allowance: Tensor) -> None:
        """Push all columns through a linear node; `allowance`, (1, …), is η."""
        node = self.prepared.exact.nodes[v]
        self.bundles[v] = self._pushed(v)
        middle = torch.zeros(
            1, *node.shape, dtype=torch.float64, device=allowance.device
        )
        sizes, errors, both = middle, middle, middle
        for edge in node.edges:
            u = edge.source
            middle = middle + edge.op.apply(self.middle[u][None])
            sizes = sizes + edge.op.magnitude(self.sizes[u][None])
            errors = errors + edge.op.magnitude(self.errors[u][None])
            both = both + edge.op.magnitude(
                (self.sizes[u] + self.middle[u].abs())[None]
            )
        terms = max(edge.op.accumulations for edge in node.edges) + len(node.edges) + 2
        rounding = 2 * gamma(terms, torch.float32) * both
        round_up = 1 + 2 * self.prepared.proof[v]
        self.middle[v] = middle[0]
        self.sizes[v] = sizes[0] * round_up
        errors = errors * round_up
        # Rows that follow errors are off by γ|A|ᵀ|y|.
        rows = 2 * gamma(terms + self.prepared.fan_out, torch.float32) * errors
        own = (rounding * round_up + allowance + rows) * (1 + gamma(4)) + _VANISHED
        self.own_errors[v] = own[0]
        self.errors[v] = (errors + own)[0] * (1 + gamma(2))

    def measure(self, v: int) -> None:
        """Sum over the columns at a node."""
        self.sizes[v] = torch.minimum(self.sizes[v], self._sizes(v))

    def sharpen(self, v: int, matters: Tensor) -> None:
        """Follow rounding errors by rows where they are not small; `matters`, (1, …), says where they count."""
        frames = self.prepared.frames(v)
        wanted = matters[0] & (self.errors[v] > _SMALL * self.sizes[v])
        # With all columns used, errors are not those of rounding any more.
        if frames is None or self.full or not bool(wanted.any()):
            return
        scene = Scene(self.prepared.exact, v, frames)
        bounds = rounding_by_rows(
            scene, self.own_errors, self.errors, self.slopes, wanted
        )
        errors = self.errors[v].clone()
        errors[wanted] = torch.minimum(errors[wanted], bounds)
        self.errors[v] = errors

    def interval(self, v: int) -> tuple[Tensor, Tensor]:
        """How far the entries of a node fall and rise, (1, …) each; infinite where float32 overflows."""
        reach = self.sizes[v] + self.errors[v]
        outward = gamma(6) * (reach + self.middle[v].abs())
        below, above = (
            reach - self.middle[v] + outward,
            reach + self.middle[v] + outward,
        )
        known = torch.isfinite(below) & torch.isfinite(above)
        below = torch.where(known, below.clamp(min=0.0), torch.inf)
        above = torch.where(known, above.clamp(min=0.0), torch.inf)
        return below[None], above[None]

    def site(self, v: int, u: int, replaced: Replaced) -> None:
        """Go on behind a nonlinearity with its chords; what is off by no more than rounding is counted as such."""
        graph = replaced.grid
        assert graph is not None
        run = (graph.places[-1] - graph.places[0]).clamp(min=1e-300)
        chord = ((graph.values[-1] - graph.values[0]) / run).clamp(
            -graph.steepest, graph.steepest
        )
        # As columns are multiplied by it.
        slopes = chord.float().clamp(-graph.steepest, graph.steepest)
        exact = slopes.double()
        # The error once more, as rounding may take a slope above the steepest.
        slack = replaced.allowance + graph.error
        low = (graph.low(exact[:, None])[:, 0] - slack)[0]
        high = (graph.high(exact[:, None])[:, 0] + slack)[0]
        half = (high - low) / 2 * (1 + gamma(8)) + gamma(4) * (high.abs() + low.abs())
        steep = exact[0].abs()
        self.middle[v] = exact[0] * self.middle[u] + (low + high) / 2
        moved = (
            4
            * gamma(2, torch.float32)
            * (steep * (self.sizes[u] + self.middle[u].abs()) + half)
        )
        passed = steep * self.errors[u]
        loose = self._loose(half, self.errors[u])
        own = (
            moved + torch.where(loose, 0.0, half) + gamma(4, torch.float32) * passed
        ) * (1 + gamma(8)) + _VANISHED
        self.slopes[v], self.own_errors[v] = exact[0], own
        self.errors[v] = (passed + own) * (1 + gamma(2))
        self.sizes[v] = (steep * self.sizes[u] + torch.where(loose, half, 0.0)) * (
            1 + gamma(4)
        )
        self.bundles[v] = {
            key: bundle.times(slopes[0]) for key, bundle in self.bundles[u].items()
        }
        self.bundles[v].update(self._tiles(torch.where(loose, half, 0.0), ball=False))

    def forget(self, v: int) -> None:
        """Drop the columns that no node from v on reads."""
        for u in list(self.bundles):
            if self.prepared.last_reader[u] < v:
                del self.bundles[u]

    def _loose(self, half: Tensor, errors: Tensor) -> Tensor:
        """The entries that get a column of their own."""
        loose = half > errors
        left = _MOST_COLUMNS - self.column_count
        if int(loose.sum()) > left:
            largest = torch.where(loose, half, 0.0).flatten().topk(left).indices
            chosen = torch.zeros_like(loose).flatten().index_fill(0, largest, True)
            loose = loose & chosen.reshape(half.shape)
        self.column_count += int(loose.sum())
        return loose

    def _tiles(self, sizes: Tensor, ball: bool) -> dict[int, Bundle]:
        """Columns for the entries of an image that are not zero, tile by tile."""
        made: dict[int, Bundle] = {}
        channel, y, x = sizes.nonzero().unbind(1)
        # An image of width 20 has three tiles in a row: 0–7, 8–15 and 16–19.
        columns = -(-sizes.shape[2] // _TILE)
        tile = (y // _TILE) * columns + x // _TILE
        for number in sorted(set(tile.tolist())):
            some = (tile == number).nonzero().flatten()
            entries = (channel[some], y[some], x[some])
            made[self.bundle_count] = single_columns(
                *entries, sizes[entries], len(sizes), ball
            )
            self.bundle_count += 1
        return made

    def _pushed(self, v: int) -> dict[int, Bundle]:
        total: dict[int, Bundle] = {}
        for edge in self.prepared.exact.nodes[v].edges:
            for key, bundle in self.bundles[edge.source].items():
                image = pushed(bundle, edge.op)
                if image is None:
                    continue
                if key in total:
                    image = total[key].plus(image)
                total[key] = image
        return total

    def _sizes(self, v: int) -> Tensor:
        """S: sums over the columns, rounded up."""
        shape = self.prepared.exact.nodes[v].shape
        squares = torch.zeros(
            shape, dtype=torch.float64, device=self.prepared.exact.device
        )
        total = squares.clone()
        for bundle in self.bundles[v].values():
            count, height, width = len(bundle.values), *bundle.values.shape[2:]
            # In the order in which they are in memory.
            columns = bundle.values.permute(0, 2, 3, 1).reshape(count, -1)
            euclidean = bundle.ball and self.ball.norm == 2
            entries = columns.square() if euclidean else columns.abs()
            sums = (
                entries.sum(0).double() * (1 + gamma(count + 4, torch.float32))
                + count * _VANISHED_SQUARE
            )
            sums = sums.reshape(height, width, -1).permute(2, 0, 1)
            if euclidean:
                squares[bundle.seen()] += sums
            elif bundle.ball:
                total[bundle.seen()] += sums * self.ball.radius[0]
            else:
                total[bundle.seen()] += sums
        if self.ball.norm == 2:
            total = total + squares.sqrt() * self.ball.radius[0]
        return total * (1 + gamma(2 * self.bundle_count + 8))
