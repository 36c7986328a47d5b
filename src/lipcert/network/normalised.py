"""LayerNorm over a box: derivatives, remainders, and the rounding of what is executed and of the proof.

All results are upper bounds. A float64 expression of non-negative terms that takes n
roundings is off by a factor of at most 1 + γ_n, and is multiplied by it; where terms
are subtracted, both are bounded first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, log2, prod, sqrt

import torch
from torch import Tensor

from lipcert.network.program import Live
from lipcert.network.tangents import COARSE, VANISHING, Tangent
from lipcert.rounding import UNIT_ROUNDOFF, gamma


@dataclass(frozen=True)
class _Centre:
    """LayerNorm at the centre of a box; what the proof computes, and between what the true numbers are.

    shifted, scale: x̃ and s as computed.
    sizes: at least |x̃|.
    low, high: s is between.
    off: x̃ is off by at most that.
    least, most: between what s is over the box.
    """

    shifted: Tensor
    scale: Tensor
    sizes: Tensor
    low: Tensor
    high: Tensor
    off: Tensor
    least: Tensor
    most: Tensor


@dataclass(frozen=True)
class Normalisation(Tangent):
    """y = x̃·s·w + b with x̃ = x − mean, s = (mean(x̃²) + eps)^−½ over the last `axes` axes, n entries.

    J_ij = s(δ_ij − 1/n − x̂_i x̂_j/n) with x̂ = x̃s. ‖x̃‖/√n changes by at most t =
    ‖ζ‖/√n, which bounds s and so x̂. Then |r_i| ≤ |w_i|·(Δs(d_i + mean d) + mean_j((Δs
    H_i H_j + s(h_i H_j + |x̂_i|h_j))d_j)), H ≥ |x̂|, h ≥ |x̂ − x̂(c)|.
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

    def _at_centre(self, x: Tensor, reach: Tensor) -> _Centre:
        """A computed mean is off by γ_n·max|x|, so x̃ by `off`, and ‖x̃‖/√n by as much and γ of itself."""
        dims, count = self._dims(x)
        shifted = x - x.mean(dims, keepdim=True)
        off = (gamma(count + 2) + gamma(4)) * x.abs().amax(
            dims, keepdim=True
        ) + VANISHING
        root = shifted.square().mean(dims, keepdim=True).sqrt()
        # The true ‖x̃‖/√n is within `wide` of the computed one, over the box within
        # `wide` + `step`.
        # Squares of numbers below 1e-150 vanish.
        wide = root * gamma(count + 6) + off * (1 + gamma(2)) + 1e-150
        moved = reach.square().mean(dims, keepdim=True).sqrt()
        step = moved * (1 + gamma(count + 6)) + 1e-150
        scale = self._scale(root)
        low = self._scale(root + wide) * (1 - gamma(8))
        high = self._scale((root - wide).clamp(min=0)) * (1 + gamma(8))
        least = self._scale(root + wide + step) * (1 - gamma(10))
        most = self._scale((root - wide - step).clamp(min=0)) * (1 + gamma(10))
        sizes = (shifted.abs() + off) * (1 + gamma(2))
        return _Centre(shifted, scale, sizes, low, high, off, least, most)

    def _scale(self, root: Tensor) -> Tensor:
        """(root² + eps)^−½, off by less than γ_8 if its argument is off by γ_2."""
        return 1 / (root.square() + self.eps).sqrt()

    def adjoint(
        self, function: Callable[[Tensor], Tensor], centre: Tensor, rows: Tensor
    ) -> Tensor:
        """s(q − mean(q) − x̂·mean(q·x̂)) with q = wy; torch's own backward pass loses digits where means are large."""
        dims, _ = self._dims(rows)
        at = self._at_centre(centre, torch.zeros_like(centre))
        unit, scale = (at.shifted * at.scale)[:, None], at.scale[:, None]
        q = rows
        if self.weight is not None:
            q = rows * self.weight().to(rows)
        along = (q * unit).mean(dims, keepdim=True)
        return scale * (q - q.mean(dims, keepdim=True) - unit * along)

    def linear(self, centre: Tensor, reach: Tensor) -> Tensor:
        dims, count = self._dims(centre)
        at = self._at_centre(centre, reach)
        unit = at.sizes * at.high
        along = (unit * reach).mean(dims, keepdim=True)
        moved = reach + reach.mean(dims, keepdim=True) + unit * along
        return at.high * moved * self._weight(centre) * (1 + gamma(count + 12))

    def pulling_error(self, centre: Tensor, reach: Tensor) -> Tensor:
        """s is off by Δ ≤ high − low and x̂ by e ≤ off·high + |x̃|Δ, which changes the entries of J; and roundings."""
        dims, count = self._dims(centre)
        at = self._at_centre(centre, reach)
        change = (at.high - at.low) * (1 + gamma(2))
        e = (at.off * at.high + at.sizes * change) * (1 + gamma(6))
        unit = at.sizes * at.high + e
        means = (unit * reach).mean(dims, keepdim=True)
        entries = change * (reach + reach.mean(dims, keepdim=True) + unit * means)
        along = (e * reach).mean(dims, keepdim=True)
        entries = entries + at.high * (e * means + unit * along)
        total = entries * self._weight(centre) * (1 + gamma(count + 16))
        rounded = gamma(2 * count + 16) * self.linear(centre, reach) * (1 + gamma(4))
        return total + rounded + VANISHING

    def remainder(self, centre: Tensor, reach: Tensor) -> Tensor:
        dims, count = self._dims(centre)
        at = self._at_centre(centre, reach)
        change = torch.maximum(at.most - at.low, at.high - at.least) * (1 + gamma(2))
        moved = (reach + reach.mean(dims, keepdim=True)) * (1 + gamma(count + 4))
        unit = at.sizes * at.high
        # x̂ − x̂(c) = x̃(c)·(s − s(c)) + (x̃ − x̃(c))·s.
        h = at.sizes * change + moved * at.most
        largest = unit + h
        means = (largest * reach).mean(dims, keepdim=True)
        mixed = change * largest * means
        along = (h * reach).mean(dims, keepdim=True)
        mixed = mixed + at.high * (h * means + unit * along)
        return (change * moved + mixed) * self._weight(centre) * (1 + gamma(count + 16))

    def error(self, centre: Tensor, reach: Tensor, dtype: torch.dtype) -> Tensor:
        """Of torch's kernel for processors, which merges moments; see `moment_errors`. Not bounded on other devices.

        With |μ̂ − μ| ≤ a and |σ̂ − σ| ≤ b + cσ the computed s is off by a relative t ≤
        (b·s + c)/(1 − …), x·s − μ·s by s(a + 4uM)(1 + t) and |x̂|t, and the product
        with w and the sum with b are rounded.
        """
        dims, count = self._dims(centre)
        at = self._at_centre(centre, reach)
        unit = UNIT_ROUNDOFF[dtype]
        largest = (centre.abs() + reach).amax(dims, keepdim=True) * (1 + gamma(2))
        mean, spread = moment_errors(count)
        tiny = torch.finfo(dtype).tiny
        share = unit * spread * largest * at.most + gamma(count + 16, dtype)
        share = share + 16 * (count + 1) * tiny / self.eps
        t = share / (1 - share) * (1 + gamma(8))
        moved = reach + reach.mean(dims, keepdim=True)
        x_hat = (at.sizes + moved) * at.most * (1 + gamma(count + 6))
        made = at.most * unit * (mean + 4) * largest * (1 + t) + x_hat * t
        weight = self._weight(centre)
        offset = self.bias().to(centre).abs() if self.bias is not None else 0.0
        made = weight * made * (1 + 4 * unit) + 4 * unit * (weight * x_hat + offset)
        made = made * (1 + gamma(16)) + 8 * tiny * (1 + weight + at.most + largest)
        if centre.device.type != "cpu":
            return torch.full_like(made, torch.inf)
        return torch.where(share < COARSE, made, torch.inf)


