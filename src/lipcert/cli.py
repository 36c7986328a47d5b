"""The command line: arguments in, tables out."""

from __future__ import annotations

import json
import os
import sys
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from lipcert.bounds.methods import METHODS
from lipcert.commands import constants, evaluate
from lipcert.commands import report as reports
from lipcert.commands import reproduce as reproduction
from lipcert.commands import train as training
from lipcert.commands.progress import progress_bar
from lipcert.errors import LipcertError, OptionError
from lipcert.loading import load_model

app = typer.Typer(
    help="Certified l2 robustness of PyTorch classifiers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()


def _number(text: str) -> float:
    try:
        return float(Fraction(text))
    except (ValueError, ZeroDivisionError):
        raise OptionError(f"--eps is {text!r}, expected a number or a fraction such as 36/255") from None


Model = Annotated[
    str, typer.Argument(help="Zoo name or module:factory (built with seed 0), .safetensors checkpoint or run folder.")
]
Weights = Annotated[
    Path | None, typer.Option(help="Weights for the model: .safetensors, or a state dict as .pt, .pth, .bin, .ckpt.")
]
InputShape = Annotated[str | None, typer.Option(help="Shape of one input, such as 3,32,32.")]
Data = Annotated[str, typer.Option(help="digits, mnist, cifar10, tiny-imagenet, or an image folder.")]
DataDir = Annotated[Path | None, typer.Option(help="Where the data sets are.", envvar="LIPCERT_DATA_DIR")]
Eps = Annotated[
    list[float],
    typer.Option(
        help="l2 perturbation size, in units of pixels in [0, 1], such as 1.58 or 36/255; repeatable.",
        parser=_number,
        metavar="<float>",
    ),
]
Limit = Annotated[int | None, typer.Option(help="Use the first N test inputs only.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bar.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.", is_eager=True)] = False,
) -> None:
    if version:
        from lipcert import __version__

        console.print(f"lipcert {__version__}")
        raise typer.Exit


