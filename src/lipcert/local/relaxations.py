"""What a nonlinearity is replaced by over a ball: lines below and above it, whichever the sign of a row asks for.

All is about deviations: ζ = z′ − z at the input of a site and Δ = φ̂(z′) − φ̂(z) at its
output, both as executed. A relaxation promises, entry by entry, λ_low·ζ + μ_low ≤ Δ ≤
λ_high·ζ + μ_high. So for a row y

    y·Δ ≥ (y⁺λ_low + y⁻λ_high)·ζ + y⁺μ_low + y⁻μ_high,      y⁺ = max(y, 0), y⁻ = min(y, 0).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Self

import torch
from torch import Tensor

from lipcert.local.funnels import flat
from lipcert.network.tangents import Tangent, adjoint_at
from lipcert.rounding import gamma


class Relaxation(ABC):
    """Lines below and above the output of a site; `low` and `high`, (B, 1 or R, n), are their intercepts."""

    low: Tensor
    high: Tensor

    def take(self, index: Tensor) -> Self:
        """That of some inputs."""
        kept = {}
        for entry in fields(self):  # type: ignore[arg-type]
            value = getattr(self, entry.name)
            if isinstance(value, Tensor):
                kept[entry.name] = value[index]
        return replace(self, **kept)  # type: ignore[type-var]

    def pull(self, rows: Tensor) -> tuple[Tensor | None, Tensor]:
        """Rows at the output, (B, R, …), become rows at the input (None: zero) and constants, (B, R).

        In the code y⁺a + y⁻b is y(a+b)/2 + |y|(a−b)/2, which takes fewer passes over
        the rows.
        """
        sizes = rows.abs()
        constant = dot(rows, self.middle()) + dot(sizes, self.spread())
        return self._pull(rows, sizes), constant

    def middle(self) -> Tensor:
        """(μ_low + μ_high)/2."""
        return (self.low + self.high) / 2

    def spread(self) -> Tensor:
        """(μ_low − μ_high)/2."""
        return (self.low - self.high) / 2

    @abstractmethod
    def _pull(self, rows: Tensor, sizes: Tensor) -> Tensor | None: ...


@dataclass(frozen=True)
class Lines(Relaxation):
    """An elementwise nonlinearity; slopes of shape (B, 1 or R, …)."""

    low_slope: Tensor
    high_slope: Tensor
    low: Tensor
    high: Tensor

    def _pull(self, rows: Tensor, sizes: Tensor) -> Tensor:
        return torch.addcmul(rows * self.mean_slope(), sizes, self.half_slope())

    def mean_slope(self) -> Tensor:
        """(λ_low + λ_high)/2."""
        return (self.low_slope + self.high_slope) / 2

    def half_slope(self) -> Tensor:
        """(λ_low − λ_high)/2."""
        return (self.low_slope - self.high_slope) / 2


@dataclass(frozen=True)
class Constants(Relaxation):
    """Anything, by bounds on its output alone."""

    low: Tensor
    high: Tensor

    def _pull(self, rows: Tensor, sizes: Tensor) -> None:
        return None


@dataclass(frozen=True)
class Picks(Relaxation):
    """Largest entries of disjoint sets, as max-pooling gives: no smaller than the entry that has been picked in each.

    `settled`, (B, …): where no other entry can be larger, so that the largest entry is
    the picked one. `extremum` is 1, or −1 for smallest entries. `picking`, (B, …), is a
    point at which the function returns what has been picked.
    """

    function: Callable[[Tensor], Tensor]
    picking: Tensor
    settled: Tensor
    extremum: int
    low: Tensor
    high: Tensor

    def _pull(self, rows: Tensor, sizes: Tensor) -> Tensor:
        kept = torch.where(
            self.settled[:, None] | (self.extremum * rows > 0), rows, 0.0
        )
        point = self.picking[:, None].repeat_interleave(kept.shape[1], 1)
        pulled = adjoint_at(self.function, point.flatten(0, 1), kept.flatten(0, 1))
        return pulled.reshape(point.shape)


@dataclass(frozen=True)
class Plane(Relaxation):
    """The derivative of a function at the centre, and a remainder."""

    function: Callable[[Tensor], Tensor]
    tangent: Tangent
    centre: Tensor
    low: Tensor
    high: Tensor

    def _pull(self, rows: Tensor, sizes: Tensor) -> Tensor:
        return self.tangent.adjoint(self.function, self.centre, rows)


def widened(
    values: Tensor, size: Tensor, outward: int, first: int = 1, more: int = 0
) -> Tensor:
    """Intercepts moved away so far that their products with rows, summed in any order, stay on the right side.

    A sum of n products is off by at most γ_n times the sum of the absolute products.
    Means and half differences of two intercepts are summed apart; together their sizes
    are at most twice the larger one. So 4γ_{n+6} is enough, if both intercepts of an
    entry are widened by the larger size; `more` roundings come on top.
    """
    count = prod(values.shape[first:])
    return values + outward * 4 * gamma(count + more + 6) * size


def dot(rows: Tensor, values: Tensor) -> Tensor:
    """(B, R): the product of every row with the values of its input, or with those of its own."""
    entries, factors = flat(rows, 2), flat(values, 2)
    if factors.shape[1] == 1:
        return torch.bmm(entries, factors.transpose(1, 2))[:, :, 0]
    return (entries * factors).sum(2)
