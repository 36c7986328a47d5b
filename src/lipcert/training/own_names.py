"""What configurations may name besides what is known: models and losses of one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lipcert.errors import nearest
from lipcert.losses import OwnLoss, TrainingLoss
from lipcert.models import zoo
from lipcert.own_code import GIVEN, is_own


def network_name(value: str) -> str:
    """A network of the zoo, module:factory, or one that was given as an object."""
    # module:factory is imported when the network is built, not while a configuration is
    # read.
    if not value.endswith(GIVEN) and not is_own(value) and value not in zoo.names():
        listed = ", ".join(zoo.names())
        raise ValueError(
            f"expected one of {listed}, or module:factory{nearest(value, zoo.names())}"
        )
    return value


def own_or_known(value: Any, known: Callable[[Any], TrainingLoss]) -> TrainingLoss:
    """A loss by its name alone or with options; one of the user's, or a known one."""
    # loss = "crm" is short for [loss] type = "crm".
    if isinstance(value, str):
        value = {"type": value}
    if isinstance(value, OwnLoss):
        return value
    name = str(value.get("type", "")) if isinstance(value, dict) else ""
    if is_own(name) or name.endswith(GIVEN):
        return OwnLoss.model_validate(value)
    return known(value)
