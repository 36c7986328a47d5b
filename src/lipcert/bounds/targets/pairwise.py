"""Each pair of classes: the constant of every difference of logits (eqn:pairwiseLipschitzCalculation)."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from lipcert.bounds.targets.target import Target, bound_pair_norms, pair_norms, register_target


@register_target
class Pairwise(Target):
    """The constants of x ↦ f_a(x) − f_b(x), of shape (K, K), symmetric with zero diagonal."""

    name = "pairwise"
    rank = 3

    def shape(self, classes: int) -> tuple[int, ...]:
        return (classes, classes)

    def row_norms(self, rows: Tensor) -> Tensor:
        return pair_norms(rows)

    def bound_row_norms(self, rows: Tensor, error: float) -> Tensor:
        return bound_pair_norms(rows, error)

    def pairwise(self, value: Tensor, classes: int) -> Tensor:
        return value

    def functionals(self, classes: int) -> list[tuple[tuple[Any, ...], Tensor]]:
        unit = torch.eye(classes, dtype=torch.float64)
        found: list[tuple[tuple[Any, ...], Tensor]] = []
        for a, b in combinations(range(classes), 2):
            found.append((([a, b], [b, a]), unit[a : a + 1] - unit[b : b + 1]))
        return found

    def mean(self, value: Tensor) -> Tensor:
        classes = len(value)
        return value.sum() / max(classes * (classes - 1), 1)


@register_target
class LastLayer(Pairwise):
    """The same by LipLT up to the last layer and the norms of its rows: what the paper does for many classes."""

    name = "last-layer"
    rank = 2
    transforms_last = False
    refinable = False
