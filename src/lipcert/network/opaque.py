"""Modules with a rule are single operations of a captured program, and what is done around them is captured as it runs.

The operation is the module's `forward` alone. Hooks, global ones too, and a `__call__`
of its own are what the model's code does before and after: they are in the graph around
the operation, once, as they are in the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.utils._pytree import keystr, tree_flatten_with_path

from lipcert.errors import UnsupportedError, UnsupportedNode
from lipcert.network.rules.registry import Rule, find_module_rule
from lipcert.network.states import bare, not_compiling

_OPAQUE: list[nn.Module] = []
"""The modules that are single operations in the capture under way."""


@torch.library.custom_op("lipcert::opaque", mutates_args=())
def _opaque(x: Tensor, index: int) -> Tensor:
    result: Tensor = _OPAQUE[index](x)
    return result


@_opaque.register_fake
def _(x: Tensor, index: int) -> Tensor:
    # torch.export asks for shapes with tensors that have no values. The module itself
    # tells, with two rows of zeros.
    with torch._subclasses.fake_tensor.unset_fake_temporarily(), torch.no_grad():
        like = torch.zeros(2, *map(int, x.shape[1:]), dtype=x.dtype, device=x.device)
        result = _OPAQUE[index](like)
    if not isinstance(result, Tensor) or len(result) != 2:
        raise TypeError(
            "a module with a rule must return one tensor with the batch axis in front"
        )
    return x.new_empty(x.shape[0], *result.shape[1:])


class Root(nn.Module):
    """Calls a model as users do, so that its hooks and its own __call__ are captured too.

    Global hooks run for the modules that the model calls, not for those around it: this
    one, and those of torch.export.
    """

    def __init__(self, model: nn.Module, ruled: RuledModules) -> None:
        super().__init__()
        self.model, self.within = model, ruled.within

    def forward(self, x: Tensor) -> Any:
        with self.within(), not_compiling():
            return self.model(x)


class RuledModules:
    """The modules of a model that have a rule, in the order of their numbers."""

    def __init__(self, model: nn.Module, view: str) -> None:
        self.names: list[str] = []
        self.calls: list[tuple[nn.Module, Rule]] = []
        self._states: list[dict[str, Any]] = []
        self._runs = False
        for name, module in model.named_modules():
            rule = find_module_rule(module, view)
            if rule is not None:
                self.names.append(name)
                self.calls.append((module, rule))

    @contextmanager
    def within(self) -> Iterator[None]:
        """While the model runs."""
        # What the modules are when the model begins to run; `_check_state` compares at
        # every call.
        self._states, self._runs = [_state(module) for module, _ in self.calls], True
        try:
            yield
        finally:
            self._runs = False

    @contextmanager
    def as_operations(self) -> Iterator[RuledModules]:
        """Within, their forwards are calls of one operator."""
        # The operator runs copies: the forward of the module itself is the call of the
        # operator, and would call itself.
        _OPAQUE[:] = [self._copy(index) for index in range(len(self.calls))]
        for index, (module, _) in enumerate(self.calls):
            module.forward = self._forward(index)
        try:
            with self._global_hooks():
                yield self
        finally:
            _OPAQUE.clear()
            for module, _ in self.calls:
                # A forward of the user's on the instance excludes a rule
                # (`find_module_rule`), so this one is ours.
                vars(module).pop("forward", None)

    def _copy(self, index: int) -> nn.Module:
        try:
            return bare(deepcopy(self.calls[index][0])).requires_grad_(False)
        except (
            Exception
        ) as error:  # tensors that are computed, or whatever a module's code raises
            remedy = (
                "it has a rule, but it cannot be copied; compute weights by "
                "torch.nn.utils.parametrize"
            )
            raise self._refused(index, remedy) from error

    def _forward(self, index: int) -> Callable[..., Tensor]:
        names = list(inspect.signature(self.calls[index][0].forward).parameters)

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            given = (*args, *kwargs.values())
            # A rule sees one input. Other arguments would be lost, and with them what
            # they change.
            if (
                len(given) != 1
                or not isinstance(given[0], Tensor)
                or list(kwargs) not in ([], names[:1])
            ):
                raise self._refused(
                    index,
                    "it has a rule, so it must be called with one tensor, its "
                    "first argument",
                )
            if self._runs:
                self._check_state(index)
            result: Tensor = torch.ops.lipcert.opaque(given[0], index)
            return result

        return forward

    def _check_state(self, index: int) -> None:
        """What a module with a rule computes is captured by itself: nothing that it may read may change meanwhile."""
        before, now = self._states[index], _state(self.calls[index][0])
        for path in {**before, **now}:
            # By identity: values may be tensors, and one that is set anew is another
            # one even if it is equal.
            if path not in before or path not in now or before[path] is not now[path]:
                remedy = (
                    f"it has a rule, but its attribute {path} is set while the model "
                    "runs, by a hook or by the code "
                    "that calls it; set it before, compute it in its own forward, or "
                    "use torch.nn.utils.parametrize"
                )
                raise self._refused(index, remedy)

    def _refused(self, index: int, remedy: str) -> UnsupportedError:
        kind = type(self.calls[index][0]).__name__
        return UnsupportedError(
            [UnsupportedNode(self.names[index] or kind.lower(), kind, remedy)]
        )

    @contextmanager
    def _global_hooks(self) -> Iterator[None]:
        """Within, global hooks do nothing unless the model runs."""
        before = []
        for hooks in (
            torch_modules._global_forward_pre_hooks,
            torch_modules._global_forward_hooks,
        ):
            before.append((hooks, dict(hooks)))
            # Same keys, so that handles of the user's still remove what they have
            # added.
            for key, hook in hooks.items():
                hooks[key] = self._while_it_runs(hook)
        try:
            yield
        finally:
            for hooks, own in before:
                hooks.update((key, own[key]) for key in own if key in hooks)

    def _while_it_runs(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def gated(*args: Any, **kwargs: Any) -> Any:
            return hook(*args, **kwargs) if self._runs else None

        return gated


def _state(module: nn.Module) -> dict[str, Any]:
    """All that a module and those inside it have as attributes, by their paths."""
    state = {}
    for name, inner in module.named_modules():
        for path, value in tree_flatten_with_path(vars(inner))[0]:
            state[f"{name}{keystr(path)}"] = value
    return state
