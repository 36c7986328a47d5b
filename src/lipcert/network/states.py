"""What is put back afterwards: the modes and attributes of modules, their hooks, and the messages of torch."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """Within, all modules are in eval mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Afterwards, modules have the attributes that they had before."""
    states = [(vars(module), dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for attributes, before in states:
            attributes.clear()
            attributes.update(before)


def bare(module: nn.Module) -> nn.Module:
    """The same module, with all its attributes, whose call is its `forward` alone: no hook runs around it."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    kind = type(module)
    attributes = {"__call__": call, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    twin: nn.Module = object.__new__(type(kind.__name__, (kind,), attributes))
    object.__setattr__(twin, "__dict__", vars(module))
    return twin


@contextmanager
def quiet() -> Iterator[None]:
    """Without torch.export's own messages: what matters of them becomes an error of ours."""
    loggers = [logging.getLogger(name) for name in ("torch.fx.experimental", "torch._export", "torch.export")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
