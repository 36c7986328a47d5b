"""States of modules and of torch: what is put back afterwards, and what must not change meanwhile."""

from __future__ import annotations

import logging
import sys
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes of every module: its tensors, its parts and its hooks."""


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """Within, all modules are in eval mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        # One by one: model.train() would also switch layers that the user has frozen in
        # eval mode.
        for module, mode in modes:
            module.training = mode


def registered(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers, by all their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Afterwards, modules have the attributes that they had before, and what is kept in containers among them."""
    # The dictionary itself, and a copy of it.
    states = [(vars(module), dict(vars(module))) for module in model.modules()]
    kept: dict[int, tuple[Any, list[Any]]] = {}
    for attributes, _ in states:
        for name, value in attributes.items():
            if name not in _OF_TORCH:
                _note(value, kept)
    try:
        yield
    finally:
        for attributes, before in states:
            # Attributes that were added must go, those that were deleted come back.
            attributes.clear()
            attributes.update(before)
        for container, items in kept.values():
            _put_back(container, items)


def _note(value: Any, kept: dict[int, tuple[Any, list[Any]]]) -> None:
    """Note what a container has in it, and the containers inside."""
    # Containers may contain themselves.
    if id(value) in kept or not isinstance(value, dict | list | set | deque | tuple):
        return
    items = list(value.items()) if isinstance(value, dict) else list(value)
    kept[id(value)] = (value, items)
    for item in value.values() if isinstance(value, dict) else items:
        _note(item, kept)


def _put_back(container: Any, items: list[Any]) -> None:
    """Give a container the items that it had; it is left alone if it still has them."""
    if isinstance(container, tuple):
        return
    now = (
        [part for item in container.items() for part in item]
        if isinstance(container, dict)
        else list(container)
    )
    before = (
        [part for item in items for part in item]
        if isinstance(container, dict)
        else items
    )
    # By identity: == of two tensors is a tensor.
    if len(now) == len(before) and all(
        a is b for a, b in zip(now, before, strict=True)
    ):
        return
    container.clear()
    if isinstance(container, dict | set):
        container.update(items)
    else:
        container.extend(items)


def bare(module: nn.Module) -> nn.Module:
    """The same module, with all its attributes, whose call is its `forward` alone: no hook runs around it."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    kind = type(module)
    attributes = {
        "__call__": call,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    # A subclass, so that isinstance and the rules still know it, with the same
    # dictionary: both see every change.
    twin: nn.Module = object.__new__(type(kind.__name__, (kind,), attributes))
    object.__setattr__(twin, "__dict__", vars(module))
    return twin


def switches() -> dict[str, Any]:
    """What decides how torch computes an operator, beside the operator: none of it is in a captured graph."""
    precisions = []
    # Newer versions of torch have these, older ones lack some.
    for name in ("conv", "matmul"):
        place = getattr(torch.backends.mkldnn, name, None)
        precisions.append(getattr(place, "fp32_precision", None))
    for place in (torch.backends, torch.backends.mkldnn):
        precisions.append(getattr(place, "fp32_precision", None))
    return {
        "oneDNN": torch._C._get_mkldnn_enabled(),
        "NNPACK": torch._C._get_nnpack_enabled(),
        "cuDNN": torch._C._get_cudnn_enabled(),
        "the precision of products": (_matmul_precision(), *precisions),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "the number of threads": torch.get_num_threads(),
        "the default type": torch.get_default_dtype(),
        # The processor's flag holds for Python's numbers, too.
        "denormal numbers": 5e-324 * 1.0 != 0.0,
    }


def _matmul_precision() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    # Where `fp32_precision` has been used instead, torch refuses to tell.
    except RuntimeError:
        return None


@contextmanager
def not_compiling() -> Iterator[None]:
    """While torch.export runs a model's code, it is told what it is told when users run it: nothing is compiled.

    `if not torch.compiler.is_compiling() and len(x) > 7` would be another model here.
    """
    names = ("_is_compiling_flag", "_is_exporting_flag")
    before = {}
    for name in names:
        if hasattr(torch.compiler, name):
            before[name] = getattr(torch.compiler, name)
            setattr(torch.compiler, name, False)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(torch.compiler, name, value)


@contextmanager
def sizes_as_text() -> Iterator[list[str]]:
    """Within, notes which functions turn the number of rows into text: "s0" in a capture, "2" when a user runs it."""
    asked: list[str] = []
    original: Any = torch.SymInt.__repr__

    def noted(size: torch.SymInt) -> str:
        caller = sys._getframe(1)
        package = str(caller.f_globals.get("__name__", "")).partition(".")[0]
        if package not in ("torch", "sympy", "lipcert"):
            asked.append(caller.f_code.co_qualname)
        return str(original(size))

    torch.SymInt.__repr__ = noted  # type: ignore[method-assign]
    try:
        yield asked
    finally:
        torch.SymInt.__repr__ = original  # type: ignore[method-assign]


@contextmanager
def quiet() -> Iterator[None]:
    """Without torch.export's own messages: what matters of them becomes an error of ours."""
    loggers = [
        logging.getLogger(name)
        for name in ("torch.fx.experimental", "torch._export", "torch.export")
    ]
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


@torch.no_grad()
def fastest_layout(
    model: nn.Module, input_shape: tuple[int, ...]
) -> torch.memory_format:
    """Channels last for convolutions, in which they are fastest, if the model takes such inputs: `view` may not.

    The weights are laid out so, too.
    """
    convolves = any(isinstance(module, nn.Conv2d) for module in model.modules())
    if not convolves or len(input_shape) != 3:
        return torch.contiguous_format
    # The weights first: the trial is of the model as it would be run.
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    weights = next(model.parameters(), torch.zeros(()))
    zeros = weights.new_zeros(2, *input_shape)
    try:
        with evaluated(model):
            model(zeros.contiguous(memory_format=torch.channels_last))
    except Exception:  # whatever is wrong besides, its capture will tell
        model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        return torch.contiguous_format
    return torch.channels_last
