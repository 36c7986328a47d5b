"""`lipcert certify`: clean, attacked and certified accuracy of a model on a data set."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lipcert.commands.options import (
    DATA_OPTION,
    EPS_OPTION,
    METHOD_NAMES,
    AsJson,
    DataDir,
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
from lipcert.errors import OptionError
from lipcert.layout import CONFIG, ENVIRONMENT
from lipcert.processes import is_first_process

if TYPE_CHECKING:
    from lipcert.display import TextTable
    from lipcert.models import LoadedModel
    from lipcert.runs import Summary, Task


Out = Annotated[
    Path, typer.Option(help="Folder for certificates.csv and summary.json.")
]
Method = Annotated[
    str | None,
    typer.Option(
        help=f"{METHOD_NAMES}; default: that of the run, or liplt.",
        show_default=False,
    ),
]
Float64 = Annotated[
    bool, typer.Option("--float64", help="Execute in float64: rounding costs nothing.")
]
Split = Annotated[
    bool,
    typer.Option(
        "--split", help="Execute long sums in parts: rounding costs little, in float32."
    ),
]
Local = Annotated[
    bool, typer.Option("--local", help="Also by bounds over a ball around each input.")
]
Norm = Annotated[str, typer.Option(help="Norm of the balls of --local: 2 or inf.")]
Attack = Annotated[
    bool,
    typer.Option("--attack", help="Attack every input and cross-check its radius."),
]


# The other processes of `torchrun` help with the norms and the inputs, then leave; the
# first one attacks and writes.
def certify(
    model: Model,
    data: Annotated[str | None, DATA_OPTION] = None,
    eps: Annotated[list[float] | None, EPS_OPTION] = None,
    weights: Weights = None,
    input_shape: InputShape = None,
    data_dir: DataDir = None,
    out: Out = Path("runs/certify"),
    method: Method = None,
    float64: Float64 = False,
    split: Split = False,
    local: Local = False,
    norm: Norm = "2",
    attack: Attack = False,
    limit: Limit = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Clean, attacked and certified accuracy; radii of every test input as CSV. Continues where it stopped."""
    from lipcert.local.ball_options import checked_norm
    from lipcert.runs import Task

    execution = _execution(float64, split, local, norm)
    local_norm = checked_norm(norm) if local else None
    loaded = named_model(model, weights, input_shape)
    loaded, data, epsilons = _as_shipped(loaded, model, execution, data, eps)
    if (out / CONFIG).exists():
        raise OptionError(
            f"{out} is the folder of a training, which would be overwritten; "
            "choose another --out"
        )
    loaded, dataset, count = named_data(loaded, data, data_dir, limit)
    if method is None:
        method = loaded.earlier.method if loaded.earlier is not None else "liplt"
    attacked = count if attack else 0
    task = Task(
        dataset, epsilons, count, attacked, method, local_norm=local_norm, shared=True
    )
    _carry_out(loaded, task, out, data_dir, as_json, quiet)


def _execution(float64: bool, split: bool, local: bool, norm: str) -> str | None:
    """The arithmetic that options ask for, None if they do not say."""
    if norm != "2" and not local:
        raise OptionError("--norm belongs to --local: global radii are l2; add --local")
    if split and (float64 or local):
        raise OptionError(
            "--split is about float32 and global radii; leave out --float64 and --local"
        )
    if float64:
        return "float64"
    if split:
        return "float32-split"
    if local:
        return "float32"
    return None


def _as_shipped(
    loaded: LoadedModel,
    model: str,
    execution: str | None,
    data: str | None,
    eps: list[float] | None,
) -> tuple[LoadedModel, str, list[float]]:
    """The model in its arithmetic, the data and ε; of a shipped network, those it was certified with."""
    from lipcert.runs.pretrained import shipped_summary

    shipped = shipped_summary(model)
    if shipped is not None:
        data, eps = data or shipped.data, eps or shipped.epsilons
        execution = execution or shipped.execution
    if data is None or not eps:
        raise OptionError(
            "--data and --eps are missing; name the data set, and the size "
            "of perturbations"
        )
    return loaded.executed_in(execution or "float32"), data, checked_epsilons(eps)


def _carry_out(
    loaded: LoadedModel,
    task: Task,
    out: Path,
    data_dir: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Certify, write everything into the folder, and print the table or JSON."""
    from lipcert.files import write_json
    from lipcert.progress import no_progress
    from lipcert.report import write_report
    from lipcert.runs import finish_folder
    from lipcert.runs.environment import environment
    from lipcert.runs.finishing import certify_together

    if not is_first_process():
        certify_together(loaded, task, out, no_progress)
        return
    with progress_bar(hidden=quiet or as_json) as progress:
        summary = finish_folder(loaded, task, out, progress)
    write_json(out / ENVIRONMENT, environment(task.dataset, data_dir, None))
    summary.write(out)
    page = write_report([out])
    if as_json:
        print_json(summary.as_dict())
        return
    print_table(_table(summary, out))
    print_path("report", page)


def _table(summary: Summary, out: Path) -> TextTable:
    from lipcert.display import NOTHING, TextTable

    rows = []
    for entry in summary.at:
        attacked = NOTHING if entry.attacked is None else f"{entry.attacked:.2%}"
        accuracies = [f"{summary.clean:.2%}", attacked, f"{entry.certified:.2%}"]
        if entry.local is not None:
            accuracies.append(f"{entry.local:.2%}")
        radii = [f"{summary.mean_radius:.4f}", f"{summary.median_radius:.4f}"]
        # Mean and median do not depend on ε; they stand in every row so that rows can
        # be read alone.
        rows.append([f"{entry.epsilon:g}", *accuracies, *radii])
    columns = ["ε (l2)", "clean", "attacked", "certified"]
    if summary.local_norm:
        columns.append(f"certified locally ({summary.local_norm})")
    return TextTable(
        f"{summary.model} on {summary.data}, {summary.inputs} test inputs",
        (*columns, "mean radius", "median radius"),
        rows,
        f"Certified: {summary.guarantee}; executed in {summary.execution}, "
        "rounding included. "
        f"{sentence(summary.data_note)}Written to {out}.",
    )
