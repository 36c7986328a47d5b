"""The command line: every command is a file of `lipcert.commands`, imported when it is called.

What needs torch is imported when a command runs, so that help is there at once.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from lipcert.commands.terminal import console
from lipcert.errors import LipcertError
from lipcert.version import VERSION

COMMANDS = {
    # name: (file, function, what --help says about it)
    "bound": ("bound_command", "bound", "Lipschitz constants by method and target, with times and guarantees."),
    "certify": ("certify_command", "certify", "Clean, attacked and certified accuracy; radii as CSV."),
    "attack": ("attack_command", "attack", "Clean accuracy and accuracy under l2 PGD."),
    "train": ("train_command", "train_command", "Train a certifiably robust classifier and certify it."),
    "sweep": ("sweep_command", "sweep_command", "Train with several values and seeds: means, deviations, a report."),
    "export": ("export_command", "export", "A classifier with radii for other runtimes: ONNX, or a web page."),
    "report": ("report_command", "report", "A page on one run or several side by side, with figures and tables."),
    "pretrained": ("pretrained_command", "pretrained_command", "The trained networks that come with lipcert."),
    "presets": ("presets_command", "list_presets", "The configurations that come with lipcert."),
    "reproduce": ("reproduce_command", "reproduce", "A table or figure of the paper, ours beside the published one."),
}  # fmt: skip


def root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and stop.", is_eager=True),
    ] = False,
) -> None:
    if version:
        console.print(f"lipcert {VERSION}")
        raise typer.Exit


def build_app(called: str | None = None) -> typer.Typer:
    """The application; if it is known which command is called, only that one is imported."""
    made = typer.Typer(
        help="Certified l2 robustness of PyTorch classifiers.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    made.callback(invoke_without_command=True)(root)
    for name, (file, function, text) in COMMANDS.items():
        if called in (None, name):
            made.command(name, short_help=text)(
                getattr(import_module(f"lipcert.commands.{file}"), function)
            )
        else:
            made.command(name, help=text)(_not_imported)
    return made


def _not_imported() -> None:
    """Stands for a command that is only listed."""


def __getattr__(name: str) -> Any:
    """`app` is the application with all its commands."""
    if name != "app":
        raise AttributeError(f"module 'lipcert.cli' has no attribute {name!r}")
    globals()["app"] = build_app()
    return globals()["app"]


def main() -> None:
    """Entry point: prints a LipcertError as one message and exits with 2. Files get wider tables than terminals."""
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 160
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    try:
        application = build_app(words[0] if words else "")
        if words and words[0] in COMMANDS and "--help" not in sys.argv:
            import_module(
                "torch"
            )  # which takes longest, and does not survive an exception meanwhile
        _interrupt_by_exceptions()
        application()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
    except LipcertError as error:
        _say(str(error))
        sys.exit(2)
    except (
        OSError
    ) as error:  # a disk that is full or read-only, a folder that cannot be made
        place = f"{error.filename}: " if error.filename else ""
        _say(
            f"{place}{error.strerror or error}; choose another place, or make room there"
        )
        sys.exit(2)


def _say(message: str) -> None:
    Console(stderr=True).print(
        f"[bold red]error:[/] {escape(message)}", highlight=False
    )


def _interrupt_by_exceptions() -> None:
    """From here on, Ctrl-C and SIGTERM are KeyboardInterrupts: what is being written vanishes, and a training says how
    it is continued."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
