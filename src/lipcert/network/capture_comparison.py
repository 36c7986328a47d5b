"""The proof by trial that a captured program computes what its model computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lipcert.network.comparison_inputs import (
    example,
    laid_out,
    many_rows,
    memory_orders,
    of_inference_mode,
    repeated,
    share_memory,
    unwritable,
)
from lipcert.network.explain import first_line, unsupported
from lipcert.network.program import Program
from lipcert.network.states import quiet, registered, unchanged
from lipcert.network.watched_run import INFERENCE, WITH, WITHOUT, differs, watch
from lipcert.network.watching import Copies

_TRIALS = (
    (1, WITHOUT),
    (1, WITH),
    (2, WITHOUT),
    (2, WITH),
    (2, INFERENCE),
)
"""Numbers of rows, and how the model is called; what depends on them without gradients is in the graph's guards."""
_ROUNDINGS = 64
_MOST_COPIES = 64


def check_capture(program: Program, model: nn.Module) -> None:
    """Refuse a program that does not compute, bit for bit, what the model computes, or changes its own buffers.

    Batches of several sizes whose rows have several magnitudes; with and without
    gradients; in inference mode and another memory layout, up to the rounding of other
    kernels; as a parameter; and with an eye on operators that read values and on
    questions about memory, which a branch may hide from torch.export.
    """
    if program.changed:
        shown = ", ".join(program.changed)
        remedy = (
            f"it changes {shown} whenever it runs, so that results depend on "
            "what it has seen; call model.eval()"
        )
        raise unsupported(model, "state", remedy)
    tensors = registered(model)
    # One after the other, so that what depends on earlier calls shows.
    with unchanged(model):
        # If they differed, certificates would be about another function than the one
        # that the user calls.
        for batch, mode in _TRIALS:
            _compare(program, model, batch, mode)
        # `if x.max() > 1` stops torch.export, unless the model hides it: then it shows
        # here. So do switches of torch, which torch.export drops, and questions about
        # tensors that it answers by itself.
        for mode in (WITHOUT, WITH, INFERENCE):
            watch(program, model, mode)
        _compare_inputs(program, model)
        # A condition such as len(x) > 7 that torch.export did not see shows in a batch
        # that is large enough.
        _compare(program, model, many_rows(program, model), WITH)
        _check_kept(model, tensors)


def _compare_inputs(program: Program, model: nn.Module) -> None:
    """Inputs with the same numbers that lie otherwise in memory, or came about otherwise."""
    # What reshape returns is a view of some tensors and a copy of others: in-place
    # operations reach through views only.
    with torch.no_grad():
        found = program.run(example(program, 2))
    for order, gaps in memory_orders(program, model):
        shown = f"with the memory layout {', '.join(map(str, order))}"
        given = partial(laid_out, program, order, gaps)
        with torch.no_grad():
            _compare_input(found, model, given, shown)
    _compare_copies(program, model, found)
    _compare_refilled(program, model)
    # `try: x.sub_(1)` is another model for inputs that must not be written to.
    twice, first = partial(repeated, program), found[:1].expand_as(found)
    with torch.enable_grad():
        for shown, make in unwritable(program).items():
            _compare_input(found, model, make, shown)
    with torch.no_grad():
        inferred = partial(of_inference_mode, program)
        _compare_input(found, model, inferred, "that was made in inference mode")
        _compare_input(first, model, twice, "whose rows share their memory")


def _check_kept(model: nn.Module, before: dict[str, Tensor]) -> None:
    """Refuse a model that puts other tensors in the place of its own: self.calls = self.calls + 1."""
    now = registered(model)
    replaced = [name for name in before | now if now.get(name) is not before.get(name)]
    if replaced:
        shown = ", ".join(replaced)
        remedy = f"it replaces {shown} whenever it runs; keep what it computes in plain attributes"
        raise unsupported(model, "state", remedy)


def _compare(program: Program, model: nn.Module, batch: int, mode: str) -> None:
    difference = _tried(program, model, batch, mode)
    if difference:
        raise differs(model, f"{difference}, for a batch of {batch} {mode}")


def _compare_input(
    found: Tensor, model: nn.Module, make: Callable[[], Tensor], shown: str
) -> None:
    """The same for an input of this kind, with the same entries as `example`; a model may refuse such inputs itself."""
    with quiet():
        try:
            expected = model(make())
        except Exception:  # `view` of what lies otherwise, say: nothing is returned
            return
    difference = _difference(found, expected, len(found), other_layout=True)
    if difference:
        raise differs(model, f"{difference}, for an input {shown}")


