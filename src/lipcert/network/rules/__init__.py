"""Rules: one operator → linear operations or a slope interval. Every file of this folder is read."""

from importlib import import_module
from pkgutil import iter_modules

from lipcert.network.rules.call import Call
from lipcert.network.rules.registry import VIEWS, register_rule
from lipcert.network.rules.values import Constant, Input, Refusal, Result, Sum

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

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
