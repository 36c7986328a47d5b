"""Proofs that W Wᵀ ⪯ κ·S holds for the factors of a ρ-Lipschitz layer, with all rounding accounted for."""

from __future__ import annotations

from math import pi, sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lipcert.layers.rescaling import between_grid_points, correlations
from lipcert.norms.gram import bound_spectral_norm
from lipcert.rounding import UNDERFLOW, gamma, round_up

_POINTS = 64


def squared_norm(
    weight: Tensor, log_q: Tensor | None, factors: Tensor, rescaling: str
) -> float:
    """A bound on ‖F^½ W‖² for a matrix or a kernel, F = diag(factors)."""
    if rescaling != "sn":
        return gershgorin(weight, log_q, factors)
    if weight.dim() == 2:
        return dense_norm(weight, factors)
    return kernel_norm(weight, factors)


def gershgorin(weight: Tensor, log_q: Tensor | None, factors: Tensor) -> float:
    """A bound on ‖F^½ W‖² = ‖F^½ W Wᵀ F^½‖ by the row sums of a similar matrix, max_i F_i Σ_j |W Wᵀ|_ij q_j/q_i.

    Float64; F = diag(factors). Holds for kernels on images of any size.
    """
    hidden = len(weight)
    q = torch.ones(hidden, dtype=weight.dtype)
    if log_q is not None:
        q = log_q.exp()
    products = weight[0].numel()
    # |W Wᵀ| and |W||Wᵀ|: γ times the latter bounds the rounding of the former.
    magnitudes, largest = (
        correlations(weight).abs().sum(2),
        correlations(weight.abs()).sum(2),
    )
    roundings = (
        4 * weight[0, 0].numel() + hidden
    )  # of sums over shifts and hidden channels
    sums = ((magnitudes + gamma(products + 2) * largest * 1.01) * q[None, :]).sum(1) / q
    return (
        round_up(float((factors.reshape(-1) * sums).max()), 2 * roundings + 16)
        + UNDERFLOW
    )


def dense_norm(weight: Tensor, factors: Tensor) -> float:
    """A bound on ‖F^½ W‖² by Cholesky factorisation."""
    rows = (weight * factors.sqrt()[:, None]).cpu().numpy()
    norm = _spectral_norm(rows)
    entries = gamma(4) * float(
        np.sqrt(np.square(rows).sum())
    )  # roots and products are rounded
    return round_up((norm + 1.01 * entries) ** 2, 8) + UNDERFLOW


def kernel_norm(weight: Tensor, factors: Tensor) -> float:
    """A bound on ‖F^½ W‖² for a convolution with zero padding on images of any size.

    The norm of the convolution of the plane is the supremum of its symbol. That is
    bounded at the points of a grid, by Cholesky factorisation, and between them as
    trigonometric polynomials are.
    """
    kernel = weight * factors.reshape(-1, 1, 1, 1).sqrt()
    size = kernel.shape[-1]
    reach = size // 2
    # 64 points per unit of degree: 1/cos² (π/64) is 1.0024.
    points = max(_POINTS * reach, 1)
    # (points, size): shift p of the kernel has the phase exp(iωp).
    angles = (
        2
        * pi
        / points
        * torch.arange(points)[:, None]
        * (torch.arange(size) - reach)[None, :]
    )
    phases = torch.polar(torch.ones_like(angles, dtype=torch.float64), angles.double())
    largest = 0.0
    total = float(kernel.abs().sum((2, 3)).square().sum().sqrt())  # ‖Σ_p |W_p|‖_F
    for first in phases[: points // 2 + 1]:  # the others are conjugates of these
        rows = torch.einsum("hcpq,p->hcq", kernel.to(first.dtype), first)
        for symbol in torch.einsum("hcq,mq->mhc", rows, phases):
            if (
                float(torch.linalg.matrix_norm(symbol)) > largest
            ):  # at least the spectral norm
                largest = max(largest, _complex_norm(symbol))
    # Angles of up to 2π·reach are rounded, and products and sums of complex numbers.
    error = gamma(4 * size * size + 32 * size + 64) * total
    return (
        round_up(
            ((largest + 1.01 * error) * between_grid_points(reach, points)) ** 2, 64
        )
        + UNDERFLOW
    )


def _complex_norm(matrix: Tensor) -> float:
    """A bound on the norm of a complex matrix A + iB, that of the real matrix [A −B; B A]."""
    real, imaginary = matrix.real, matrix.imag
    rows = torch.cat(
        [torch.cat([real, -imaginary], 1), torch.cat([imaginary, real], 1)]
    )
    return _spectral_norm(rows.numpy())


def _spectral_norm(matrix: NDArray[np.float64]) -> float:
    """A bound on the norm of a matrix or, which is the same, of its transpose: the one with fewer rows."""
    if matrix.shape[0] > matrix.shape[1]:
        matrix = matrix.T
    return bound_spectral_norm(np.ascontiguousarray(matrix))


def lipschitz_constant(
    log_rho: float, alpha: float, beta: float, kappa: float
) -> float:
    """The constant of h(x) = √ρ·x − (α+β)/√ρ·WᵀTφ(Wx) with W Wᵀ ⪯ κ·2ρ/(α+β)²·T⁻¹, 0 ≤ α ≤ β, rounded up.

    Differences are mapped by J = √ρ·I − (α+β)/√ρ·WᵀTDW with slopes α ≤ D ≤ β, and

        JᵀJ − ρI ⪯ 2WᵀT(κD² − (α+β)D)W ⪯ 2β·max(0, κβ − α − β)·WᵀTW ⪯ ρ·4κβ·max(0, κβ − α − β)/(α+β)²

    for κ ≥ 1: √ρ if the inequality of proposition:rhoLipLayer holds, and little more if
    it fails by little.
    """
    kappa = max(kappa, 1.0)
    # The last bound above without ρ; κβ − α − β = (κ − 1)β − α.
    excess = (
        4 * kappa * beta * max(0.0, (kappa - 1) * beta - alpha) / (alpha + beta) ** 2
    )
    return round_up(float(np.exp(log_rho / 2)) * sqrt(1 + round_up(excess, 16)), 16)
