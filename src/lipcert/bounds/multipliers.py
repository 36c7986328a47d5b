"""Diagonal multipliers T with GᵀG ⪯ T that make ‖G T^−½‖·‖T^½ W‖ small: proposals, which others prove."""

from __future__ import annotations

from math import sqrt

import numpy as np

from lipcert.rounding import UNDERFLOW

MULTIPLIERS = ("sn", "aol", "sll", "optimal")
_STEPS = {"sll": 100, "optimal": 2000}
_CHUNK = 1 << 22  # entries of vectors iterated at a time
_SPREAD = 1e-7  # how far the weights q of a site may lie apart


def propose_diagonals(
    targets: np.ndarray, whole: np.ndarray, multiplier: str
) -> np.ndarray:
    """(P, n): positive D = T^½ that make ‖G D⁻¹‖·‖D W‖ small for each of P matrices G, (P, o, n), and one W, (n, r).

    With weights d > 0 of the neurons, "sll" is t_k = Σ_j |GᵀG|_kj d_j/d_k. In "optimal"
    directions v_k of length 1 turn this into t_k = |Σ_j (GᵀG)_kj d_j v_j|/d_k, where
    v_k is the direction of that sum; for a single row G both agree. The best d_k are
    the norms of the rows of WY, where Y maximises Σ_kj (GᵀG)_kj d_k d_j ⟨v_k, v_j⟩
    subject to |Y| = 1: the dual of the semidefinite program in factored form. Y and v
    follow by power iteration, Y ← WᵀTWY.
    """
    count, outputs, n = targets.shape
    if multiplier == "sn":
        return np.ones((count, n))
    # GᵀG = RᵀR: only the Gram matrix counts, and R has n rows.
    if outputs > n:
        targets = np.stack([np.linalg.qr(target, mode="r") for target in targets])
    # The dual has n + 1 linear constraints, so an optimum has a rank r with r(r + 1)/2
    # ≤ n + 1 (Barvinok, Pataki).
    columns = min(whole.shape[1], 4 + round(sqrt(2 * n)))
    step = max(1, _CHUNK // (n * columns))
    # The best D does not depend on the scale of G and W, but products of four of them
    # could overflow or vanish.
    largest = np.abs(targets).max(initial=0.0, axis=(1, 2), keepdims=True)
    targets = targets / (largest + UNDERFLOW)
    whole = whole / (np.abs(whole).max(initial=0.0) + UNDERFLOW)
    chunks = [
        _squares(targets[k : k + step], whole, multiplier, columns)
        for k in range(0, count, step)
    ]
    # D has to be positive and finite, whatever the iteration has done: it is divided
    # by.
    squares = np.nan_to_num(np.concatenate(chunks), nan=0.0, posinf=0.0)
    largest = squares.max(axis=1, keepdims=True)
    positive = np.where(largest > 0, np.maximum(squares, 1e-12 * largest), 1.0)
    return np.asarray(np.sqrt(positive))


def _squares(
    targets: np.ndarray, whole: np.ndarray, multiplier: str, columns: int
) -> np.ndarray:
    """T of some matrices G, (P, n)."""
    count, outputs, n = targets.shape
    transposed = targets.transpose(0, 2, 1)
    if multiplier == "aol":
        return np.asarray(np.abs(transposed @ targets).sum(2))
    signed = multiplier == "optimal" or outputs == 1
    sizes = np.abs(transposed @ targets) if not signed else np.ones((0, 0, 0))
    # Y starts in the leading directions of W, with |Y| = 1.
    basis = np.linalg.svd(whole, full_matrices=False)[2][:columns].T
    y = np.broadcast_to(basis / sqrt(columns), (count, *basis.shape))
    # For one row, min(outputs, columns) = 1: directions are signs.
    shape = (count, n, min(outputs, columns))
    directions = np.random.default_rng(0).standard_normal(shape)
    previous = np.zeros(count)
    for step in range(_STEPS[multiplier]):
        images = whole @ y
        # (P, n): the weights of the neurons.
        d = np.linalg.norm(images, axis=2)
        d = np.maximum(d, _SPREAD * d.max(axis=1, keepdims=True)) + UNDERFLOW
        if signed:
            for _ in range(1 if outputs == 1 else 3):
                directions = transposed @ (targets @ (d[:, :, None] * directions))
                sums = np.linalg.norm(directions, axis=2)
                directions = directions / (sums[:, :, None] + UNDERFLOW)
        else:
            sums = (sizes @ d[:, :, None])[:, :, 0]
        # t_k = |Σ_j (GᵀG)_kj d_j v_j|/d_k, and with |GᵀG| and v_j = 1 for "sll".
        squares = sums / d
        # Y ← WᵀTWY, then |Y| = 1 again.
        y = whole.T @ (squares[:, :, None] * images)
        value = np.linalg.norm(y, axis=(1, 2))
        y = y / (value[:, None, None] + UNDERFLOW)
        if step % 10 == 9:
            if (np.abs(value - previous) <= 1e-9 * value).all():
                break
            previous = value
    return np.asarray(squares)
