"""The network as a map: one constant in the l2 norms of its input and of its output."""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch
from torch import Tensor

from lipcert.bounds.targets.target import Target, register_target
from lipcert.network.normal_form import Network


@register_target
class Whole(Target):
    """The constant of x ↦ f(x), of shape (); L_ab ≤ √2·L."""

    name = "network"
    rank = 0
    whole_output = True

    def check(self, network: Network) -> None:
        """Any output will do."""

    def shape(self, classes: int) -> tuple[int, ...]:
        return ()

    def row_norms(self, rows: Tensor) -> Tensor:
        norm: Tensor = torch.linalg.matrix_norm(rows.flatten(1), 2)
        return norm

    def bound_row_norms(self, rows: Tensor, error: float) -> Tensor:
        raise NotImplementedError("the norms of whole maps are bounded with the others")

    def pairwise(self, value: Tensor, classes: int) -> Tensor:
        return value * sqrt(2) * (1 - torch.eye(classes, dtype=value.dtype, device=value.device))

    def functionals(self, classes: int) -> list[tuple[tuple[Any, ...], Tensor]]:
        return [((), torch.eye(classes, dtype=torch.float64))]
