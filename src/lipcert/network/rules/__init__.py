"""Rules: one operator → linear operations or a slope interval."""

from lipcert.network.rules import activation, affine, arithmetic, pooling, refusals, shape
from lipcert.network.rules.registry import VIEWS, Call, Constant, Input, Refusal, Sum, register_rule

__all__ = [
    "VIEWS",
    "Call",
    "Constant",
    "Input",
    "Refusal",
    "Sum",
    "activation",
    "affine",
    "arithmetic",
    "pooling",
    "refusals",
    "register_rule",
    "shape",
]
