"""The command line: every command is a file of `lipcert.commands`."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from lipcert.commands.attack_command import attack
from lipcert.commands.bound_command import bound
from lipcert.commands.certify_command import certify
from lipcert.commands.options import console
from lipcert.commands.presets_command import list_presets
from lipcert.commands.report_command import report
from lipcert.commands.reproduce_command import reproduce
from lipcert.commands.train_command import train_command
from lipcert.errors import LipcertError
from lipcert.version import VERSION

app = typer.Typer(
    help="Certified l2 robustness of PyTorch classifiers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.", is_eager=True)] = False,
) -> None:
    if version:
        console.print(f"lipcert {VERSION}")
        raise typer.Exit


app.command()(bound)
app.command()(certify)
app.command()(attack)
app.command("train")(train_command)
app.command()(report)
app.command("presets")(list_presets)
app.command()(reproduce)


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
