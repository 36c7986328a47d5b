"""`lipcert export`: a certified classifier as an ONNX file or as a web page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lipcert.commands.options import (
    InputShape,
    Model,
    Quiet,
    Weights,
    named_model,
    print_path,
)
from lipcert.commands.progress_bar import progress_bar
from lipcert.errors import OptionError
from lipcert.layout import SUMMARY
from lipcert.progress import Progress

if TYPE_CHECKING:
    from lipcert.bounds.bound import Bound
    from lipcert.models import LoadedModel


OnnxFile = Annotated[
    Path | None, typer.Option(help="ONNX file to write: logits and radius.")
]
WebFolder = Annotated[
    Path | None,
    typer.Option(help="Folder for a web page in which the classifier runs."),
]


def export(
    model: Model,
    onnx: OnnxFile = None,
    web: WebFolder = None,
    weights: Weights = None,
    input_shape: InputShape = None,
    quiet: Quiet = False,
) -> None:
    """A classifier with certified radii for other runtimes: as an ONNX file, or as a web page."""
    # Before torch is imported, which takes seconds.
    if onnx is None and web is None:
        raise OptionError("nothing to write; give --onnx FILE, --web FOLDER or both")
    from lipcert.certificate import CertifiedClassifier
    from lipcert.runs import read_summary
    from lipcert.web import write_site

    loaded = named_model(model, weights, input_shape)
    with progress_bar(hidden=quiet) as progress:
        # The captured network, not the model: it is the one that the bound below is
        # compared with.
        classifier = CertifiedClassifier(loaded.network, _bound(loaded, progress))
    if onnx is not None:
        print_path("written", classifier.to_onnx(onnx))
    if web is not None:
        title: str = loaded.name
        names: tuple[str, ...] = ()
        # A run folder knows the names of its classes; a file of weights does not.
        if (Path(model) / SUMMARY).exists():
            summary = read_summary(Path(model))
            title, names = summary.name or loaded.name, summary.class_names
        page = write_site(classifier, web, title, names)
        print_path("page", page)
        command = "python -m http.server --directory"
        print_path(f"serve it, for example, with: {command}", page.parent)


def _bound(loaded: LoadedModel, progress: Progress) -> Bound:
    """The one that is stored with the model, if it is that of the program as it is executed here."""
    from lipcert.bounds.compute import bound_targets

    if loaded.earlier is not None and loaded.earlier.belongs_to(loaded.network):
        return loaded.earlier
    model, shape, target = loaded.model, loaded.input_shape, "pairwise"
    made = bound_targets(
        model, shape, "liplt", (target,), network=loaded.network, progress=progress
    )
    return made[target]
