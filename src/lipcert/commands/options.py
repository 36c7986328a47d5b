"""What several commands share: options, the model they name, and how results are printed.

Here and in the commands, what needs torch is imported when a command runs: --help does
not wait for it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lipcert.commands.terminal import console
from lipcert.errors import OptionError

if TYPE_CHECKING:
    from lipcert.data import Dataset
    from lipcert.display import TextTable
    from lipcert.models import LoadedModel

METHOD_NAMES = "naive, liplt, rescaled, lt-sdp, ellipsoids, lipsdp, best"
"""For --help, which is too quick to look for methods of others; a wrong name lists all."""


def _number(text: str) -> float:
    try:
        # 36/255 is exact as a fraction and rounded once; Fraction reads 1.58 and 1e-3,
        # too.
        return float(Fraction(text))
    except (ValueError, ZeroDivisionError):
        raise OptionError(
            f"--eps is {text!r}, expected a number or a fraction such as 36/255"
        ) from None


Model = Annotated[
    str,
    typer.Argument(
        help="Zoo name or module:factory (built with seed 0), .safetensors weights, "
        ".onnx file, run folder, or a name "
        "of lipcert pretrained."
    ),
]
Weights = Annotated[
    Path | None,
    typer.Option(
        help="Weights for the model: .safetensors, or a state dict as .pt, "
        ".pth, .bin, .ckpt."
    ),
]
InputShape = Annotated[
    str | None, typer.Option(help="Shape of one input, such as 3,32,32.")
]
DATA_OPTION = typer.Option(
    help="A data set such as digits, mnist or cifar10, an image folder or an .npz file."
)
Data = Annotated[str, DATA_OPTION]
DataDir = Annotated[
    Path | None,
    typer.Option(help="Where the data sets are.", envvar="LIPCERT_DATA_DIR"),
]
EPS_OPTION = typer.Option(
    help="l2 perturbation size, in units of pixels in [0, 1], such as 1.58 or "
    "36/255; repeatable.",
    parser=_number,
    metavar="<float>",
)
TRAIN_EPS_OPTION = typer.Option(
    "--eps",
    help="Train for this perturbation size, such as 72/255: the loss follows.",
    parser=_number,
    metavar="<float>",
)
Eps = Annotated[list[float], EPS_OPTION]
Limit = Annotated[int | None, typer.Option(help="Use the first N test inputs only.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bar.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def named_model(
    spec: str, weights: Path | None, input_shape: str | None
) -> LoadedModel:
    """The model that the arguments of a command name."""
    from lipcert.models import load_model

    shape = None
    if input_shape is not None:
        sizes = input_shape.split(",")
        # isdecimal refuses signs and points, which int or float would take.
        if not all(size.strip().isdecimal() and int(size) > 0 for size in sizes):
            raise OptionError(
                f"--input-shape is {input_shape!r}, expected numbers such as 3,32,32"
            )
        shape = tuple(map(int, sizes))
    return load_model(spec, weights=weights, input_shape=shape)


def named_data(
    loaded: LoadedModel, name: str, data_dir: Path | None, limit: int | None
) -> tuple[LoadedModel, Dataset, int]:
    """The model for a data set, the data set, and how many of its test inputs are meant."""
    from lipcert.data import load

    if limit is not None and limit < 1:
        raise OptionError(f"--limit is {limit}, expected 1 or more")
    # Pixels in the dtype that the model computes in: radii are about what is executed.
    dataset = load(name, data_dir).in_dtype(loaded.dtype)
    loaded = loaded.for_images(dataset.input_shape)
    return loaded, dataset, min(limit or len(dataset.test), len(dataset.test))


def checked_epsilons(epsilons: Sequence[float]) -> list[float]:
    """Positive ones, each once."""
    if not epsilons or not all(0 < epsilon < float("inf") for epsilon in epsilons):
        raise OptionError(
            f"--eps is {list(epsilons)}, expected positive numbers such as 1.58"
        )
    # dict.fromkeys keeps the order, in which tables show them.
    return list(dict.fromkeys(epsilons))


def sentence(note: str) -> str:
    """A note as a sentence, ready for others to follow."""
    if not note:
        return ""
    return f"{note.rstrip('.')}. "


def print_table(table: TextTable) -> None:
    """A table on the terminal."""
    console.print(table.rich())


def print_path(what: str, path: Path) -> None:
    """Where something is, on a line of its own that can be copied."""
    # A path that is broken over two lines cannot be copied.
    console.print(f"{what}: {path}", soft_wrap=True)


def print_json(values: Any) -> None:
    """Values for other programs."""
    # Plain print: rich would wrap long lines and colour them.
    print(json.dumps(values, indent=2))
