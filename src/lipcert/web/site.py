"""Writing the page: the classifier as ONNX, what is known about it, the runtime and the page itself."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment

from lipcert.certificate import CertifiedClassifier
from lipcert.errors import OptionError
from lipcert.files import write_json, write_text
from lipcert.web.browser_runtime import copy_runtime

PAGE, CLASSIFIER, FACTS = "index.html", "classifier.onnx", "classifier.json"


def write_site(
    classifier: CertifiedClassifier,
    folder: str | Path,
    title: str,
    class_names: Sequence[str] = (),
) -> Path:
    """A static page in a folder, which any web server can serve; returns the page, which is written last."""
    folder = Path(folder)
    shape = classifier.input_shape
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise OptionError(
            f"the page is for images of 1 or 3 channels, the model takes inputs of shape {shape}"
        )
    if (
        folder.exists()
        and (not folder.is_dir() or any(folder.iterdir()))
        and not (folder / FACTS).exists()
    ):
        raise OptionError(
            f"{folder} exists and holds something else than such a page; choose another folder"
        )
    copy_runtime(folder)
    classifier.to_onnx(folder / CLASSIFIER)
    constants = classifier.constants
    names = list(class_names) or [str(k) for k in range(len(constants))]
    facts = {
        "title": title, "shape": list(shape), "classes": names, "guarantee": classifier.guarantee,
        "constants": constants.tolist(), "input": str(classifier.dtype).removeprefix("torch."),
    }  # fmt: skip
    write_json(folder / FACTS, facts)
    template = (
        files("lipcert") / "web" / "templates" / "classifier.html.j2"
    ).read_text("utf-8")
    page = (
        Environment(autoescape=True)
        .from_string(template)
        .render(facts, classifier=CLASSIFIER, facts=FACTS)
    )
    write_text(folder / PAGE, page)
    return folder / PAGE
