"""ECLipsE-Fast, another fast bound of fully connected networks, and a check that it is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from math import exp, log
from typing import Any

import torch
from torch import Tensor

from benchmarks.mlps import random_mlp, weights


def eclipse_fast(matrices: Sequence[Tensor]) -> float:
    """ECLipsE-Fast (Xu and Sivaranjani, NeurIPS 2024) for slopes in [0, 1]; not rounded up.

    X_0 = I, K_i = ¼ W_i X_{i−1}⁻¹ W_iᵀ, λ_i = 1/(2‖K_i‖), X_i = λ_i I − λ_i² K_i; then L² = ‖W_l X⁻¹ W_lᵀ‖.
    """
    x = torch.eye(matrices[0].shape[1], dtype=torch.float64)
    for w in matrices[:-1]:
        k = w @ torch.linalg.solve(x, w.T) / 4
        k = (k + k.T) / 2
        multiplier = 1 / (2 * torch.linalg.eigvalsh(k)[-1])
        x = multiplier * torch.eye(len(k), dtype=torch.float64) - multiplier**2 * k
    square = matrices[-1] @ torch.linalg.solve(x, matrices[-1].T)
    return float(torch.linalg.eigvalsh((square + square.T) / 2)[-1].sqrt())


def check_eclipse() -> dict[str, Any]:
    """Chains of scaled identities have the product of the scales as their constant: nothing may be below it."""
    lowest, package = 1.0, "not installed"
    estimators: list[Callable[[Sequence[Tensor]], float]] = [eclipse_fast]
    try:
        from eclipse_nn import LipConstEstimator  # type: ignore[import-not-found]

        package = version("eclipse-nn")
        estimators.append(
            lambda ws: float(
                LipConstEstimator(weights=list(ws)).estimate("ECLipsE_Fast")
            )
        )
    except (ImportError, PackageNotFoundError):
        pass
    for scales in ((2.0, 0.5, 3.0), (1.7,) * 6, (0.3, 2.5, 4.0, 1.0), (0.5,) * 20):
        exact = exp(sum(map(log, scales)))
        chain = [scale * torch.eye(5, dtype=torch.float64) for scale in scales]
        lowest = min(lowest, *(estimate(chain) / exact for estimate in estimators))
    difference = 0.0
    for depth in (2, 5, 10):
        own, *others = (
            estimate(weights(random_mlp(depth, 0))) for estimate in estimators
        )
        difference = max(difference, *(abs(other / own - 1) for other in others), 0.0)
    return {"package": package, "lowest_ratio_to_exact": lowest, "valid": lowest > 1 - 1e-9,
            "largest_difference_of_package": difference if len(estimators) > 1 else None}  # fmt: skip