def moment_errors(count: int) -> tuple[float, float]:
    """(a, b)/(uM) for torch's mean and standard deviation of `count` numbers |x| ≤ M: errors a of μ, b + γσ of σ.

    Two sets of numbers with means m, m′ are merged by m + c(m′ − m), c = n′/(n + n′),
    which adds at most u(6cM + M) to the error. One number after the other into k of
    them: n·e ≤ (n − 1)e + 6uM + n·uM, so e ≤ uM(6 + (k + 1)/2). Torch merges up to 16
    numbers so, then pairs of such chunks, log₂ times, then up to 16 lanes of any sizes:

        a ≤ uM(6 + 17/2 + 7⌈log₂ count⌉ + 6 + 16).

    A sum of squares is Σ w_k δ_k² over all mergers. It is computed as Σ w_k(δ_k +
    ε)(δ_k + ε′) with |ε|, |ε′| ≤ e = 2a + 4uM. Each product is the square of δ_k + (ε +
    ε′)/2 less that of (ε − ε′)/2, so the root of the sum, a norm, is off by at most
    2e·√Σw_k. And Σw_k ≤ count·(3 + ½log₂ count): w_k is at most the smaller of both
    counts, and 1 for a single number. Relative roundings are γ of it.
    """
    levels = ceil(log2(max(count, 2)))
    mean = 37.0 + 7.0 * levels
    return mean, 2 * (2 * mean + 4) * sqrt(3 + 0.5 * levels)
