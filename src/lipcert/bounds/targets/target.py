"""What is bounded: the interface of targets, and norms of rows that they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lipcert.errors import check_choice
from lipcert.network.normal_form import Network
from lipcert.norms.rows import flat_rows, row_norms
from lipcert.rounding import UNDERFLOW, gamma

_CHUNK = 1 << 24  # entries of row differences formed at a time


class Target(ABC):
    """A set of linear functionals of the output whose Lipschitz constants are wanted.

    Their values have one shape per target. A target is known by its name; adding one is a subclass in a file of its own
    with `@register_target`.
    """

    name: ClassVar[str]
    rank: ClassVar[int] = 10
    """Where it stands in tables: from one constant to many."""
    whole_output: ClassVar[bool] = False
    """Whether the value rests on norms of maps to the whole output instead of its rows."""
    transforms_last: ClassVar[bool] = True
    """Whether the loop transformation is used across the last layer too."""
    refinable: ClassVar[bool] = True
    """Whether the share of every functional may be refined for itself."""

    def check(self, network: Network) -> None:
        """Refuse networks whose output the target does not fit."""
        _ = network.classes

    @abstractmethod
    def shape(self, classes: int) -> tuple[int, ...]:
        """The shape of the values."""

    @abstractmethod
    def row_norms(self, rows: Tensor) -> Tensor:
        """Norms of the functionals of the K rows of a map to the output; differentiable."""

    @abstractmethod
    def bound_row_norms(self, rows: Tensor, error: float) -> Tensor:
        """Upper bounds on these norms, for float64 rows that are known up to an error of this norm each."""

    @abstractmethod
    def pairwise(self, value: Tensor, classes: int) -> Tensor:
        """(K, K): constants of the logit differences that follow from the values."""

    @abstractmethod
    def functionals(self, classes: int) -> list[tuple[tuple[Any, ...], Tensor]]:
        """Where in the value each functional belongs, and its weights of the logits."""

    def mean(self, value: Tensor) -> Tensor:
        """The mean over all functionals."""
        return value.mean()


TARGETS: dict[str, Target] = {}


def register_target(kind: type[Target]) -> type[Target]:
    """Decorator: makes a target known by its name."""
    TARGETS[kind.name] = kind()
    ordered = sorted(TARGETS.items(), key=lambda item: item[1].rank)
    TARGETS.clear()
    TARGETS.update(ordered)
    return kind


def find_target(name: str) -> Target:
    """The target of this name."""
    check_choice("target", name, tuple(TARGETS))
    return TARGETS[name]


def class_norms(rows: Tensor) -> Tensor:
    """‖r_a‖ for every row a: the Lipschitz constant of x ↦ r_a·x."""
    return row_norms(rows)


def pair_norms(rows: Tensor) -> Tensor:
    """‖r_a − r_b‖ for every pair of rows, as a symmetric matrix with zero diagonal."""
    return _PairDistances.apply(flat_rows(rows))  # type: ignore[no-any-return, no-untyped-call]


def bound_class_norms(rows: Tensor, error: float) -> Tensor:
    """Upper bounds on the norms of rows."""
    return class_norms(rows) * (1 + gamma(rows.shape[1] + 4)) + error + UNDERFLOW


def bound_pair_norms(rows: Tensor, error: float) -> Tensor:
    """Distances of the rows from above: their squares come from a Gram matrix with errors of γ_n·(‖r_a‖² + ‖r_b‖²)."""
    squares = class_norms(rows - rows.mean(0, keepdim=True)).square()
    scale = squares[:, None] + squares[None, :]
    roundoff = gamma(rows.shape[1] + 8)
    distances = pair_norms(rows).square()
    # Distances below 1e-6 of the scale were formed from the difference itself, the others after centring; near that
    # threshold the larger allowance holds for both.
    from_difference = distances <= 0.99e-6 * scale
    allowance = torch.where(from_difference, distances, 4 * scale) * roundoff
    centring = (~from_difference).double() * (8 * gamma(1) * float(rows.mean(0).norm()))
    upper: Tensor = (distances + allowance).sqrt() * (1 + gamma(8)) + 2 * error + centring + UNDERFLOW
    return upper.fill_diagonal_(0.0)


class _PairDistances(torch.autograd.Function):
    """All distances ‖r_a − r_b‖ from the Gram matrix of the rows; gradient zero where the distance is zero.

    Distances are invariant under centring, which removes what the rows have in common. Where cancellation still would
    cost digits, the difference is formed. The backward pass is one product with a (K, K) matrix.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        centred = rows - rows.mean(0, keepdim=True)
        gram = centred @ centred.T
        squares = gram.diagonal()
        scale = squares[:, None] + squares[None, :]
        distances = (scale - 2 * gram).clamp(min=0)
        tolerance = 1e-2 if rows.dtype == torch.float32 else 1e-6
        first, second = torch.triu(distances <= tolerance * scale, diagonal=1).nonzero(as_tuple=True)
        step = max(1, _CHUNK // max(rows.shape[1], 1))
        for a, b in zip(torch.split(first, step), torch.split(second, step), strict=True):
            exact = (rows[a] - rows[b]).square().sum(1)
            distances[a, b] = exact
            distances[b, a] = exact
        distances = distances.fill_diagonal_(0).sqrt()
        ctx.save_for_backward(centred, distances)
        return distances

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        centred, distances = ctx.saved_tensors
        weights = torch.where(distances > 0, (gradient + gradient.T) / distances, torch.zeros_like(distances))
        return torch.diag(weights.sum(1)).sub(weights) @ centred
