"""Rules: one operator → linear operations or a slope interval."""

from lipcert.network.rules import (
    activation,
    affine,
    arithmetic,
    order,
    pooling,
    refusals,
    shape,
    writing,
)
from lipcert.network.rules.call import Call
from lipcert.network.rules.registry import VIEWS, register_rule
from lipcert.network.rules.values import Constant, Input, Refusal, Result, Sum

__all__ = [
    "VIEWS",
    "Call",
    "Constant",
    "Input",
    "Refusal",
    "Result",
    "Sum",
    "register_rule",
]
__all__ += [
    "activation",
    "affine",
    "arithmetic",
    "order",
    "pooling",
    "refusals",
    "shape",
    "writing",
]
