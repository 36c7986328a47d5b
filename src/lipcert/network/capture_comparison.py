"""The proof by trial that a captured program computes what its model computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lipcert.errors import UnsupportedError
from lipcert.network.comparison_inputs import (
    example,
    laid_out,
    many_rows,
    memory_orders,
)
from lipcert.network.explain import first_line, unsupported
from lipcert.network.program import Program, Shape
from lipcert.network.states import quiet, registered, unchanged
from lipcert.network.watching import Detours, Operators, Questions

_WITHOUT, _WITH, _INFERENCE = "without gradients", "with gradients", "in inference mode"
_TRIALS = (
    (1, _WITHOUT),
    (1, _WITH),
    (2, _WITHOUT),
    (2, _WITH),
    (2, _INFERENCE),
)
"""Numbers of rows, and how the model is called; what depends on them without gradients is in the graph's guards."""
_ROUNDINGS = 64


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
        for mode in (_WITHOUT, _WITH, _INFERENCE):
            _watch(program, model, mode)
        # What reshape returns is a view of some tensors and a copy of others: in-place
        # operations reach through views only.
        for order in memory_orders(program, model):
            _compare_layout(program, model, order)
        # A condition such as len(x) > 7 that torch.export did not see shows in a batch
        # that is large enough.
        _compare(program, model, many_rows(program, model), _WITH)
        _check_kept(model, tensors)


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
        raise _differs(model, f"{difference}, for a batch of {batch} {mode}")


def _compare_layout(program: Program, model: nn.Module, order: Shape) -> None:
    """The same for an input whose axes lie in this order in memory; a model may refuse such inputs itself."""
    with torch.no_grad(), quiet():
        x, same = laid_out(program, order), laid_out(program, order)
        try:
            expected = model(same)
        except Exception:  # `view` of what lies otherwise, say: nothing is returned
            return
        found = program.run(x)
    difference = _difference(found, expected, len(x), other_layout=True)
    if difference:
        shown = ", ".join(map(str, order))
        raise _differs(
            model, f"{difference}, for an input with the memory layout {shown}"
        )


def check_batch(program: Program, model: nn.Module, x: Tensor) -> None:
    """Refuse a program that does not compute what its model computes for a batch that is certified.

    Sizes of batches can hide from torch.export, behind a question for their type, and no
    trial has all of them.
    """
    with unchanged(model), torch.no_grad(), quiet(), torch.random.fork_rng([]):
        x = x.to(program.device)
        try:
            expected = model(x.clone())  # it may work in place
        except Exception:  # `view` of what lies otherwise, say: nothing is returned
            return
        found = program.run(x)
    difference = _difference(found, expected, len(x), other_layout=True)
    if difference:
        raise _differs(model, f"{difference}, for a batch of {len(x)}")


def _watch(program: Program, model: nn.Module, mode: str) -> None:
    """Refuse a model that reads values, asks how a tensor came about, or switches torch."""
    operators, questions, detours = Operators(), Questions(), Detours()
    with (
        torch.inference_mode(mode == _INFERENCE),
        torch.set_grad_enabled(mode == _WITH),
        operators,
        questions,
        detours,
    ):
        model(example(program, 2))
    reads = operators.reads or questions.reads
    if reads is not None:
        raise _differs(model, f"it reads values of tensors by {reads}")
    if detours.taken is not None:
        remedy = (
            f"it calls {detours.taken}: values that it reads, here or in another thread, "
            "are not captured; do without"
        )
        raise unsupported(model, "capture", remedy)
    if questions.origin is not None:
        remedy = (
            f"it asks for {questions.origin} of a tensor, whose answer is not the same "
            "for all equal tensors: memory formats and views differ; do without, or "
            "call x.contiguous() without asking"
        )
        raise unsupported(model, "capture", remedy)
    if operators.switched:
        names = ", ".join(sorted(operators.switched))
        remedy = (
            f"it switches {names} while it runs, which torch.export does not capture; "
            "set it outside of the model, for all of it, or not at all"
        )
        raise unsupported(model, "capture", remedy)


def _tried(program: Program, model: nn.Module, batch: int, mode: str) -> str:
    """How the results of a model and of its program differ; empty if they do not."""
    grad, inference = mode == _WITH, mode == _INFERENCE
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
            raise _differs(model, failure) from error
    if isinstance(expected, FakeTensor):
        remedy = (
            "it keeps a tensor that it computes at its first call, outside of its "
            "attributes, and that call was the "
            "capture; build it anew, forget that tensor, and call the model once before"
        )
        raise unsupported(model, "capture", remedy)
    return _difference(found.detach(), expected, batch, other_layout=inference)


def _differs(model: nn.Module, difference: str) -> UnsupportedError:
    remedy = (
        f"what torch.export captures is not what the model returns: {difference}; "
        "forward must not depend on the batch "
        "size (x.squeeze() does), on gradients being recorded, on memory layouts, on "
        "values that it reads, on chance, "
        "on earlier calls or on how it is called"
    )
    return unsupported(model, "capture", remedy)


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
