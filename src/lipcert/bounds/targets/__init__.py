"""Targets: the network, each class, each pair of classes; found by their names."""

from importlib import import_module
from pkgutil import iter_modules

from lipcert.bounds.targets.distances import class_norms, pair_norms
from lipcert.bounds.targets.functionals import default_target
from lipcert.bounds.targets.target import TARGETS, Target, find_target, register_target

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = [
    "TARGETS",
    "Target",
    "class_norms",
    "default_target",
    "find_target",
    "pair_norms",
    "register_target",
]