@app.command()
def bound(
    model: Model,
    weights: Weights = None,
    input_shape: InputShape = None,
    method: Annotated[list[str] | None, typer.Option(help=f"all, or some of {', '.join(METHODS)}; repeatable.")] = None,
    target: Annotated[list[str] | None, typer.Option(help="network, per-class, last-layer, pairwise.")] = None,
    estimate: Annotated[bool, typer.Option("--estimate", help="Power iteration: fast, not guaranteed.")] = False,
    iterations: Annotated[int, typer.Option(help="Power iterations of an estimate.", min=1)] = 100,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Lipschitz constants by method and target, side by side, with times and guarantees.

    Without --method: naive and liplt. --method all: every method, above the steepest slopes found.
    """
    loaded = load_model(model, weights=weights, input_shape=_shape(input_shape))
    with progress_bar(hidden=quiet or as_json) as progress:
        rows = constants.constants(loaded, method, target, iterations if estimate else None, progress)
    if as_json:
        print(json.dumps([row.as_dict() for row in rows], indent=2))
        return
    table = constants.overview_table if constants.ALL in (method or ()) else constants.constants_table
    console.print(table(loaded, rows))


@app.command()
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
    attack: Annotated[bool, typer.Option("--attack", help="Attack every input and cross-check its radius.")] = False,
    limit: Limit = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Clean, attacked and certified accuracy; radii of every test input as CSV. Continues where it stopped."""
    loaded = load_model(model, weights=weights, input_shape=_shape(input_shape))
    loaded = loaded.in_float64() if float64 else loaded
    with progress_bar(hidden=quiet or as_json) as progress:
        summary = evaluate.certify(
            loaded, data, data_dir, eps, out, method=method, attack=attack, limit=limit, progress=progress
        )
    page, _ = reports.report([out], None, None)
    _show(summary, as_json)
    if not as_json:
        console.print(f"report: {page}", soft_wrap=True)


@app.command()
def attack(
    model: Model,
    data: Data,
    eps: Eps,
    weights: Weights = None,
    input_shape: InputShape = None,
    data_dir: DataDir = None,
    steps: Annotated[int, typer.Option(help="PGD iterations.")] = 100,
    step: Annotated[str, typer.Option(help="relative (ε/10), or paper (0.001, as it states).")] = "relative",
    restarts: Annotated[int, typer.Option(help="PGD runs, all but the first from random points.")] = 2,
    limit: Limit = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Clean accuracy and accuracy under l2 PGD."""
    loaded = load_model(model, weights=weights, input_shape=_shape(input_shape))
    with progress_bar(hidden=quiet or as_json) as progress:
        settings = evaluate.PgdSettings(steps, step, restarts)
        summary = evaluate.attack(loaded, data, data_dir, eps, settings, limit=limit, progress=progress)
    _show(summary, as_json)


@app.command()
def train(
    config: Annotated[
        str | None, typer.Argument(help="Preset or TOML file; default: digits.", show_default=False)
    ] = None,
    run_dir: Annotated[Path | None, typer.Option(help="New folder for the run; default: runs/<name>-<n>.")] = None,
    data_dir: DataDir = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="key=value, such as loss.t=4; repeatable.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue the interrupted run in this folder.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train a certifiably robust classifier and certify it. Works under torchrun."""
    result = training.run(config, set_ or [], run_dir, data_dir, resume, quiet=quiet or as_json)
    if not training.is_first_process():
        return
    page, _ = reports.report([result.folder], None, None)
    if as_json:
        print(json.dumps({"folder": str(result.folder), "report": str(page), **result.summary}, indent=2))
        return
    console.print(result)
    console.print(f"run: {result.folder}", soft_wrap=True)
    console.print(f"report: {page}", soft_wrap=True)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or that certify has written.")],
    out: Annotated[Path | None, typer.Option(help="Where to write; default: the first run's folder.")] = None,
    table: Annotated[str | None, typer.Option(help="Print the table of the runs: markdown or latex.")] = None,
) -> None:
    """A page on one run or several side by side, with figures and tables; nothing is computed again."""
    page, text = reports.report(runs, out, table)
    if text is not None:
        print(text, end="")
        return
    console.print(f"report: {page}", soft_wrap=True)


@app.command()
def presets() -> None:
    """The configurations that come with lipcert."""
    console.print(training.presets_table())


@app.command()
def reproduce(
    name: Annotated[str | None, typer.Argument(help="A table or figure; without it, the list.")] = None,
    budget: Annotated[str, typer.Option(help="tiny (digits), hour (two cores) or paper (in full).")] = "tiny",
    data_dir: DataDir = None,
    out: Annotated[Path, typer.Option(help="Folder of results and of the runs they share.")] = Path("runs/reproduce"),
    protocol: Annotated[str, typer.Option(help="lipcert, or authors: their PGD, CIFAR-10 in [-1, 1].")] = "lipcert",
    epochs: Annotated[int | None, typer.Option(help="Of every run, instead of the budget's.")] = None,
    seed: Annotated[int, typer.Option(help="Of every run.")] = 0,
    show_list: Annotated[bool, typer.Option("--list", help="List all tables and figures.")] = False,
    quiet: Quiet = False,
) -> None:
    """Tables and figures of the paper, the published numbers beside ours. Continues where it stopped.

    Exits with 1 if a configuration failed; the table says which and why.
    """
    if name is None or show_list:
        console.print(reproduction.experiments_table())
        return
    with progress_bar(hidden=quiet) as progress:
        done = reproduction.run(name, budget, protocol, epochs, seed, out, data_dir, progress)
    console.print(reproduction.outcome_table(done))
    console.print(f"results: {done.folder}", soft_wrap=True)
    if done.failed:
        raise typer.Exit(1)


def _show(summary: evaluate.Summary, as_json: bool) -> None:
    if as_json:
        print(json.dumps(summary.as_dict(), indent=2))
        return
    columns = (Column(name, overflow="fold") for name in summary.columns)
    table = Table(*columns, title=summary.title, caption=summary.caption)
    for row in summary.rows:
        table.add_row(*row)
    console.print(table)


def _shape(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise OptionError(f"--input-shape is {text!r}, expected numbers such as 3,32,32")
    return tuple(map(int, parts))


def main() -> None:
    """Entry point: prints a LipcertError as one message and exits with 2. Files get wider tables than terminals."""
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 160
    try:
        app()
    except LipcertError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
        sys.exit(2)


if __name__ == "__main__":
    main()
