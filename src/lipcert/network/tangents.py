"""Nonlinearities without a global constant that are bounded over a box: products, normalisation, softmax.

Around a centre c each is φ(c + ζ) = φ(c) + J(c)ζ + r, and `remainder` bounds |r| for all |ζ| ≤ d. Where φ is not a
product, r = (J(ξ) − J(c))ζ by the mean value theorem, and what bounds the entries of J over the box bounds r. `error`
bounds what the executed operator is off by, from the largest inputs M and outputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import prod
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from lipcert.errors import UnsupportedError, UnsupportedNode
from lipcert.network.linear import LinearOp
from lipcert.network.program import Live, Shape
from lipcert.network.slopes import Slope
from lipcert.rounding import gamma

ONLY_LOCALLY = "use a network without it, or lipcert.certify_local, which bounds it over a ball"
"""For operations that have no global constant."""
_FLUSHED = 2.0**21
"""How many of the smallest normal numbers an entry may lose, for factors of up to 2^20."""


@dataclass(frozen=True)
class FlatEmbed(LinearOp):
    """The entries one after the other in a longer vector, from `offset` on, among zeros."""

    in_shape: Shape
    out_shape: Shape
    offset: int
    terms = 0

    def _apply(self, x: Tensor) -> Tensor:
        after = self.out_shape[0] - self.offset - prod(self.in_shape)
        return F.pad(x.reshape(x.shape[0], -1), (self.offset, after))

    def _adjoint(self, y: Tensor) -> Tensor:
        return y.narrow(1, self.offset, prod(self.in_shape)).reshape(y.shape[0], *self.in_shape)

    def _magnitude(self, x: Tensor) -> Tensor:
        return self._apply(x)


class Tangent(ABC):
    """The facts of one operator; arguments are batches in float64, results have the shape of its output."""

    @abstractmethod
    def linear(self, centre: Tensor, reach: Tensor) -> Tensor:
        """A bound on |J(c)|·reach in which the terms of every entry of J are taken by their absolute values."""

    @abstractmethod
    def remainder(self, centre: Tensor, reach: Tensor) -> Tensor:
        """A bound on |r| for |ζ| ≤ reach."""

    @abstractmethod
    def error(self, centre: Tensor, reach: Tensor, outputs: Tensor, dtype: torch.dtype) -> Tensor:
        """A bound on the rounding errors over the box; `outputs` bounds the absolute values of the result."""


@dataclass(frozen=True)
class LocalSlope(Slope):
    """A site that is only bounded over balls: whatever asks for its slopes is refused."""

    tangent: Tangent | None = None

    def interval(self) -> NoReturn:
        remedy = "it has no global constant; it is bounded by lipcert.certify_local only"
        raise UnsupportedError([UnsupportedNode("a product, normalisation or attention", "site", remedy)])

    def lipschitz(self) -> NoReturn:
        self.interval()

    def sector(self) -> NoReturn:
        self.interval()


def local_slope(tangent: Tangent) -> LocalSlope:
    return LocalSlope(0.0, 0.0, elementwise=False, ulps=0.0, tangent=tangent)


@dataclass(frozen=True)
class Pair:
    """Two tensors of these shapes side by side in one vector."""

    first: Shape
    second: Shape

    def split(self, both: Tensor) -> tuple[Tensor, Tensor]:
        size = prod(self.first)
        a, b = both[:, :size], both[:, size:]
        return a.reshape(len(both), *self.first), b.reshape(len(both), *self.second)


@dataclass(frozen=True)
class Product(Tangent):
    """a·b entry by entry, broadcast: r = ζ_a ζ_b. Or a product of matrices, r = ζ_a @ ζ_b, of `terms` products each."""

    pair: Pair
    terms: int = 0

    def _product(self, both: Tensor) -> Tensor:
        a, b = self.pair.split(both)
        if self.terms:
            return a @ b
        return a * b

    def linear(self, centre: Tensor, reach: Tensor) -> Tensor:
        (a, b), (da, db) = self.pair.split(centre.abs()), self.pair.split(reach)
        if self.terms:
            return (a @ db + da @ b) * (1 + gamma(self.terms + 4))
        return (a * db + da * b) * (1 + gamma(4))

    def remainder(self, centre: Tensor, reach: Tensor) -> Tensor:
        return self._product(reach) * (1 + gamma(self.terms + 2))

    def error(self, centre: Tensor, reach: Tensor, outputs: Tensor, dtype: torch.dtype) -> Tensor:
        inputs = (centre.abs() + reach) * (1 + gamma(2))
        lost = (self.terms + 2) * 2 * torch.finfo(dtype).tiny
        largest = self._product(inputs)
        flushed = lost * (1 + inputs.abs().flatten(1).amax(1).reshape(-1, *(1,) * (largest.dim() - 1)))
        return gamma(self.terms + 2, dtype) * largest + flushed


@dataclass(frozen=True)
class Softmax(Tangent):
    """p = softmax(z) along an axis: J_ij = p_i(δ_ij − p_j), so |r_i| ≤ h_i d_i + Σ_j (h_i P_j + p_i h_j) d_j.

    P ≥ p over the box, and h ≥ |p − p(c)|: e^{−2D}p(c) ≤ p ≤ e^{2D}p(c) for deviations of up to D along the axis.
    """

    axis: int
    size: int

    def linear(self, centre: Tensor, reach: Tensor) -> Tensor:
        p = torch.softmax(centre, self.axis) * (1 + 1e-9)
        return p * (reach + (p * reach).sum(self.axis, keepdim=True)) * (1 + 1e-9)

    def remainder(self, centre: Tensor, reach: Tensor) -> Tensor:
        axis = self.axis
        p = torch.softmax(centre, axis) * (1 + 1e-9)  # far more than float64 loses
        spread = reach.amax(axis, keepdim=True).clamp(max=300.0)  # beyond, p may be anything up to 1
        most = torch.minimum(p * torch.exp(2 * spread) * (1 + 1e-9), torch.ones_like(p))
        h = torch.maximum(most - p, p * -torch.expm1(-2 * spread)) * (1 + 1e-9) + 1e-15
        along = h * (most * reach).sum(axis, keepdim=True) + p * (h * reach).sum(axis, keepdim=True)
        return (h * reach + along) * (1 + 1e-9)

    def error(self, centre: Tensor, reach: Tensor, outputs: Tensor, dtype: torch.dtype) -> Tensor:
        size = (centre.abs() + reach).amax(self.axis, keepdim=True)
        relative = 2 * (32 + self.size) * gamma(1, dtype)
        return relative * (outputs + size) + _FLUSHED * torch.finfo(dtype).tiny


@dataclass(frozen=True)
class Normalisation(Tangent):
    """y = x̃·s·w + b with x̃ = x − mean, s = (mean(x̃²) + eps)^−½ over the last `axes` axes, n entries.

    J_ij = s(δ_ij − 1/n − x̂_i x̂_j/n) with x̂ = x̃s. ‖x̃‖/√n changes by at most t = ‖ζ‖/√n, which bounds s and so x̂. Then
    |r_i| ≤ |w_i|·(Δs(d_i + mean d) + mean_j((Δs H_i H_j + s(h_i H_j + |x̂_i|h_j))d_j)), H ≥ |x̂|, h ≥ |x̂ − x̂(c)|.
    """

    axes: int
    eps: float
    weight: Live | None = None
    bias: Live | None = None

    def _dims(self, x: Tensor) -> tuple[tuple[int, ...], int]:
        dims = tuple(range(x.dim() - self.axes, x.dim()))
        return dims, prod(x.shape[-self.axes :])

    def _weight(self, like: Tensor) -> Tensor | float:
        if self.weight is None:
            return 1.0
        return self.weight().to(like).abs()

    def _deviations(self, x: Tensor, reach: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x̃ and √mean(x̃²) at the centre, and the smallest and largest standard deviation over the box."""
        dims, count = self._dims(x)
        centred = x - x.mean(dims, keepdim=True)
        root = centred.square().mean(dims, keepdim=True).sqrt()
        slack = gamma(4 * count + 16) * x.abs().amax(dims, keepdim=True) + 1e-300
        t = reach.square().mean(dims, keepdim=True).sqrt() * (1 + gamma(count + 8)) + slack
        low = ((root - t).clamp(min=0).square() + self.eps).sqrt() * (1 - 1e-12)
        high = ((root + t).square() + self.eps).sqrt() * (1 + 1e-12)
        return centred, root, low, high

    def linear(self, centre: Tensor, reach: Tensor) -> Tensor:
        dims, count = self._dims(centre)
        centred, root, _, _ = self._deviations(centre, reach)
        s = (root.square() + self.eps).rsqrt() * (1 + 1e-9)
        unit = (centred.abs() + gamma(4 * count + 16) * centre.abs().amax(dims, keepdim=True)) * s
        moved = reach + reach.mean(dims, keepdim=True) + unit * (unit * reach).mean(dims, keepdim=True)
        return s * moved * self._weight(centre) * (1 + 1e-9)

    def remainder(self, centre: Tensor, reach: Tensor) -> Tensor:
        dims, count = self._dims(centre)
        centred, root, low, high = self._deviations(centre, reach)
        s = (root.square() + self.eps).rsqrt() * (1 + 1e-12)
        change = torch.maximum(1 / low - s, s - 1 / high) * (1 + 1e-9) + 1e-12 * s
        moved = reach + reach.mean(dims, keepdim=True)
        slack = gamma(4 * count + 16) * centre.abs().amax(dims, keepdim=True)
        unit = (centred.abs() + slack) * s
        h = (centred.abs() + slack) * change + moved / low + slack * s
        most = unit + h
        mixed = change * most * (most * reach).mean(dims, keepdim=True)
        mixed = mixed + s * (h * (most * reach).mean(dims, keepdim=True) + unit * (h * reach).mean(dims, keepdim=True))
        return (change * moved + mixed) * self._weight(centre) * (1 + 1e-9)

    def error(self, centre: Tensor, reach: Tensor, outputs: Tensor, dtype: torch.dtype) -> Tensor:
        """Deviations x̃ are off by a = 2γM, σ by a relative a/σ + γ, y by |w|(a s(1 + |x̂|) + |x̂|γ); all times 4."""
        dims, count = self._dims(centre)
        centred, _, low, _ = self._deviations(centre, reach)
        largest = (centre.abs() + reach).amax(dims, keepdim=True)
        each = gamma(count + 16, dtype)
        a, s = 2 * each * largest, 1 / low
        unit = (centred.abs() + reach + reach.mean(dims, keepdim=True)) * s
        made = 4 * self._weight(centre) * (a * s * (1 + unit) + unit * each)
        offset = self.bias().to(centre).abs() if self.bias is not None else 0.0
        made = made + 8 * gamma(1, dtype) * (outputs + offset) + _FLUSHED * torch.finfo(dtype).tiny
        return torch.where(a * s < 0.1, made, torch.inf)
