"""What stands for tensors and numbers in the calls that rules see, and what rules may return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from lipcert.network.linear import LinearOp
from lipcert.network.program import Shape
from lipcert.network.slopes import Slope


class Refusal(Exception):
    """Raised by a rule for a call it cannot express; the message is the remedy shown to the user."""


@dataclass(frozen=True)
class Input:
    """A tensor that depends on the network's input: the output of node `source`, one row of which has `shape`."""

    source: int
    shape: Shape


@dataclass(frozen=True)
class Constant:
    """A tensor that does not depend on the network's input; calling it reads its present value."""

    read: Callable[[], Tensor]
    batched: bool = False
    """Whether it has a batch axis, of which one row is read."""

    def __call__(self) -> Tensor:
        return self.read()


class BatchSize:
    """Stands for the number of rows of a batch among the arguments of a call."""


class OtherSize:
    """Stands for a number computed from the number of rows."""


@dataclass(frozen=True)
class Sum:
    """Σ of chains of linear operations on several inputs; an empty chain is the identity."""

    terms: Sequence[tuple[Input, Sequence[LinearOp]]]


@dataclass(frozen=True)
class Extremum:
    """The larger (sign 1) or the smaller (sign −1) of two inputs, (a + b)/2 ± |a − b|/2."""

    first: Input
    second: Input
    sign: int


@dataclass(frozen=True)
class SortedPair:
    """The two entries along an axis of a row, sorted: (a + b)/2 ∓ |a − b|/2, or the other way round if descending."""

    axis: int
    descending: bool


Result = Slope | LinearOp | Sequence[LinearOp] | Sum | Extremum | SortedPair | Input
"""What a rule returns: a nonlinearity or linear operations on the only input, a sum, or an input passed through."""
