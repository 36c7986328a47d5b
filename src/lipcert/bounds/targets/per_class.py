"""Each class: the constant of every logit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lipcert.bounds.targets.target import Target, bound_class_norms, class_norms, register_target


@register_target
class PerClass(Target):
    """The constants of x ↦ f_a(x), of shape (K,); L_ab ≤ L_a + L_b."""

    name = "per-class"
    rank = 1

    def shape(self, classes: int) -> tuple[int, ...]:
        return (classes,)

    def row_norms(self, rows: Tensor) -> Tensor:
        return class_norms(rows)

    def bound_row_norms(self, rows: Tensor, error: float) -> Tensor:
        return bound_class_norms(rows, error)

    def pairwise(self, value: Tensor, classes: int) -> Tensor:
        off_diagonal = 1 - torch.eye(classes, dtype=value.dtype, device=value.device)
        return (value[:, None] + value[None, :]) * off_diagonal

    def functionals(self, classes: int) -> list[tuple[tuple[Any, ...], Tensor]]:
        unit = torch.eye(classes, dtype=torch.float64)
        return [((a,), unit[a : a + 1]) for a in range(classes)]
