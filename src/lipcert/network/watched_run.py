"""What a model must not do while it runs, for torch.export does not see it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lipcert.errors import UnsupportedError
from lipcert.network.comparison_inputs import example
from lipcert.network.explain import first_line, unsupported
from lipcert.network.program import Program
from lipcert.network.watching import Detours, Operators, Questions

WITHOUT, WITH, INFERENCE = "without gradients", "with gradients", "in inference mode"
"""How a model is called."""


def watch(program: Program, model: nn.Module, mode: str) -> None:
    """Refuse a model that reads values, asks how a tensor came about, or switches torch."""
    x = example(program, 2)
    operators, questions, detours = Operators(x), Questions(), Detours()
    with (
        torch.inference_mode(mode == INFERENCE),
        torch.set_grad_enabled(mode == WITH),
        operators,
        questions,
        detours,
    ):
        _run(model, x, mode)
    reads = operators.reads or questions.reads
    if reads is not None:
        raise differs(model, f"it reads values of tensors by {reads}")
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
    _check_errors(program, model, mode, operators, questions)
    if operators.switched:
        names = ", ".join(sorted(operators.switched))
        remedy = (
            f"it switches {names} while it runs, which torch.export does not capture; "
            "set it outside of the model, for all of it, or not at all"
        )
        raise unsupported(model, "capture", remedy)


def _run(model: nn.Module, x: Tensor, mode: str) -> None:
    try:
        model(x)
    except Exception as error:  # whatever the model's code raises
        failure = f"it fails {mode}, {type(error).__name__}: {first_line(error)}"
        raise differs(model, failure) from error


def _check_errors(
    program: Program,
    model: nn.Module,
    mode: str,
    operators: Operators,
    questions: Questions,
) -> None:
    """Refuse a model that goes on after an error of torch, or may: other values may raise none, or one."""
    remedy = "do without `try`, or without what may fail"
    if questions.failed is not None:
        caught = f"it catches an error of {questions.failed}, which depends on the input; {remedy}"
        raise unsupported(model, "capture", caught)
    if not operators.raising:
        return
    x = example(program, 2)
    captured = Operators(x)
    with torch.inference_mode(mode == INFERENCE), torch.no_grad(), captured:
        program.run(x)
    unused = operators.raising - captured.raising
    if unused:
        shown = ", ".join(sorted(unused))
        may_catch = (
            f"it calls {shown}, which fails for some values, and does not use the "
            f"result, so that errors could be caught; {remedy}"
        )
        raise unsupported(model, "capture", may_catch)


def differs(model: nn.Module, difference: str) -> UnsupportedError:
    remedy = (
        f"what torch.export captures is not what the model returns: {difference}; "
        "forward must not depend on the batch "
        "size (x.squeeze() does), on gradients being recorded, on memory layouts, on "
        "values that it reads, on chance, "
        "on earlier calls or on how it is called"
    )
    return unsupported(model, "capture", remedy)
