"""The parts of a configuration: what loss, estimates, optimizers, schedules and augmentation can be told."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    SerializeAsAny,
    WrapValidator,
)

from lipcert.bounds import estimator as estimators
from lipcert.bounds.targets import TARGETS
from lipcert.errors import nearest
from lipcert.losses import LOSSES, TrainingLoss
from lipcert.losses.loss import Positive
from lipcert.training.own_names import own_or_known


def _one_of(choices: Sequence[str]) -> AfterValidator:
    def check(value: str) -> str:
        if value not in choices:
            raise ValueError(
                f"expected one of {', '.join(choices)}{nearest(value, choices)}"
            )
        return value

    return AfterValidator(check)


class Part(BaseModel):
    """Values that do not change, under names that are all known."""

    model_config = ConfigDict(frozen=True, extra="forbid")


if TYPE_CHECKING:
    LossConfig = TrainingLoss
else:  # one of the registered losses, told apart by their field `type`, or module:function
    LossConfig = Annotated[
        reduce(or_, LOSSES.values()),
        Field(discriminator="type"),
        WrapValidator(own_or_known),
        SerializeAsAny(),
    ]


class EstimatorConfig(Part):
    """How the constants of the loss are estimated.

    accelerated: locally optimal conjugate gradients instead of power iteration.
    scale_lr: the learning rate of the scales of method "rescaled", as a multiple of
    that of the weights.
    """

    method: Annotated[str, _one_of(estimators.METHODS)] = "liplt"
    target: Annotated[str, _one_of(TARGETS)] = "pairwise"
    power_iterations: PositiveInt = 5
    accelerated: bool = False
    scale_lr: Positive = 10.0


class OptimizerConfig(Part):
    """Adam with the paper's constants; type "muon" moves the matrices of dense layers by Muon instead, "muon-kernels"
    the kernels of convolutions too.

    muon_lr: the learning rate of Muon, as a multiple of Adam's.
    momentum, weight_decay: of Muon.
    orthogonal: whether what Muon moves is kept orthogonal, by a step towards the nearest
    orthogonal matrix after each of its own. Begin with init = "orthogonal".
    muon_iterations: how near to orthogonal the steps themselves are made; each costs two or
    three products of matrices.
    """

    type: Literal["adam", "muon", "muon-kernels"] = "adam"
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    eps: Positive = 1e-7
    muon_lr: Positive = 20.0
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    weight_decay: NonNegativeFloat = 0.01
    orthogonal: bool = False
    muon_iterations: PositiveInt = 5


class ScheduleConfig(Part):
    """The paper's (lr_0, lr_f, lr_decay), or a linear decay to zero: see `training.schedule`.

    warmup_steps: the first steps, over which the learning rate grows to its value.
    """

    decay: Literal["exponential", "linear"] = "exponential"
    warmup_steps: NonNegativeInt = 0
    lr0: Positive = 1e-3
    lrf: Positive = 1e-5
    decay_epoch: NonNegativeInt = 0


class AugmentationConfig(Part):
    """The paper's (d, t), and flips, zoom, colours, erased squares and mixing, which it does not use.

    mix: every image becomes (1 − s)·image + s·another one, with s drawn between 0 and this;
    labels become what a teacher says of the mixture, or without one the shares in it.
    """

    degrees: Annotated[float, Field(ge=0, le=180)] = 0.0
    translate: Annotated[float, Field(ge=0, le=1)] = 0.0
    flip: bool = False
    zoom: Annotated[float, Field(ge=0, le=1)] = 0.0
    colour: Annotated[float, Field(ge=0, le=1)] = 0.0
    erase: Annotated[float, Field(ge=0, le=1)] = 0.0
    mix: Annotated[float, Field(ge=0, le=0.5)] = 0.0
