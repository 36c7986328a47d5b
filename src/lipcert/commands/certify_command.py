"""`lipcert certify`: clean, attacked and certified accuracy of a model on a data set."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lipcert.bounds.methods import METHODS
from lipcert.commands.options import (
    AsJson,
    Data,
    DataDir,
    Eps,
    InputShape,
    Limit,
    Model,
    Quiet,
    Weights,
    checked_epsilons,
    named_data,
    named_model,
    print_json,
    print_path,
    print_table,
    sentence,
)
from lipcert.commands.progress_bar import progress_bar
from lipcert.display import NOTHING, TextTable
from lipcert.errors import OptionError
from lipcert.files import write_json
from lipcert.layout import CONFIG, ENVIRONMENT
from lipcert.local.certify_local import checked_norm
from lipcert.processes import is_first_process
from lipcert.progress import no_progress
from lipcert.report import write_report
from lipcert.runs import Summary, Task, finish_folder
from lipcert.runs.environment import environment
from lipcert.runs.finishing import certify_test


def certify(
    model: Model,
    data: Data,
    eps: Eps,
    weights: Weights = None,
    input_shape: InputShape = None,
    data_dir: DataDir = None,
    out: Annotated[Path, typer.Option(help="Folder for certificates.csv and summary.json.")] = Path("runs/certify"),
    method: Annotated[
        str | None, typer.Option(help=f"{', '.join(METHODS)}; default: that of the run, or liplt.", show_default=False)
    ] = None,
    float64: Annotated[bool, typer.Option("--float64", help="Execute in float64: rounding costs nothing.")] = False,
    local: Annotated[
        bool,
        typer.Option("--local", help="Also by bounds over a ball around each input."),
    ] = False,
    norm: Annotated[str, typer.Option(help="Norm of the balls of --local: 2 or inf.")] = "2",
    attack: Annotated[bool, typer.Option("--attack", help="Attack every input and cross-check its radius.")] = False,
    limit: Limit = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Clean, attacked and certified accuracy; radii of every test input as CSV. Continues where it stopped."""
    if norm != "2" and not local:
        raise OptionError("--norm belongs to --local: global radii are l2; add --local")
    local_norm = checked_norm(norm) if local else None
    loaded = named_model(model, weights, input_shape)
    if float64:
        loaded = loaded.in_float64()
    epsilons = checked_epsilons(eps)
    if (out / CONFIG).exists():
        raise OptionError(f"{out} is the folder of a training, which would be overwritten; choose another --out")
    loaded, dataset, count = named_data(loaded, data, data_dir, limit)
    if method is None:
        method = loaded.earlier.method if loaded.earlier is not None else "liplt"
    task = Task(dataset, epsilons, count, count if attack else 0, method, local_norm=local_norm, shared=True)
    if not is_first_process():
        certify_test(loaded, task, out, no_progress)
        return
    with progress_bar(hidden=quiet or as_json) as progress:
        summary = finish_folder(loaded, task, out, progress)
    write_json(out / ENVIRONMENT, environment(dataset, data_dir, None))
    summary.write(out)
    page = write_report([out])
    if as_json:
        print_json(summary.as_dict())
        return
    print_table(_table(summary, out))
    print_path("report", page)


def _table(summary: Summary, out: Path) -> TextTable:
    rows = []
    for entry in summary.at:
        attacked = NOTHING if entry.attacked is None else f"{entry.attacked:.2%}"
        accuracies = [f"{summary.clean:.2%}", attacked, f"{entry.certified:.2%}"]
        if entry.local is not None:
            accuracies.append(f"{entry.local:.2%}")
        radii = [f"{summary.mean_radius:.4f}", f"{summary.median_radius:.4f}"]
        rows.append([f"{entry.epsilon:g}", *accuracies, *radii])
    locally = [f"certified locally ({summary.local_norm})"] if summary.local_norm else []
    return TextTable(
        f"{summary.model} on {summary.data}, {summary.inputs} test inputs",
        ("ε (l2)", "clean", "attacked", "certified", *locally, "mean radius", "median radius"),
        rows,
        f"Certified: {summary.guarantee}; executed in {summary.execution}, rounding included. "
        f"{sentence(summary.data_note)}Written to {out}.",
    )
