"""Diagonals S with W Wᵀ ⪯ S, and the factors of the ρ-Lipschitz residual layer that follow from them.

A kernel stands for its convolution with zero padding, on images of any size: cut out of
the convolution of the whole plane, its Gram matrix is at most that of the plane, which
is a convolution with the kernel's correlations.

Everything is computed in float64 and rounded once, so that a float32 model and its
float64 copy have the same factors up to one rounding, which the rules for products with
constants count.
"""

from __future__ import annotations

from math import cos, pi

import torch
import torch.nn.functional as F
from torch import Tensor

SLACK = 1e-5
"""By how much T stays below what the inequality allows, for roundings of T in float32."""
_SMALLEST = (
    1e-12  # rows whose sums are smaller have this one, so that zero rows have a factor
)


def root(log_rho: Tensor) -> Tensor:
    """√ρ."""
    return (log_rho.double() / 2).exp().to(log_rho.dtype)


def factor(sums: Tensor, log_rho: Tensor, slopes: float, dtype: torch.dtype) -> Tensor:
    """The diagonal of (α+β)/√ρ·T, T = 2ρ/(α+β)²·S⁻¹, for S = diag(sums) and α+β = slopes."""
    scale = 2 * (1 - SLACK) / slopes * (log_rho.double() / 2).exp()
    return (scale / sums.clamp(min=_SMALLEST)).to(dtype)


def row_sums(magnitudes: Tensor, log_q: Tensor | None) -> Tensor:
    """Σ_j |W Wᵀ|_ij q_j/q_i from |W Wᵀ|, a matrix of hidden channels: AOL for q = 1, otherwise SLL."""
    if log_q is None:
        return magnitudes.sum(1)
    q = log_q.double()
    # Of logarithms: q_j/q_i of trained weights may overflow as a quotient of two
    # exponentials.
    return (magnitudes * (q[None, :] - q[:, None]).exp()).sum(1)


def gram(weight: Tensor) -> Tensor:
    """|W Wᵀ| of a matrix, or of a kernel with the absolute values of all shifts added up (Prach & Lampert)."""
    return correlations(weight.double()).abs().sum(2)


def correlations(weight: Tensor) -> Tensor:
    """(hidden, hidden, shifts): the products of every two rows of a matrix, or of two kernels shifted in all ways."""
    if weight.dim() == 2:
        return (weight @ weight.T)[:, :, None]
    size = weight.shape[-1]
    windows = F.unfold(
        weight, size, padding=size - 1
    )  # much faster in float64 than a convolution
    return torch.einsum("ad,bdn->abn", weight.flatten(1), windows)


def circular(weight: Tensor, x: Tensor) -> Tensor:
    """The convolution of periodic images."""
    before = weight.shape[-1] // 2
    if before:
        x = F.pad(x, (before,) * 4, mode="circular")
    return F.conv2d(x, weight)


def between_grid_points(reach: int, points: int) -> float:
    """How much larger the norm of a convolution can be than on a periodic image of this many points to a side.

    That norm is the largest of the symbol at the frequencies of a grid; Re⟨u, Ŵ(ω)v⟩ is
    a trigonometric polynomial of degree `reach` in each of two variables, so it exceeds
    its values on the grid by 1/cos(π·reach/points) in each.
    """
    return cos(pi * reach / points) ** -2
