"""What a model does while it runs that no graph shows: values that it reads, questions that it asks, switches."""

from __future__ import annotations

import _thread
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lipcert.network.states import switches
from lipcert.network.value_errors import may_raise, plain_name

_SHAPES = {"is_same_size", "sym_size", "sym_numel", "sym_stride"}
"""Operators that tell of shapes alone."""
_VALUE_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_READERS = {
    "numpy",
    "tolist",
    "data_ptr",
    "__array__",
    "__dlpack__",
    "__repr__",
    "__format__",
    "storage",
    "untyped_storage",
    "apply_",
    "map_",
    "map2_",
    "q_scale",
    "q_zero_point",
    "qscheme",
}
# Equal tensors give different answers. torch.export answers for the tensor that it has
# made itself: contiguous, no view, made by no operation.
_ORIGINS = {
    "stride",
    "is_contiguous",
    "storage_offset",
    "dim_order",
    "is_shared",
    "is_pinned",
    "is_set_to",
    "is_neg",
    "is_conj",
    "_is_view",
    "_base",
    "_version",
    "grad",
    "grad_fn",
    "output_nr",
    "retains_grad",
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
}


_MAYBE_COPIES = {"reshape", "reshape_as", "flatten", "ravel"}
"""Functions that return a view of some tensors and a copy of others, depending on how they lie in memory."""
_TO_THREADS: tuple[tuple[Any, str], ...] = (
    (threading.Thread, "start"),
    (ThreadPoolExecutor, "submit"),
    (_thread, "start_new_thread"),
)
_TO_VALUES = tuple(
    (torch.Tensor, name)
    for name in ("item", "tolist", "numpy", "__bool__", "__float__", "__int__")
)


class Questions(TorchFunctionMode):
    """Notes what Python asks a tensor without any operator.

    reads: by what it got at the numbers of a tensor.
    origin: what it asked of how a tensor lies in memory, or came about.
    failed: what raised an error; the model caught it if it still returns.

    Code of torch itself is not heard, for a mode is off within the functions that it is
    told of.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: str | None = None
        self.origin: str | None = None
        self.failed: str | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        # Of an attribute, its getter is called.
        if name == "__get__":
            name = getattr(func.__self__, "__name__", "")
        splits_at = args[1:2] if name == "tensor_split" else ()
        if name in _READERS or any(isinstance(at, torch.Tensor) for at in splits_at):
            self.reads = f"Tensor.{name}"
        if name in _ORIGINS:
            self.origin = f"Tensor.{name}"
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            self.failed = name
            raise


class Copies(TorchFunctionMode):
    """Functions such as reshape and contiguous return a view of some tensors and a copy of others.

    Here they return copies, or, if not `copied`, those that change the layout alone
    return what they are given, as for a tensor that has the layout. `only` is the
    number of the call that is changed, counted from 0; None for all. `calls` counts.
    """

    def __init__(self, copied: bool, only: int | None) -> None:
        super().__init__()
        self.copied, self.only = copied, only
        self.calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
        lays_out = name == "contiguous" or (name == "to" and "memory_format" in kwargs)
        changed = False
        if lays_out or name in _MAYBE_COPIES:
            changed = self.only in (None, self.calls)
            self.calls += 1
        if changed and lays_out and not self.copied:
            kwargs.pop("memory_format", None)
            return args[0] if name == "contiguous" else func(*args, **kwargs)
        result = func(*args, **kwargs)
        return result.clone() if changed and self.copied else result


class Detours:
    """Notes what modes of torch do not hear: work that is given to other threads, values read while modes are off."""

    def __init__(self) -> None:
        self.taken: str | None = None
        self._kept: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Detours:
        for owner, name in (*_TO_THREADS, *_TO_VALUES):
            self._kept.append((owner, name, vars(owner).get(name)))
            shown = f"{owner.__name__}.{name}"
            setattr(owner, name, self._noting(getattr(owner, name), shown))
        return self

    def _noting(self, called: Any, shown: str) -> Any:
        watched = threading.get_ident()

        def noted(*args: Any, **kwargs: Any) -> Any:
            # Other threads of the program may do what they like.
            if threading.get_ident() == watched:
                self.taken = shown
            return called(*args, **kwargs)

        return noted

    def __exit__(self, *_: object) -> None:
        for owner, name, own in self._kept:
            if own is None:  # it was inherited
                delattr(owner, name)
            else:
                setattr(owner, name, own)


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operators that read values into Python, and switches of torch that differ from those outside.

    Raising would not help, for models may catch errors. `raising` counts the operators
    that may raise one because of the values of x, or of what is computed from it.
    """

    def __init__(self, x: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads: Any = None
        self.switched: set[str] = set()
        self.raising: Counter[str] = Counter()
        self._outside = switches()
        # Kept, so that no other tensor takes a place that is noted here.
        self._dependent = {_place(x): x}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # The shape of what nonzero() returns depends on values as much as item() does.
        if _VALUE_TAGS.intersection(func.tags) and not _by_numbers(func, args):
            self.reads = func
        for name, value in switches().items():
            if value != self._outside[name]:
                self.switched.add(name)
        # In inference mode, operators that are made of others come whole.
        if torch.is_inference_mode_enabled():
            with self:
                composed = func.decompose(*args, **(kwargs or {}))
            if composed is not NotImplemented:
                return composed
        given = tree_leaves((args, kwargs))
        dependent = [value for value in given if self._depends(value)]
        if dependent:
            if _answers(func):
                self.reads = func
            if may_raise(func, given, dependent):
                self.raising[plain_name(func)] += 1
        results = func(*args, **(kwargs or {}))
        if dependent:
            for result in tree_leaves(results):
                if isinstance(result, Tensor):
                    self._dependent[_place(result)] = result
        return results

    def _depends(self, value: Any) -> bool:
        return isinstance(value, Tensor) and _place(value) in self._dependent


def _place(tensor: Tensor) -> int:
    """Where the numbers of a tensor are; views have those of what they show."""
    return int(tensor.untyped_storage()._cdata)


def _answers(func: Any) -> bool:
    """Whether an operator returns anything but tensors: a number or a truth value, which Python can ask."""
    kinds = {str(value.type) for value in func._schema.returns}
    return not kinds <= {"Tensor", "List[Tensor]"} and plain_name(func) not in _SHAPES


def _by_numbers(func: Any, args: Any) -> bool:
    """x[[2, 0]], whose shape is known, unlike that of x[x > 0]."""
    if func is not torch.ops.aten.index.Tensor:
        return False
    indices = [index for index in args[1] if index is not None]
    return all(index.dtype not in (torch.bool, torch.uint8) for index in indices)
