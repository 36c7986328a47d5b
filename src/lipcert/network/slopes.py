"""Nonlinearities as intervals of slopes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, inf, nextafter, sqrt

import torch
from torch import Tensor

from lipcert.errors import check_choice

Live = Callable[[], Tensor]
NORMS = (1.0, 2.0, inf)


@dataclass(frozen=True)
class Negative:
    """Reads −x, for the interval [−x, x] of a learned constant."""

    read: Live

    def __call__(self) -> Tensor:
        return -self.read()


@dataclass(frozen=True)
class Slope:
    """A nonlinearity φ whose slopes lie in [alpha, beta].

    Elementwise: alpha ≤ (φ(a) − φ(b))/(a − b) ≤ beta for every coordinate. Otherwise (softmax, max-pooling, GroupSort)
    the interval holds for the symmetric part in the l2 norm; a map that is only known to be L-Lipschitz has the
    interval [−L, L]. `l1` and `linf` are then its Lipschitz constants in these norms.

    A learned slope (PReLU) is given by a function that reads it; its interval is the hull over the channels.

    `ulps` bounds the rounding error of torch's implementation in units in the last place of the result
    or of slope times input, whichever is larger, and `absolute` adds a fixed error per entry. Without `ulps`, constants
    can be bounded, but nothing is certified.

    `group` says which coordinates may be scaled apart if φ is not elementwise: groups of that many consecutive channels
    keep together, 0 for all of them (softmax).
    """

    alpha: float | Live
    beta: float | Live
    elementwise: bool = True
    l1: float = inf
    linf: float = inf
    ulps: float | None = None
    absolute: float = 0.0
    group: int = 0

    def interval(self) -> tuple[float | Tensor, float | Tensor]:
        """(alpha, beta) with learned slopes read now, reduced to their hull."""
        alpha = self.alpha if isinstance(self.alpha, float) else self.alpha().amin()
        beta = self.beta if isinstance(self.beta, float) else self.beta().amax()
        return alpha, beta

    def roundings(self, size: int) -> float:
        """Units in the last place by which an entry can be off, for rows of `size` entries that may be mixed."""
        ulps = self.ulps or 0.0
        return ulps if self.elementwise or ulps == 0 else ulps + size

    def lipschitz(self, norm: float = 2.0) -> float | Tensor:
        """The Lipschitz constant max(|alpha|, |beta|) of φ; what the naive bound uses."""
        if not self.elementwise and norm != 2.0:
            return self.l1 if norm == 1.0 else self.linf
        alpha, beta = self.interval()
        if isinstance(alpha, float) and isinstance(beta, float):
            return max(abs(alpha), abs(beta))
        return torch.maximum(_tensor(alpha, beta).abs(), _tensor(beta, alpha).abs())

    def sector(self, norm: float = 2.0) -> tuple[float | Tensor, float | Tensor]:
        """Centre c = (alpha+beta)/2 and radius s = (beta−alpha)/2 of the loop transformation φ = c·id + ψ."""
        if not self.shifts(norm):
            return 0.0, self.lipschitz(norm)
        alpha, beta = self.interval()
        return (alpha + beta) / 2, (beta - alpha) / 2

    def shifts(self, norm: float = 2.0) -> bool:
        """Whether the centre can differ from zero, so that the loop transformation lets linear paths through."""
        if not self.elementwise and norm != 2.0:
            return False
        if isinstance(self.alpha, Negative):
            return self.alpha.read is not self.beta
        return not (isinstance(self.alpha, float) and isinstance(self.beta, float) and self.alpha + self.beta == 0)


def check_norm(norm: float) -> None:
    """Refuse norms other than l1, l2 and l∞."""
    check_choice("norm", norm, NORMS)


def lipschitz_map(
    constant: float | Live, l1: float = inf, linf: float = inf, ulps: float | None = 0.0, group: int = 0
) -> Slope:
    """A map that is `constant`-Lipschitz in l2 and not elementwise."""
    negative = -constant if isinstance(constant, float) else Negative(constant)
    return Slope(negative, constant, elementwise=False, l1=l1, linf=linf, ulps=ulps, group=group)


def group_sort(size: int) -> Slope:
    """Sorting within groups of channels."""
    return lipschitz_map(1.0, l1=1.0, linf=1.0, group=size)


def leaky(negative_slope: float) -> Slope:
    """LeakyReLU: slopes 1 and `negative_slope`."""
    return Slope(min(negative_slope, 1.0), max(negative_slope, 1.0), ulps=1.0)


def prelu(weight: Live) -> Slope:
    """PReLU: slopes 1 and the learned weights."""
    return Slope(lambda: weight().clamp(max=1.0), lambda: weight().clamp(min=1.0), ulps=1.0)


def elu(alpha: float) -> Slope:
    """ELU: slope 1 above zero, alpha·eˣ below."""
    return Slope(min(alpha, 0.0), max(alpha, 1.0), ulps=4.0)


def softplus(beta: float, threshold: float) -> Slope:
    """Softplus; torch returns the input itself where beta·x exceeds the threshold, which jumps by e^−threshold/beta."""
    return Slope(0.0, 1.0, ulps=4.0, absolute=exp(-threshold) / beta)


_SELU_SLOPE = nextafter(1.0507009873554804934193349852946 * 1.6732632423543772848170429916717, inf)

RELU = Slope(0.0, 1.0, ulps=0.0)
CLIP = Slope(0.0, 1.0, ulps=0.0)
SHRINK = Slope(0.0, 1.0, ulps=1.0)
SMOOTH = Slope(0.0, 1.0, ulps=4.0)
SELU = Slope(0.0, _SELU_SLOPE, ulps=4.0)
SIGMOID = Slope(0.0, 0.25, ulps=4.0)
HARD_SIGMOID = Slope(0.0, nextafter(1 / 6, 1), ulps=2.0)
ABS = Slope(-1.0, 1.0, ulps=0.0)
# The extreme slopes of these four, rounded outwards; tests/network/test_slopes.py proves each on a grid.
GELU = Slope(-0.12890414518516, 1.12890414518516, ulps=8.0)
GELU_TANH = Slope(-0.12899306865878, 1.12899306865878, ulps=8.0)
SILU = Slope(-0.09983932012887, 1.09983932012887, ulps=8.0)
MISH = Slope(-0.11252612238947, 1.08849816125173, ulps=8.0)
HARD_SWISH = Slope(-0.5, 1.5, ulps=4.0)
SOFTMAX = Slope(0.0, 0.5, elementwise=False, l1=0.5, linf=0.5, ulps=32.0)
SOFTMIN = Slope(-0.5, 0.0, elementwise=False, l1=0.5, linf=0.5, ulps=32.0)


def max_pool(
    size: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    windows: tuple[int, ...],
) -> Slope:
    """Max-pooling: l2 constant √(largest number of windows that contain one entry)."""
    overlap = 1
    for n, k, s, p, d, m in zip(size, kernel, stride, padding, dilation, windows, strict=True):
        count = torch.zeros(n + 2 * p + k * d + s, dtype=torch.long)
        for w in range(m):
            count[w * s : w * s + d * (k - 1) + 1 : d] += 1
        overlap *= int(count[p : p + n].max())
    return lipschitz_map(
        nextafter(sqrt(overlap), inf) if sqrt(overlap) % 1 else sqrt(overlap), l1=float(overlap), linf=1.0, group=1
    )


def _tensor(value: float | Tensor, like: float | Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value
    assert isinstance(like, Tensor)
    return like.new_tensor(value)
