"""Radii of logits and constants, as training uses them.

With r_yi = (z_y − z_i)/L_yi: a pair whose constant is zero can never be reached, so
r_yi is the largest radius in use (9e17 in float32, 6e152 in float64) with the sign of
the margin, zero at a tie, and has no gradient. The same holds for constants too small
to divide by. With a single class there is no other one to reach, and the radius is that
largest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lipcert.losses.loss import check_positive, checked_with_constants, true_class


def hard_radius(logits: Tensor, labels: Tensor, constants: Tensor) -> Tensor:
    """min_{i≠y} (z_y − z_i)/L_yi, (B,): eq: input margin lower bound Lip. Positive if and only if y is predicted.

    It is a certified radius only if the constants are guaranteed bounds and rounding is
    accounted for.
    """
    return pair_radii(*checked_with_constants(logits, labels, constants)).amin(1)


def soft_radius(logits: Tensor, labels: Tensor, constants: Tensor, t: float) -> Tensor:
    """−(1/t)·log Σ_{i≠y} exp(−t·(z_y − z_i)/L_yi), (B,): eq: input margin lower bound Lip soft.

    Between the hard radius − log(K−1)/t and the hard radius (proposition: soft
    certified radius).
    """
    check_positive(t=t)
    return soft_minimum(
        pair_radii(*checked_with_constants(logits, labels, constants)), t
    )


def pair_radii(logits: Tensor, labels: Tensor, constants: Tensor) -> Tensor:
    """(z_y − z_i)/L_yi, (B, K), with the largest radius at i = y so that it never is the smallest of the row."""
    smallest = torch.finfo(logits.dtype).tiny ** 0.5
    # The square of a radius does not overflow: (9e17)² is below 3e38 in float32.
    largest = 0.1 / smallest
    margins = logits.gather(1, labels[:, None]) - logits
    rows = constants[labels]
    # Compared as a product: margin/L could overflow before it is compared.
    reachable = (rows >= smallest) & (margins.abs() < largest * rows)
    # A division by 1 where the quotient is not used: 0 · ∞ in the backward pass would
    # be NaN.
    radii = margins / torch.where(reachable, rows, 1.0)
    # NaN has to stay NaN, for training to notice it.
    unreachable = torch.where(
        margins.isnan(), margins, margins.sign() * largest
    ).detach()
    radii = torch.where(reachable, radii, unreachable)
    return radii.masked_fill(true_class(logits, labels), largest)


def soft_minimum(radii: Tensor, t: float) -> Tensor:
    """−(1/t)·log Σ exp(−t·r) of every row, taken relative to the row's minimum: no overflow, never above it."""
    # It cancels, so its gradient does, too.
    hard = radii.amin(1, keepdim=True).detach()
    return hard[:, 0] - torch.logsumexp(-t * (radii - hard), 1) / t
