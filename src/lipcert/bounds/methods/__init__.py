"""Methods of bounding, found by their names."""

from importlib import import_module
from pkgutil import iter_modules

from lipcert.bounds.methods.method import (
    METHODS,
    Method,
    MethodTask,
    find_method,
    register_method,
)

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["METHODS", "Method", "MethodTask", "find_method", "register_method"]
