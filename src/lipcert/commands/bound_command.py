"""`lipcert bound`: constants by method and target, side by side."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated

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

ALL = "all"
"""The method that stands for all of them, with the sampled slopes as the floor."""
# What takes seconds: methods that fit or solve something are asked for by name.
QUICK = ("naive", "liplt")


# typer reads names, defaults and help of the options from this signature, and --help from the docstring.
def bound(
    model: Model,
    weights: Weights = None,
    input_shape: InputShape = None,
    method: Annotated[list[str] | None, typer.Option(help=f"all, or some of {METHOD_NAMES}; repeatable.")] = None,
    target: Annotated[list[str] | None, typer.Option(help="network, per-class, last-layer, pairwise.")] = None,
    estimate: Annotated[bool, typer.Option("--estimate", help="Power iteration: fast, not guaranteed.")] = False,
    iterations: Annotated[int, typer.Option(help="Power iterations of an estimate.", min=1)] = 100,
    max_memory: Annotated[
        float | None, typer.Option(help="GiB that matrices may take; default: 60 % of what is free, at most 2.", min=0)
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Lipschitz constants by method and target, side by side, with times and guarantees.

    Without --method: naive and liplt. --method all: every method, above the steepest slopes found. An interrupted
    command continues when it is given again; under torchrun, processes divide the norms.
    """
    from lipcert.bounds.targets import TARGETS, default_target
    from lipcert.commands.bound_tables import comparison, overview
    from lipcert.commands.bound_task import BoundTask
    from lipcert.commands.kept_bounds import KeptBounds
    from lipcert.norms.norm_options import NormOptions

    loaded = named_model(model, weights, input_shape)
    everything = ALL in (method or ())
    targets = target or (["network", "pairwise"] if everything else list(TARGETS))
    if not target and default_target(loaded.network) == "network":
        targets = ["network"]  # the output is no vector of logits
    kept = KeptBounds(loaded.network)
    options = NormOptions(keep=kept.folder)
    if max_memory is not None:
        options = replace(options, memory=int(max_memory * 2**30))
    hidden = quiet or as_json or not is_first_process()
    with progress_bar(hidden) as progress, sharing_work():
        task = BoundTask(loaded, targets, iterations if estimate else None, options, kept, progress)
        rows = task.everything() if everything else task.some(method or QUICK)
    kept.forget()
    if not is_first_process():
        return
    if as_json:
        print_json([asdict(row) for row in rows])
    elif everything:
        print_table(overview(loaded, rows))
    else:
        print_table(comparison(loaded, rows))
