"""What some Lanczos steps prove about the largest eigenvalue, rounding included.

Let A be symmetric and positive semidefinite, and v_1, v_2, … the computed vectors of a
Lanczos process with the computed numbers α_j and β_j, so that

    A v_j = β_{j−1} v_{j−1} + α_j v_j + β_j v_{j+1} + e_j,    ‖e_j‖ ≤ δ_j.

The e_j hold all that is not exact: products with A, the arithmetic of the step, and what
reorthogonalisation took away. Let λ be the largest eigenvalue and u its eigenvector. For
d_j = ⟨u, v_j⟩ the same recurrence holds with λ in place of A and errors of at most δ_j.
The polynomials p_0 = 1, β_j p_j = (x − α_j) p_{j−1} − β_{j−1} p_{j−2} obey it without
errors. At x = λ, the numbers W_j = β_j (p_j d_j − p_{j−1} d_{j+1}) satisfy W_j = W_{j−1} +
p_{j−1}⟨u, e_j⟩ and W_0 = 0, as can be seen by inserting both recurrences. Divided by β_j p_j
p_{j−1}, they are differences of d_j/p_{j−1}, whose sum is

    d_1 = d_{k+1}/p_k + Σ_m W_m / (β_m p_m p_{m−1}).

All p_m are positive for x beyond the Ritz values, and |d_{k+1}| ≤ 1, so

    |⟨u, v_1⟩| ≤ F(λ) = 1/p_k + Σ_m (Σ_{j≤m} p_{j−1} δ_j) / (β_m p_m p_{m−1}).

F falls with x, also where δ grows with √x. So if the start v_1 has a part of more than τ along u, λ is at most the x
with F(x) = τ. Neither orthogonality nor small errors are assumed: large ones make F large.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite, sqrt

_EPS = 2.0**-52
_ROUNDING = 1 + 1e-9
"""Covers the rounding of sums of positive numbers, and of norms of up to 10⁶ entries."""
_START = 1e-14
"""How far rounding moves a start of norm one."""
_UNDERFLOW = 1e-300
"""What products lose where they underflow."""
_DOUBLINGS, _BISECTIONS = 2200, 60


@dataclass(frozen=True)
class Recurrence:
    """α, β and what the steps lost beside the errors of products, all in units of A.

    lost[j] bounds the part of ‖e_j‖ that the arithmetic of step j makes.
    """

    alpha: tuple[float, ...]
    beta: tuple[float, ...]
    lost: tuple[float, ...]
    unit: float

    def hidden(self, x: float, error: float) -> float:
        """F(x): the largest part of the start along the eigenvector of an eigenvalue x.

        What is computed is F of a recurrence with slightly other α, whose difference is
        part of δ: as valid, and not always above F itself.

        `error` bounds the error of products with B and Bᵀ, per unit of their argument,
        where A is BᵀB or BBᵀ and ‖B‖ = √x. Infinite below the Ritz values.
        """
        # ‖fl(Bᵀ fl(Bv)) − BᵀBv‖ ≤ ‖B‖·error + error·(‖B‖ + error).
        product = error * (2 * sqrt(x) * sqrt(self.unit) + error) / self.unit
        product = product * _ROUNDING + _UNDERFLOW / self.unit
        reciprocal = 1.0  # 1/p_{m−1}
        before = 0.0  # β_{m−1} p_{m−2} / p_{m−1}
        growth = inf  # p_{m−1} / p_{m−2}
        gathered = 0.0  # Σ_{j≤m} p_{j−1} δ_j / p_{m−1}
        total = 0.0
        for alpha, beta, lost in zip(self.alpha, self.beta, self.lost, strict=True):
            # Β_m p_m / p_{m−1}.
            factor = x - alpha - before
            # A is positive semidefinite, so that no α is this negative but by errors.
            # With α ≥ −x the factor is at most 2x, and √x/factor falls with x.
            if not factor > 0.0 or alpha < -x / 2:
                return inf
            # The rounding of `factor` is that of another α_m, so it belongs to e_m.
            rounded = 4 * _EPS * (x + abs(alpha) + before)
            gathered = gathered / growth + product + lost + rounded
            total += gathered * reciprocal / factor
            reciprocal *= beta / factor
            before = beta * (beta / factor)
            growth = factor / beta if beta > 0.0 else inf
        return (reciprocal + total) * _ROUNDING + _START

    def largest_eigenvalue(self, component: float, error: float, least: float) -> float:
        """The x with F(x) = τ, rounded up, from the largest Ritz value on; infinite if there is none.

        A bound on λ, in the units that products have, unless the start has a part of at
        most τ = `component` along its eigenvector.
        """
        if not isfinite(error) or not isfinite(self.unit + sum(self.alpha)):
            return inf
        low = least / self.unit
        # From a thousand millionth of the Ritz value on, the gap doubles until F is
        # small enough.
        gap = 1e-9 * low + _UNDERFLOW
        for _ in range(_DOUBLINGS):
            if self.hidden(low + gap, error) <= component:
                break
            gap *= 2
            if not isfinite(gap):
                return inf
        smaller, larger = 0.0, gap
        for _ in range(_BISECTIONS):
            middle = (smaller + larger) / 2
            if self.hidden(low + middle, error) <= component:
                larger = middle
            else:
                smaller = middle
        return self.unit * (low + larger) * _ROUNDING