def _compare_copies(program: Program, model: nn.Module, found: Tensor) -> None:
    """The same where reshape and the like return views or copies, one by one and all, as they do in some layout."""
    make = partial(example, program, 2)
    for copied, returned in ((True, "copies"), (False, "views")):
        shown = f"in whose memory layout reshape or contiguous return {returned}"
        with torch.no_grad(), Copies(copied, None) as copies:
            _compare_input(found, model, make, shown)
        for only in range(min(copies.calls, _MOST_COPIES)):
            with torch.no_grad(), Copies(copied, only):
                _compare_input(found, model, make, shown)


def _compare_refilled(program: Program, model: nn.Module) -> None:
    """The same for a tensor that has been used before, with other numbers in it: models may keep what they know."""
    with torch.no_grad(), quiet():
        x = example(program, 2)
        model(x)
        x.copy_(example(program, 3)[1:])
        found = program.run(x.clone())
        expected = model(x)
    difference = _difference(found, expected, len(x), other_layout=True)
    if difference:
        raise differs(model, f"{difference}, for a tensor that it has seen before")


def check_batch(program: Program, model: nn.Module, x: Tensor) -> None:
    """Refuse a program that does not compute what its model computes for a batch that is certified.

    Sizes of batches can hide from torch.export, behind a question for their type, and no
    trial has all of them.
    """
    with unchanged(model), torch.no_grad(), quiet(), torch.random.fork_rng([]):
        x = x.to(program.device)
        given = x.clone()  # it may work in place
        try:
            expected = model(given)
        except Exception:  # `view` of what lies otherwise, say: nothing is returned
            return
        found = program.run(x)
    difference = _difference(found, expected, len(x), other_layout=True)
    if difference:
        raise differs(model, f"{difference}, for a batch of {len(x)}")
    if share_memory(x) and not torch.equal(given, x):
        remedy = (
            "it changes its input in place, and entries of the input share their "
            "memory, so that each change is one of several; certify x.clone()"
        )
        raise unsupported(model, "state", remedy)


def _tried(program: Program, model: nn.Module, batch: int, mode: str) -> str:
    """How the results of a model and of its program differ; empty if they do not."""
    grad, inference = mode == WITH, mode == INFERENCE
    with torch.inference_mode(inference), torch.set_grad_enabled(grad), quiet():
        x = example(program, batch, strided=inference)
        same = example(program, batch, strided=inference)  # the model may work in place
        # The product is no leaf, so that the model may change it in place.
        if grad:
            same = same.requires_grad_() * 1
        elif not inference and batch > 1:
            # Users may pass what they optimise: code may not depend on its type.
            same = nn.Parameter(same, requires_grad=False)
        try:
            with torch.random.fork_rng([]):
                # Chance would show as a difference; the user's random numbers go on as
                # if nothing had been drawn.
                expected = model(same)
            found = program.run(x)
        except Exception as error:  # whatever the model's code raises
            failure = f"it fails {mode}, {type(error).__name__}: {first_line(error)}"
            raise differs(model, failure) from error
    if isinstance(expected, FakeTensor):
        remedy = (
            "it keeps a tensor that it computes at its first call, outside of its "
            "attributes, and that call was the "
            "capture; build it anew, forget that tensor, and call the model once before"
        )
        raise unsupported(model, "capture", remedy)
    return _difference(found.detach(), expected, batch, other_layout=inference)


def _difference(found: Tensor, expected: Any, batch: int, other_layout: bool) -> str:
    if not isinstance(expected, Tensor):
        return f"it returns a {type(expected).__name__}"
    expected = expected.detach()
    if expected.shape[:1] != (batch,):
        return (
            f"the shape of its result is {tuple(expected.shape)}, without the "
            "batch axis in front"
        )
    if found.shape != expected.shape:
        return f"the shape is {tuple(expected.shape)} instead of {tuple(found.shape)}"
    if found.dtype != expected.dtype:
        return f"the type is {expected.dtype} instead of {found.dtype}"
    # Bit for bit, for certificates speak of the numbers that the model returns,
    # rounding included.
    same = (found == expected) | (found.isnan() & expected.isnan())
    if other_layout:  # a model that works in place keeps the layout, for which products may have other kernels
        same |= (found - expected).abs() <= _ROUNDINGS * torch.finfo(
            found.dtype
        ).eps * expected.abs().amax()
    if found.device.type != "cpu":  # kernels may be chosen anew for every call
        same |= (found - expected).abs() <= 1e-4 * expected.abs().amax()
    if bool(same.all()):
        return ""
    return (
        "entries differ by up to "
        f"{float((found - expected).abs().nan_to_num().max()):.3g}"
    )
