"""Softmax over a box: derivatives, remainders, and rounding, of what is executed and of the proof."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lipcert.network.tangents import COARSE, VANISHING, Tangent
from lipcert.rounding import UNIT_ROUNDOFF, gamma

_EXP_ULPS = 20.0
"""How far torch's exponential inside of softmax may be off: its fast one is documented with so many ulps."""

_LARGEST_SPREAD = 300.0
"""Of deviations whose exponentials are taken: e^600 is a number of float64, e^800 is not."""


@dataclass(frozen=True)
class Softmax(Tangent):
    """p = softmax(z) along an axis: J_ij = p_i(δ_ij − p_j), so |r_i| ≤ h_i d_i + Σ_j (h_i P_j + p_i h_j) d_j.

    P ≥ p over the box, and h ≥ |p − p(c)|: e^{−2D}p(c) ≤ p ≤ e^{2D}p(c) for deviations
    of up to D along the axis.
    """

    axis: int
    size: int

    def _relative(self, largest: Tensor, dtype: torch.dtype) -> Tensor:
        """How far computed p are off, relatively, for |z| ≤ largest; infinite beyond a tenth.

        z − max z is off by 2u·largest and its exponential by that and 2u per ulp; p is
        a quotient of such a number and a sum of `size` of them, and is rounded: twice
        all that, and γ_size.
        """
        unit = UNIT_ROUNDOFF[dtype]
        total = unit * (2 * (2 * largest + 2 * _EXP_ULPS + 1) + self.size + 2)
        relative = total / (1 - total) * (1 + gamma(8))
        return torch.where(total < COARSE, relative, torch.inf)

    def _at_centre(self, centre: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """p as computed, what it is at most and at least."""
        computed = torch.softmax(centre, self.axis)
        largest = centre.abs().amax(self.axis, keepdim=True)
        relative = self._relative(largest, torch.float64)
        slack = (computed * relative + VANISHING) * (1 + gamma(4))
        most = (computed + slack) * (1 + gamma(2))
        return computed, most, ((computed - slack) * (1 - gamma(2))).clamp(min=0.0)

    def adjoint(
        self, function: Callable[[Tensor], Tensor], centre: Tensor, rows: Tensor
    ) -> Tensor:
        """p(y − p·y)."""
        # J is symmetric, so Jᵀy = Jy; the new axis is that of the rows y.
        p = torch.softmax(centre, self.axis)[:, None]
        shared = p * rows
        return shared - p * shared.sum(self.axis + 1, keepdim=True)

    def linear(self, centre: Tensor, reach: Tensor) -> Tensor:
        _, p, _ = self._at_centre(centre)
        along = (p * reach).sum(self.axis, keepdim=True)
        return p * (reach + along) * (1 + gamma(self.size + 6))

    def pulling_error(self, centre: Tensor, reach: Tensor) -> Tensor:
        """p twice, and the roundings of a sum; where p underflows, a tiny number of everything."""
        largest = centre.abs().amax(self.axis, keepdim=True)
        relative = self._relative(largest, torch.float64)
        twice = relative * (2 + relative) + gamma(self.size + 6)
        total = reach + reach.sum(self.axis, keepdim=True)
        error = twice * self.linear(centre, reach) + 8 * VANISHING * total
        return error * (1 + gamma(self.size + 6))

    def _largest(self, centre: Tensor, reach: Tensor) -> tuple[Tensor, Tensor]:
        """P, and D along the axis."""
        _, p, _ = self._at_centre(centre)
        farthest = reach.amax(self.axis, keepdim=True)
        spread = farthest.clamp(max=_LARGEST_SPREAD)
        grown = p * torch.exp(2 * spread) * (1 + gamma(2 * _EXP_ULPS + 4))
        # Beyond the cap, p may be anything up to 1, however small it is at the centre.
        grown = torch.where(farthest > spread, 1.0, grown)
        return torch.minimum(grown, torch.ones_like(p)), spread

    def remainder(self, centre: Tensor, reach: Tensor) -> Tensor:
        axis = self.axis
        _, p, least = self._at_centre(centre)
        most, spread = self._largest(centre, reach)
        # p(c) − p ≤ p(c)·(1 − e^{−2D}); expm1 keeps the digits of small D. Beyond the
        # cap of D, p may fall to 0.
        shrunk = p * -torch.expm1(-2 * spread) * (1 + gamma(2 * _EXP_ULPS + 4))
        shrunk = torch.where(reach.amax(axis, keepdim=True) > spread, p, shrunk)
        h = torch.maximum(most - least, shrunk) * (1 + gamma(2))
        along = h * (most * reach).sum(axis, keepdim=True)
        along = along + p * (h * reach).sum(axis, keepdim=True)
        return (h * reach + along) * (1 + gamma(self.size + 8))

    def error(self, centre: Tensor, reach: Tensor, dtype: torch.dtype) -> Tensor:
        largest = (centre.abs() + reach).amax(self.axis, keepdim=True) * (1 + gamma(2))
        most, _ = self._largest(centre, reach)
        lost = 4 * (self.size + 2) * torch.finfo(dtype).tiny
        return (self._relative(largest, dtype) * most + lost) * (1 + gamma(4))
