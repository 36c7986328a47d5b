"""Nonlinearities without a global constant that are bounded over a box; here, products.

Around a centre c each is φ(c + ζ) = φ(c) + J(c)ζ + r, and `remainder` bounds |r| for
all |ζ| ≤ d. Where φ is not a product, r_i = (J_i(ξ) − J_i(c))ζ by the mean value
theorem, and what bounds the entries of J over the box bounds r.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from lipcert.errors import UnsupportedError, UnsupportedNode
from lipcert.network.linear import LinearOp
from lipcert.network.program import Shape
from lipcert.network.slopes import Slope
from lipcert.rounding import gamma

ONLY_LOCALLY = (
    "use a network without it, or lipcert.certify_local, which bounds it over a ball"
)
"""For operations that have no global constant."""
VANISHING = 1e-300
"""More than a float64 exponential or product loses where it underflows."""
COARSE = 0.1
"""Relative errors beyond this are not bounded."""


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
        return y.narrow(1, self.offset, prod(self.in_shape)).reshape(
            y.shape[0], *self.in_shape
        )

    def _magnitude(self, x: Tensor) -> Tensor:
        return self._apply(x)


class Tangent(ABC):
    """The facts of one operator; arguments are batches in float64, results have the shape of its output."""

    def adjoint(
        self, function: Callable[[Tensor], Tensor], centre: Tensor, rows: Tensor
    ) -> Tensor:
        """J(c)ᵀy for rows y, (B, R, …), as computed in float64."""
        # (B, R, …): every row has a copy of its own centre, so that one backward pass
        # does all rows.
        point = centre[:, None].repeat_interleave(rows.shape[1], 1)
        pulled = adjoint_at(function, point.flatten(0, 1), rows.flatten(0, 1))
        return pulled.reshape(point.shape)

    @abstractmethod
    def linear(self, centre: Tensor, reach: Tensor) -> Tensor:
        """A bound on |J(c)|·reach in which the terms of every entry of J are taken by their absolute values."""

    @abstractmethod
    def remainder(self, centre: Tensor, reach: Tensor) -> Tensor:
        """A bound on |r| for |ζ| ≤ reach."""

    @abstractmethod
    def pulling_error(self, centre: Tensor, reach: Tensor) -> Tensor:
        """E with |(Jᵀy as computed − Jᵀy)·ζ| ≤ |y|·E for all rows y and |ζ| ≤ reach."""

    @abstractmethod
    def error(self, centre: Tensor, reach: Tensor, dtype: torch.dtype) -> Tensor:
        """A bound on the rounding error of the executed operator at any point of the box."""


def adjoint_at(
    function: Callable[[Tensor], Tensor], point: Tensor, rows: Tensor
) -> Tensor:
    """The transposed derivative of a function at a point, applied to rows, by automatic differentiation."""
    # Rows carry gradients where lines are being fitted (`local/sharpening.py`); the
    # point itself is fixed.
    wants_graph = rows.requires_grad
    with torch.inference_mode(False), torch.enable_grad():
        x = point.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(
            function(x), x, rows, create_graph=wants_graph
        )
    return gradient


@dataclass(frozen=True)
class LocalSlope(Slope):
    """A site that is only bounded over balls: whatever asks for its slopes is refused."""

    tangent: Tangent | None = None

    def interval(self) -> NoReturn:
        remedy = (
            "it has no global constant; it is bounded by lipcert.certify_local only"
        )
        raise UnsupportedError(
            [UnsupportedNode("a product, normalisation or attention", "site", remedy)]
        )

    def lipschitz(self) -> NoReturn:
        self.interval()

    def sector(self) -> NoReturn:
        self.interval()


def local_slope(tangent: Tangent) -> LocalSlope:
    return LocalSlope(0.0, 0.0, elementwise=False, ulps=0.0, tangent=tangent)


@dataclass(frozen=True)
class FlatPair:
    """Two tensors of these shapes side by side in one vector."""

    first: Shape
    second: Shape

    def split(self, both: Tensor) -> tuple[Tensor, Tensor]:
        # (B, |a| + |b|) → (B, *shape of a), (B, *shape of b).
        size = prod(self.first)
        a, b = both[:, :size], both[:, size:]
        return a.reshape(len(both), *self.first), b.reshape(len(both), *self.second)


@dataclass(frozen=True)
class Product(Tangent):
    """a·b entry by entry, broadcast: r = ζ_a ζ_b. Or a product of matrices, r = ζ_a @ ζ_b, of `terms` products each."""

    pair: FlatPair
    terms: int = 0

    def _product(self, both: Tensor) -> Tensor:
        a, b = self.pair.split(both)
        if self.terms:
            return a @ b
        return a * b

    def linear(self, centre: Tensor, reach: Tensor) -> Tensor:
        # (a + ζ_a)(b + ζ_b) = ab + (aζ_b + ζ_a b) + ζ_a ζ_b: the linear part, and the
        # remainder below.
        (a, b), (da, db) = self.pair.split(centre.abs()), self.pair.split(reach)
        if self.terms:
            return (a @ db + da @ b) * (1 + gamma(self.terms + 4))
        return (a * db + da * b) * (1 + gamma(4))

    def remainder(self, centre: Tensor, reach: Tensor) -> Tensor:
        return self._product(reach) * (1 + gamma(self.terms + 2))

    def pulling_error(self, centre: Tensor, reach: Tensor) -> Tensor:
        """Rows are sums of products with a and b, over as many entries of the result as share an entry of a or b."""
        steps = self.linear(centre, reach)
        return gamma(prod(steps.shape[1:]) + 2) * steps

    def error(self, centre: Tensor, reach: Tensor, dtype: torch.dtype) -> Tensor:
        """γ of the sum of absolute products, and what is lost of products and operands that underflow."""
        # The largest operands that the box allows, rounded up.
        inputs = (centre.abs() + reach) * (1 + gamma(2))
        largest = self._product(inputs) * (1 + gamma(self.terms + 2))
        tiny = 2 * (self.terms + 2) * torch.finfo(dtype).tiny
        factor = 1 + inputs.flatten(1).amax(1).reshape(-1, *(1,) * (largest.dim() - 1))
        return gamma(self.terms + 2, dtype) * largest * (1 + gamma(4)) + tiny * factor
