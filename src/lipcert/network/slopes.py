"""Nonlinearities as intervals of slopes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, isfinite, nextafter, sqrt

import torch
from torch import Tensor

from lipcert.errors import OptionError
from lipcert.network.program import Live


@dataclass(frozen=True)
class Slope:
    """A nonlinearity φ whose slopes lie in [alpha, beta].

    Elementwise: alpha ≤ (φ(a) − φ(b))/(a − b) ≤ beta for every coordinate. Otherwise
    (softmax, max-pooling, sorting) the interval holds in the l2 norm, |φ(a) − φ(b) −
    c(a − b)| ≤ s|a − b| with its centre c and radius s; a map that is only known to be
    L-Lipschitz has the interval [−L, L].

    A learned slope (PReLU) is given by a function that reads it; its interval is the
    hull over the channels.

    `ulps` bounds the rounding error of torch's implementation in units in the last
    place of the result or of slope times input, whichever is larger. Without it,
    constants can be bounded, but nothing is certified.

    `group` says which coordinates may be scaled apart if φ is not elementwise: groups
    of that many consecutive channels keep together, 0 for all of them.

    Bounds over a ball (`lipcert.certify_local`) are tighter with more facts; without
    them they rest on the slopes. Elementwise: between consecutive `kinks`, φ is
    differentiable and φ′ has the Lipschitz constant `curvature`; kinks are numbers, or
    functions that read tensors that broadcast against the input. Otherwise: `monotone`
    says that no entry of φ falls when an entry of its input grows, `extremum` that
    every entry of φ is the largest (1) or smallest (−1) of a set of entries, no two of
    which sets meet.

    Example:
        >>> lipcert.Slope(-0.5, 1.5).lipschitz()
        1.5
        >>> lipcert.Slope(-0.5, 1.5).sector()  # φ(x) = 0.5 x + ψ(x), and ψ is 1-Lipschitz
        (0.5, 1.0)
    """

    alpha: float | Live
    beta: float | Live
    elementwise: bool = True
    ulps: float | None = None
    group: int = 0
    kinks: tuple[float | Live, ...] = ()
    curvature: float | None = None
    monotone: bool = False
    extremum: int = 0

    def __post_init__(self) -> None:
        # Numbers of any kind become floats here, so that Slope(0, 1) is Slope(0.0, 1.0)
        # to all who ask for a float.
        object.__setattr__(self, "alpha", _finite("alpha", self.alpha))
        object.__setattr__(self, "beta", _finite("beta", self.beta))
        if (
            isinstance(self.alpha, float)
            and isinstance(self.beta, float)
            and self.alpha > self.beta
        ):
            raise OptionError(
                f"the slopes are [{self.alpha}, {self.beta}], expected the "
                "smaller one first"
            )
        if self.curvature is not None and not 0 <= self.curvature < inf:
            raise OptionError(
                f"curvature is {self.curvature}, expected a number of at least 0"
            )
        if self.extremum not in (-1, 0, 1) or self.group < 0:
            raise OptionError(
                f"extremum={self.extremum}, group={self.group}: expected -1, 0 or 1, "
                "and no negative group"
            )

    def interval(self) -> tuple[float | Tensor, float | Tensor]:
        """(alpha, beta) with learned slopes read now, reduced to their hull."""
        alpha, beta = self.alpha, self.beta
        return (alpha().amin() if callable(alpha) else alpha), (
            beta().amax() if callable(beta) else beta
        )

    def roundings(self, size: int) -> float:
        """Units in the last place by which an entry can be off, for rows of `size` entries that may be mixed."""
        if not self.ulps:
            return 0.0
        if self.elementwise:
            return self.ulps
        # A map that mixes entries may sum all of them, each addition with a rounding.
        return self.ulps + size

    def lipschitz(self) -> float | Tensor:
        """The Lipschitz constant max(|alpha|, |beta|) of φ; what the naive bound uses."""
        alpha, beta = self.interval()
        if isinstance(alpha, float) and isinstance(beta, float):
            return max(abs(alpha), abs(beta))
        return torch.maximum(torch.as_tensor(alpha).abs(), torch.as_tensor(beta).abs())

    def sector(self) -> tuple[float | Tensor, float | Tensor]:
        """Centre c = (alpha+beta)/2 and radius s = (beta−alpha)/2 of the loop transformation φ = c·id + ψ."""
        alpha, beta = self.interval()
        return (alpha + beta) / 2, (beta - alpha) / 2


def _finite(name: str, slope: float | Live) -> float | Live:
    """A slope as a float, if it is not learned; refused if it is not finite."""
    if callable(slope):
        return slope
    if not isfinite(slope):
        raise OptionError(f"{name} is {slope}, expected a finite slope")
    return float(slope)


def lipschitz_map(
    constant: float,
    ulps: float | None = 0.0,
    group: int = 0,
    monotone: bool = False,
    extremum: int = 0,
) -> Slope:
    """A map that is `constant`-Lipschitz in l2 and not elementwise."""
    return Slope(
        -constant, constant, False, ulps, group, monotone=monotone, extremum=extremum
    )


def along_axis(slope: Slope, axis: int) -> Slope:
    """A map that works along one axis of a row: if that is not the first one, channels may be scaled apart."""
    return replace(slope, group=int(axis > 0))


def pooling(overlap: int, per_channel: bool) -> Slope:
    """Max-pooling whose windows meet in at most `overlap` at any entry."""
    # √2 is rounded, perhaps down: the next float above it is a true bound. Whole roots
    # are exact.
    constant = sqrt(overlap)
    if constant % 1 != 0:
        constant = nextafter(constant, inf)
    return lipschitz_map(
        constant, group=int(per_channel), monotone=True, extremum=int(overlap == 1)
    )


def clipping(*limits: float | Live) -> Slope:
    """Slope 1 on one side of each limit and 0 on the other: clamp, hardtanh, a maximum with a constant."""
    return replace(CLIP, kinks=limits, curvature=0.0)


def shrinking(width: float) -> Slope:
    """Softshrink: slope 0 between −width and width, 1 outside."""
    return replace(SHRINK, kinks=(-float(width), float(width)), curvature=0.0)


def leaky(negative_slope: float) -> Slope:
    """LeakyReLU: slopes 1 and `negative_slope`."""
    # The slope below zero may be the larger one.
    low, high = min(negative_slope, 1.0), max(negative_slope, 1.0)
    return Slope(low, high, ulps=1.0, kinks=(0.0,), curvature=0.0)


def prelu(weight: Live) -> Slope:
    """PReLU: slopes 1 and the learned weights."""
    low, high = (lambda: weight().clamp(max=1.0)), (lambda: weight().clamp(min=1.0))
    return Slope(low, high, ulps=1.0, kinks=(0.0,), curvature=0.0)


def elu(alpha: float) -> Slope:
    """ELU: slope 1 above zero, alpha·eˣ below."""
    # alpha·eˣ for x < 0 takes all values between 0 and alpha.
    return Slope(
        min(alpha, 0.0), max(alpha, 1.0), ulps=4.0, kinks=(0.0,), curvature=abs(alpha)
    )


def smooth(curvature: float, *kinks: float) -> Slope:
    """A nonlinearity with slopes in [0, 1]."""
    return replace(SMOOTH, curvature=curvature, kinks=kinks)


# Torch has numbers of its own in float32, and their products.
_ROUNDED = 1 + 2.0**-22
_SELU_SLOPE = (
    1.0507009873554804934193349852946 * 1.6732632423543772848170429916717 * _ROUNDED
)

RELU = Slope(0.0, 1.0, ulps=0.0, kinks=(0.0,), curvature=0.0)
CLIP = Slope(0.0, 1.0, ulps=0.0)
SHRINK = Slope(0.0, 1.0, ulps=1.0)
SMOOTH = Slope(0.0, 1.0, ulps=4.0)
WAVE = Slope(-1.0, 1.0, ulps=4.0, curvature=1.0)
SELU = Slope(0.0, _SELU_SLOPE, ulps=4.0, kinks=(0.0,), curvature=_SELU_SLOPE)
# The largest |φ″| of these, rounded up: 4/(3√3), 3√3/8, 2/(3√3), 1/4, 2 and 1/(6√3).
TANH, ATAN, ASINH = smooth(0.76980036), smooth(0.64951906), smooth(0.38490018)
LOG_SIGMOID, SOFTSIGN = smooth(0.25), smooth(2.0, 0.0)
SIGMOID = Slope(0.0, 0.25, ulps=4.0, curvature=0.09622505)
HARD_SIGMOID = Slope(0.0, _ROUNDED / 6, ulps=2.0, kinks=(-3.0, 3.0), curvature=0.0)
ABS = Slope(-1.0, 1.0, ulps=0.0, kinks=(0.0,), curvature=0.0)
# The extreme slopes and curvatures of these four, rounded outwards;
# tests/network/test_slopes.py proves each on a grid.
GELU = Slope(-0.12890414518516, 1.12890414518516, ulps=8.0, curvature=0.79788457)
GELU_TANH = Slope(-0.12899306865878, 1.12899306865878, ulps=8.0, curvature=0.79788457)
SILU = Slope(-0.09983932012887, 1.09983932012887, ulps=8.0, curvature=0.5)
MISH = Slope(-0.11252612238947, 1.08849816125173, ulps=8.0, curvature=0.6443)
HARD_SWISH = Slope(
    -0.5, 1.5, ulps=4.0, kinks=(-3.0, 3.0), curvature=nextafter(1 / 3, 1)
)
# diag(p) − ppᵀ, the derivative, and its mean along a segment have eigenvalues in [0,
# ½]: centre and radius are ¼.
SOFTMAX = Slope(0.0, 0.5, elementwise=False, ulps=32.0)
