"""Rows at a node, pulled back to the input through lines in place of the nonlinearities.

For a node w that computes v = Σ_e A_e v_e + b as executed, deviations from the centre
satisfy Δ_w = Σ_e A_e Δ_e + δ_w with |δ_w| ≤ η_w, rounding at both points. So a row y at
w is the rows A_eᵀy at the sources, less |y|·η_w. Computed rows are off by γ|A_e|ᵀ|y|
themselves; times the deviations of the sources, that is part of η_w too (see
`deviations`). At the input, y·Δ ≥ −ρ‖y‖ with the dual norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from lipcert.local.funnels import dual_norms, flat
from lipcert.local.prepared import Prepared
from lipcert.local.relaxations import Relaxation, dot
from lipcert.network.linear import Dense
from lipcert.network.normal_form import Edge
from lipcert.rounding import gamma

Rows = dict[int, Tensor]
"""Rows at nodes, (B, R, …) each, whose products with deviations are added."""
VANISHED = 1e-150
"""More than what rows lose where products underflow: 2⁻¹⁰⁷⁴ each, times deviations of up to 1e100; beyond, nothing is
certified."""


@dataclass(frozen=True)
class Ball:
    """‖x′ − x‖ ≤ radius in l2 or l∞ around each input; `radius` is (B,), float64."""

    norm: float
    radius: Tensor


@dataclass(frozen=True)
class Pulled:
    """Rows have become y·Δ ≥ constant − ρ·steepness for deviations within ρ, up to the radius of the ball.

    (B, R) each, or (P,) for rows of any inputs.
    """

    constant: Tensor
    steepness: Tensor

    def at(self, radius: Tensor) -> Tensor:
        """The bound at the radii ρ of the rows' inputs, (B,) or (P,)."""
        if self.steepness.dim() == 2:
            radius = radius[:, None]
        fall = radius * self.steepness
        # A product and three sums, rounded towards less.
        return self.constant - fall - gamma(6) * (self.constant.abs() + fall)

    def take(self, index: Tensor) -> Pulled:
        """Those of some inputs."""
        return Pulled(self.constant[index], self.steepness[index])


@dataclass(frozen=True)
class Walls:
    """What rows meet on their way: allowances η, (B, 1, n), of linear nodes, and the relaxations of sites.

    folded: nodes whose allowances are part of what the only site or node that reads
    them asks for.
    """

    allowances: dict[int, Tensor]
    relaxations: dict[int, Relaxation]
    folded: set[int]

    def take(self, index: Tensor) -> Walls:
        """Those of some inputs."""
        allowances = {v: value[index] for v, value in self.allowances.items()}
        relaxations = {
            k: relaxation.take(index) for k, relaxation in self.relaxations.items()
        }
        return Walls(allowances, relaxations, self.folded)

    def charge(self, v: int, rows: Tensor) -> Tensor:
        """(B, R): −|y|·η for rows at a linear node."""
        if v in self.folded:
            return torch.zeros(rows.shape[:2], dtype=rows.dtype, device=rows.device)
        return -dot(rows.abs(), self.allowances[v])


def pull_back(
    prepared: Prepared,
    walls: Walls,
    norm: float,
    rows: Rows,
    constant: Tensor,
    quick: bool = False,
) -> Pulled:
    """The rows at the input; `constant`, (B, R), is what is known beforehand. `quick`: see `Funnel.steepness`."""
    network, values = prepared.exact, dict(rows)
    total, size, count = constant, constant.abs(), 4
    steepness = torch.zeros_like(constant)
    funnel = prepared.funnel(norm)
    # Topological order: when a node is reached, all that read it have sent their rows.
    for v in range(max(values), -1, -1):
        y = values.pop(v, None)
        if y is None:
            continue
        site = network.site_of_output.get(v)
        if site == 0:
            steepness = dual_norms(flat(y, 2), norm)
            continue
        # All that depends on the input comes through this node, whose matrix leads
        # there at once.
        if v == funnel.node:
            part = walls.charge(v, y)
            steepness = funnel.steepness(flat(y, 2), norm, quick)
            total, size, count = total + part, size + part.abs(), count + 1
            continue
        if site is not None:
            pulled, part = walls.relaxations[site].pull(y)
            if pulled is not None:
                _add(values, network.sites[site].source, pulled)
        else:
            part = walls.charge(v, y)
            _pull_through(network.nodes[v].edges, y, values)
        total, size, count = total + part, size + part.abs(), count + 1
    # The constant is a sum of `count` parts, off by at most γ times the sum of their
    # sizes.
    return Pulled(total - gamma(count) * size - VANISHED, steepness)


def _pull_through(edges: Sequence[Edge], y: Tensor, values: dict[int, Tensor]) -> None:
    """Send the rows of a linear node, (B, R, …), to its sources."""
    for edge in edges:
        pulled = edge.op.adjoint(y.flatten(0, 1))
        _add(values, edge.source, pulled.reshape(*y.shape[:2], *edge.op.in_shape))


def signed_unit_rows(
    prepared: Prepared, v: int, places: Tensor, allowance: Tensor
) -> tuple[Rows, Tensor]:
    """±(unit row) for each place of a linear node, (B, R), as rows at its sources: (B, 2R, …), and constants, (B, 2R).

    Rows of a dense layer are those of its weight, so that nothing need be multiplied.
    """
    node = prepared.exact.nodes[v]
    count, rows = places.shape
    rows_at: Rows = {}
    for edge in node.edges:
        if isinstance(edge.op, Dense) and len(node.shape) == 1:
            chosen = edge.op.weight()[places]
        else:
            seed = torch.zeros(
                count, rows, prod(node.shape), dtype=torch.float64, device=places.device
            )
            # seed[b, r] is the unit row of places[b, r].
            seed.scatter_(2, places[:, :, None], 1.0)
            chosen = edge.op.adjoint(seed.reshape(count * rows, *node.shape)).reshape(
                count, rows, *edge.op.in_shape
            )
        # y·Δ bounds an entry from below, and −y·Δ from above.
        _add(rows_at, edge.source, torch.cat([chosen, -chosen], 1))
    constant = -allowance[:, 0].gather(1, places)
    return rows_at, torch.cat([constant, constant], 1)


def _add(values: Rows, node: int, rows: Tensor) -> None:
    if node in values:
        rows = values[node] + rows
    values[node] = rows
