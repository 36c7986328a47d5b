"""The targets of the library: the network, each class, and each pair of classes in two ways."""

from __future__ import annotations

import logging
from itertools import combinations
from math import sqrt

import torch
from torch import Tensor

from lipcert.bounds.targets.distances import (
    bound_class_norms,
    bound_pair_norms,
    class_norms,
    pair_norms,
)
from lipcert.bounds.targets.target import Functional, Target, register_target
from lipcert.network.normal_form import Network

_LOG = logging.getLogger(__name__)


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
        # z_a − z_b is ⟨e_a − e_b, z⟩, and ‖e_a − e_b‖ = √2.
        return (
            value
            * sqrt(2)
            * (1 - torch.eye(classes, dtype=value.dtype, device=value.device))
        )

    def functionals(self, classes: int) -> list[Functional]:
        return [((), torch.eye(classes, dtype=torch.float64))]


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
        # Triangle inequality; z_a − z_a is 0.
        return (value[:, None] + value[None, :]) * off_diagonal

    def functionals(self, classes: int) -> list[Functional]:
        unit = torch.eye(classes, dtype=torch.float64)
        return [((a,), unit[a : a + 1]) for a in range(classes)]


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

    def functionals(self, classes: int) -> list[Functional]:
        unit = torch.eye(classes, dtype=torch.float64)
        differences: list[Functional] = []
        for a, b in combinations(range(classes), 2):
            # values[[a, b], [b, a]] = L sets both entries, (a, b) and (b, a).
            differences.append((([a, b], [b, a]), unit[a : a + 1] - unit[b : b + 1]))
        return differences

    def mean(self, value: Tensor) -> Tensor:
        classes = len(value)
        # The zero diagonal is no functional.
        return value.sum() / max(classes * (classes - 1), 1)


@register_target
class LastLayer(Pairwise):
    """The same by LipLT up to the last layer and the norms of its rows: what the paper does for many classes."""

    name = "last-layer"
    rank = 2
    transforms_last = False
    refinable = False


def default_target(network: Network) -> str:
    """Pairwise for two or more logits; for a single output, or a map, the network as a whole."""
    shape = network.output_shape
    if len(shape) == 1 and shape[0] > 1:
        return "pairwise"
    _LOG.warning(
        "outputs of shape %s are no logits: the constant is that of the "
        "network as a whole",
        shape,
    )
    return "network"
