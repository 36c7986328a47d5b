"""Rules: one torch operation → linear operations or a slope interval."""

from lipcert.network.rules import activation, affine, arithmetic, shape
from lipcert.network.rules.registry import VIEWS, Call, Constant, Input, Refusal, Sum, find_rule, register_rule

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
    "find_rule",
    "register_rule",
    "shape",
]
