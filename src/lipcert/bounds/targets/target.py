"""What is bounded: the interface of targets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor

from lipcert.bounds.register import Register
from lipcert.network.normal_form import Network

Functional = tuple[tuple[Any, ...], Tensor]
"""Where in the value a functional belongs, and its weights of the logits."""


class Target(ABC):
    """A set of linear functionals of the output whose Lipschitz constants are wanted.

    Their values have one shape per target. A target is known by its name; adding one is
    a subclass in a file of its own with `@register_target`.
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
        network.check_logits()

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
    def functionals(self, classes: int) -> list[Functional]:
        """All functionals."""

    def mean(self, value: Tensor) -> Tensor:
        """The mean over all functionals."""
        return value.mean()


# Filled by the decorators when the modules of this folder are imported.
TARGETS: Register[Target] = Register("target")
register_target = TARGETS.add
find_target = TARGETS.find
