"""`lipcert bound`: constants by method and target, side by side."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lipcert.commands.options import (
    METHOD_NAMES,
    AsJson,
    InputShape,
    Model,
    Quiet,
    Weights,
    named_model,
    print_json,
    print_table,
)
from lipcert.commands.progress_bar import progress_bar
from lipcert.processes import is_first_process, sharing_work

if TYPE_CHECKING:
    from lipcert.models import LoadedModel
    from lipcert.norms.norm_options import NormOptions

ALL = "all"
"""The method that stands for all of them, with the sampled slopes as the floor."""
# What takes seconds: methods that fit or solve something are asked for by name.
QUICK = ("naive", "liplt")


Methods = Annotated[
    list[str] | None, typer.Option(help=f"all, or some of {METHOD_NAMES}; repeatable.")
]
Targets = Annotated[
    list[str] | None,
    typer.Option(help="Such as network, per-class or pairwise; repeatable."),
]
Estimate = Annotated[
    bool, typer.Option("--estimate", help="Power iteration: fast, not guaranteed.")
]
Iterations = Annotated[
    int, typer.Option(help="Power iterations of an estimate.", min=1)
]
MaxMemory = Annotated[
    float | None,
    typer.Option(
        help="GiB that matrices may take; default: 60 % of what is free, at most 2.",
        min=0,
    ),
]


# typer reads names, defaults and help of the options from this signature, and --help
# from the docstring.
def bound(
    model: Model,
    weights: Weights = None,
    input_shape: InputShape = None,
    method: Methods = None,
    target: Targets = None,
    estimate: Estimate = False,
    iterations: Iterations = 100,
    max_memory: MaxMemory = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Lipschitz constants by method and target, side by side, with times and guarantees.

    Without --method: naive and liplt. --method all: every method, above the steepest
    slopes found. An interrupted command continues when it is given again; under
    torchrun, processes divide the norms.
    """
    from lipcert.commands.bound_tables import comparison, overview
    from lipcert.commands.bound_task import BoundTask
    from lipcert.commands.kept_bounds import KeptBounds

    loaded = named_model(model, weights, input_shape)
    methods = method or QUICK
    everything = ALL in methods
    targets = target or _usual_targets(loaded, everything)
    kept = KeptBounds(loaded.network)
    options = _norm_options(kept.folder, max_memory)
    steps = iterations if estimate else None
    hidden = quiet or as_json or not is_first_process()
    with progress_bar(hidden) as progress, sharing_work():
        task = BoundTask(loaded, targets, steps, options, kept, progress)
        rows = task.everything() if everything else task.some(methods)
    kept.forget()
    if not is_first_process():
        return
    if as_json:
        print_json([asdict(row) for row in rows])
    else:
        print_table((overview if everything else comparison)(loaded, rows))


def _norm_options(keep: Path, max_memory: float | None) -> NormOptions:
    from lipcert.norms.norm_options import NormOptions

    options = NormOptions(keep=keep)
    if max_memory is None:
        return options
    return replace(options, memory=int(max_memory * 2**30))


def _usual_targets(loaded: LoadedModel, everything: bool) -> list[str]:
    """What is bounded where no target is named."""
    from lipcert.bounds.targets import TARGETS, default_target

    if default_target(loaded.network) == "network":
        return ["network"]  # the output is no vector of logits
    if everything:
        return ["network", "pairwise"]
    return list(TARGETS)
