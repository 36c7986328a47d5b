"""What a training loss is: its value, its options, the names, and checks of the tensors that it takes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import isfinite
from typing import ClassVar, Self, TypeVar, get_args

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor
from torch.nn import functional as F

from lipcert.errors import DataError, NonFiniteError, OptionError, ShapeError
from lipcert.option_values import Epsilon as Epsilon  # noqa: PLC0414 - configurations read both from here
from lipcert.option_values import Positive as Positive  # noqa: PLC0414


@dataclass(frozen=True)
class Loss:
    """A loss and its parts, all of shape (): `loss` = `base` + `robust`, with every weight already in.

    Differentiate `loss`; the parts are there to be logged and may be detached.
    """

    loss: Tensor
    base: Tensor
    robust: Tensor


class TrainingLoss(BaseModel, ABC):
    """A loss with its options, as configurations state them.

    Adding one is a subclass in a file of its own with `@register_loss`. Its field
    `type` is a Literal of its name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: str
    label: ClassVar[str]
    """What reports call it."""
    robust: ClassVar[bool] = True
    """Whether it uses Lipschitz constants."""
    probable: ClassVar[bool] = False
    """Whether labels may be probabilities of all classes."""
    lengths: ClassVar[tuple[str, ...]] = ()
    """Options that are distances in the input space; they grow with the perturbations that are asked for."""
    rates: ClassVar[tuple[str, ...]] = ()
    """Options that multiply distances."""

    @abstractmethod
    def __call__(self, logits: Tensor, labels: Tensor, constants: Tensor) -> Loss:
        """The value for a batch."""

    def in_units(self, factor: float) -> Self:
        """The same loss for perturbations that are `factor` times as large."""
        values = self.model_dump()
        # t·r and λ·r keep their values if all distances r grow by the factor and rates
        # shrink by it.
        for name in self.lengths:
            values[name] *= factor
        for name in self.rates:
            values[name] /= factor
        return type(self)(**values)

    def first_term(self, logits: Tensor, labels: Tensor) -> Tensor:
        """What is minimised as long as there are no constants: the cross-entropy, unless the loss has another base."""
        logits, labels = checked(logits, labels)
        return F.cross_entropy(logits, labels)


LOSSES: dict[str, type[TrainingLoss]] = {}
Kind = TypeVar("Kind", bound=TrainingLoss)


def register_loss(kind: type[Kind]) -> type[Kind]:
    """Decorator: makes a loss known by the one value that its field `type` can have."""
    # Literal["crm"] has the one argument "crm".
    (name,) = get_args(kind.model_fields["type"].annotation)
    LOSSES[name] = kind
    return kind


def checked(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Logits in float32 or wider and labels as int64; refused if they do not belong together."""
    _check_tensor("logits", logits)
    _check_tensor("labels", labels)
    if logits.ndim != 2 or 0 in logits.shape or not logits.is_floating_point():
        raise ShapeError(
            f"logits: expected floating-point (B, K), not empty, got {_kind(logits)}"
        )
    if (
        labels.shape != logits.shape[:1]
        or labels.is_floating_point()
        or labels.dtype == torch.bool
    ):
        raise ShapeError(
            f"labels: expected integers of shape ({len(logits)},), got {_kind(labels)}"
        )
    classes = logits.shape[1]
    outside = labels[(labels < 0) | (labels >= classes)]
    if len(outside):
        raise DataError(
            f"labels contain {int(outside[0])}, expected 0 to {classes - 1}: the "
            "logits have that many classes"
        )
    # Under autocast logits are bfloat16, in which margins and radii have two or three
    # digits.
    return logits.to(torch.promote_types(logits.dtype, torch.float32)), labels.long()


def checked_with_constants(
    logits: Tensor, labels: Tensor, constants: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same with constants, in the wider dtype of logits and constants."""
    logits, labels = checked(logits, labels)
    classes = logits.shape[1]
    _check_tensor(
        "constants",
        constants,
        "; pass estimator(), or bound.pairwise(classes) of a bound",
    )
    if constants.shape != (classes, classes) or not constants.is_floating_point():
        remedy = "use Estimator.pairwise() for other targets"
        raise ShapeError(
            f"constants: expected floating-point ({classes}, {classes}), got "
            f"{_kind(constants)}; {remedy}"
        )
    # The diagonal is never read: callers may leave anything there.
    other = ~torch.eye(classes, dtype=torch.bool, device=constants.device)
    if not bool((constants.isfinite() | ~other).all()):
        raise NonFiniteError(
            "constants contain NaN or infinity; restore the last good weights"
        )
    if bool(((constants < 0) & other).any()):
        raise OptionError(
            "constants contain a negative number, expected Lipschitz "
            "constants (0 or more)"
        )
    dtype = torch.promote_types(logits.dtype, constants.dtype)
    return logits.to(dtype), labels, constants.to(dtype)


def check_probabilities(probabilities: Tensor, logits: Tensor) -> None:
    """Refuse labels that are not a distribution over the classes for every input."""
    _check_tensor("probabilities", probabilities)
    if probabilities.shape != logits.shape:
        raise ShapeError(
            "probabilities: expected the shape of the logits, "
            f"{tuple(logits.shape)}, got {tuple(probabilities.shape)}"
        )
    sums = probabilities.double().sum(1)
    if not bool((probabilities >= 0).all() and ((sums - 1).abs() < 1e-3).all()):
        raise DataError(
            "probabilities of the classes have to be 0 or more and to sum to 1 for "
            "every input"
        )


def true_class(logits: Tensor, classes: Tensor) -> Tensor:
    """(B, K): whether an entry belongs to the class of its row."""
    return F.one_hot(classes, logits.shape[1]).bool()


def check_positive(**options: float) -> None:
    """Refuse options that are not positive numbers."""
    for name, value in options.items():
        if not (isfinite(value) and value > 0):
            raise OptionError(f"{name} is {value}, expected a positive number")


def check_not_negative(**options: float) -> None:
    """Refuse options that are negative or not finite."""
    for name, value in options.items():
        if not (isfinite(value) and value >= 0):
            raise OptionError(f"{name} is {value}, expected 0 or more")


def _check_tensor(name: str, value: object, remedy: str = "") -> None:
    if not isinstance(value, Tensor):
        raise ShapeError(
            f"{name} are {type(value).__name__}, expected a tensor{remedy}"
        )


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
