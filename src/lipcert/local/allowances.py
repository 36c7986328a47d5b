"""η: how far a linear node is from what its edges promise, by roundings at the centre and at another point.

Let F(v) = Σ_e A_e v_e + b. Executed values are v̂_w = F(v̂) + δ, so Δ_w = Σ_e A_e Δ_e +
δ(x′) − δ(x). At the other point, for sums in any order,

    |δ(x′)| ≤ γ_n T + what underflows,      T = Σ_e |A_e| M_e + |b|,      M ≥ |v̂′|.

At the centre, δ(x) = v̂_w(x) − F(v̂(x)) is a number: float64 shows it, but for γ₆₄ T.

Where a node is one sum of n products and b, more is known of the other point. Let P and
N be the sums of its positive and of its negative terms, without their signs. Whatever
the order, there are at most n additions, and the terms that one of them has collected
are between −N and P; max(P, N) = (T + |F|)/2. With E the sum of all errors, those of
products are at most uT together, and those of additions u(max(P, N) + E) each. So

    E ≤ uT + nu(max(P, N) + E),      E ≤ (nu·(T + |F|)/2 + uT)/(1 − nu):

about half of γ_n T where terms cancel. |F| is at most |v̂_w(x′)| + γ_n T.

Rows that are pulled back in float64 are off by γ₆₄|A|ᵀ|y|; that times M is part of η too.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from lipcert.local.funnels import flat
from lipcert.local.state import Deviations
from lipcert.rounding import gamma


@dataclass(frozen=True)
class Roundings:
    """What the roundings of a linear node come from; tensors of float64, (B, …).

    fixed: all of η but for the roundings at the other point.
    sums: T. relative: γ_n, of the program's type.
    count: n, if the node is one sum of n products; else 0.
    lost: what underflows.
    """

    fixed: Tensor
    sums: Tensor
    relative: float
    count: int
    lost: float

    def allowance(self, size: Tensor) -> Tensor:
        """η, if no executed value of the node exceeds `size`."""
        collected = self.sums
        if self.count:
            value = size + self.relative * self.sums + self.lost
            larger = (self.sums + value) / 2 + self.sums / self.count
            collected = torch.minimum(collected, larger)
        return self.fixed + self.relative * collected * (1 + gamma(10))


def roundings_of(state: Deviations, v: int, values: Tensor) -> Roundings:
    """Those of a node, from Σ|A|M as computed."""
    prepared = state.prepared
    relative, lost = prepared.executed[v], prepared.lost[v]
    lost = lost * (1 + 2 * relative)
    fixed, sums, count = 2 * prepared.proof[v] * values, values, 0
    if relative:
        sums = values * (1 + 2 * prepared.proof[v])
        if v in prepared.offsets:
            sums = sums + prepared.offsets[v]
        at_centre = relative * sums + lost
        if v in prepared.added:
            count = prepared.exact.nodes[v].roundings + 1
            at_centre = torch.minimum(at_centre, _seen_at_centre(state, v, sums))
        fixed = (fixed + at_centre + lost) * (1 + gamma(8))
    # Weights below `tiny` may be taken for zero, at both points: tiny·Σ|v| each.
    if prepared.denormal[v]:
        tiny = 2.01 * torch.finfo(prepared.network.dtype).tiny
        for edge in prepared.exact.nodes[v].edges:
            total = flat(state.magnitude(edge.source)).sum(1) * tiny
            fixed = fixed + total.reshape(-1, *(1,) * (values.dim() - 1))
    return Roundings(fixed, sums, relative, count, lost)


def _seen_at_centre(state: Deviations, v: int, sums: Tensor) -> Tensor:
    """|δ(x)|, rounded up."""
    prepared = state.prepared
    total = prepared.added[v]
    for edge in prepared.exact.nodes[v].edges:
        total = total + edge.op.apply(state.centre[edge.source])
    seen = (state.centre[v] - total).abs() * (1 + gamma(2))
    return seen + 2 * prepared.proof[v] * sums + prepared.lost[v]


def charge(state: Deviations, v: int, charged: Tensor) -> None:
    """What rows pay at a node: its allowance, and those of nodes before that they reach through it alone.

    A row y at v is Aᵀy at such a node, where A scales entries; so it pays |A|η for
    every unit of y.
    """
    prepared, node = state.prepared, state.prepared.exact.nodes[v]
    funnel = prepared.funnel(state.ball.norm)
    if v == funnel.node:
        charged = state.noise[v] + funnel.rounding(state.ball.radius).reshape(
            charged.shape
        )
    else:
        for edge in node.edges:
            if edge.source in prepared.passing:
                before = state.walls.allowances[edge.source].reshape(
                    -1, *edge.op.in_shape
                )
                charged = charged + edge.op.magnitude(before) * (1 + gamma(4))
                state.walls.folded.add(edge.source)
    state.walls.allowances[v] = flat(charged)[:, None] * (
        1 + 2 * gamma(prod(node.shape) + 2)
    )
    if v in prepared.folding:
        state.walls.folded.add(v)
