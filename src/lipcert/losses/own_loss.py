"""A loss of one's own: any function of logits, labels and constants, by its name or as an object."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, get_args

import torch
from pydantic import ConfigDict, PrivateAttr
from torch import Tensor

from lipcert.errors import ConfigError
from lipcert.losses.loss import Loss, TrainingLoss
from lipcert.own_code import GIVEN, failure, given_name, own_code

Function = Callable[..., Any]


class OwnLoss(TrainingLoss):
    """`type` is module:function; all other options are its keyword arguments.

    The function takes logits (B, K), labels (B,) and constants (K, K), and returns a
    number to be minimised, a tensor of shape (), or a `Loss`. A `TrainingLoss` class
    may stand in its place: it is made with the options.
    """

    model_config = ConfigDict(frozen=True, extra="allow")
    label: ClassVar[str] = "own loss"
    type: str
    _function: Function | None = PrivateAttr(None)

    @classmethod
    def of(cls, function: Function) -> OwnLoss:
        """The loss that a program has given as an object."""
        if not callable(function):
            raise ConfigError(
                f"loss is {type(function).__name__}, expected a function of logits, "
                "labels and constants"
            )
        loss = cls(type=given_name(function))
        # A private attribute is no option, and is not written to config.toml.
        loss._function = function
        return loss

    def function(self) -> Function:
        """What the name stands for, imported once."""
        if self._function is not None:
            return self._function
        if self.type.endswith(GIVEN):
            name = self.type.removesuffix(GIVEN)
            raise ConfigError(
                f"the loss {name} was given in Python and is not stored; give "
                "it again as loss="
            )
        # The current folder is on the path within: a class may import more when it is
        # made.
        with own_code(self.type, ConfigError) as found:
            function: Function = found
            if not callable(found):
                raise ConfigError(
                    f"{self.type} is {type(found).__name__}, expected a function"
                )
            if isinstance(found, type) and issubclass(found, TrainingLoss):
                function = _made(found, self.type, self.model_extra or {})
        self._function = function
        return function

    def try_out(self, classes: int) -> None:
        """Refuse a function that cannot be trained with, before anything is trained: two inputs, constants of 1."""
        logits = torch.eye(2, classes, requires_grad=True)
        # % classes, for a single class has the label 0 only.
        value = self(logits, torch.arange(2) % classes, 1 - torch.eye(classes)).loss
        if not value.requires_grad:
            raise ConfigError(
                f"the loss {self.type} returns a number that has no gradient with "
                "respect to the logits"
            )

    def __call__(self, logits: Tensor, labels: Tensor, constants: Tensor) -> Loss:
        function = self.function()
        # A class was made with its options already.
        options = {} if isinstance(function, TrainingLoss) else self.model_extra or {}
        try:
            value = function(logits, labels, constants, **options)
        except Exception as error:  # whatever the user's code raises
            wanted = "fails as a function of logits, labels and constants"
            raise failure(
                f"the loss {self.type}", wanted, error, ConfigError
            ) from error
        if isinstance(value, Loss):
            return value
        if (
            not isinstance(value, Tensor)
            or value.shape != ()
            or not value.is_floating_point()
        ):
            found = (
                f"{type(value).__name__} {tuple(getattr(value, 'shape', ()))}"
            ).removesuffix(" ()")
            raise ConfigError(
                f"the loss {self.type} returns {found}, expected a tensor of "
                "shape () or a Loss"
            )
        return Loss(value, value.detach(), value.detach() * 0)


def _made(
    kind: type[TrainingLoss], name: str, options: Mapping[str, Any]
) -> TrainingLoss:
    """A loss of a class of the user."""
    # Literal["mine"] takes this one name; a plain str takes that of the class.
    types = get_args(kind.model_fields["type"].annotation) or (name,)
    try:
        return kind(**{"type": types[0], **options})
    except Exception as error:  # whatever the user's code raises
        raise failure(
            name, f"cannot be made with {dict(options)}", error, ConfigError
        ) from error
