"""How Sphinx builds the documentation; the references and the small figures are made afresh from the source."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import figures  # noqa: E402
import reference  # noqa: E402

import lipcert  # noqa: E402

project = "lipcert"
author = "the lipcert authors"
release = lipcert.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["generated/*.svg"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
smartquotes = False  # options begin with two hyphens
html_theme = "furo"
html_title = "lipcert"
html_static_path = ["static"]
html_css_files = ["tables.css"]


_FIELDS = re.compile(r"[a-z_0-9]+(, [a-z_0-9]+)*: \S")


def _plain(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Docstrings are plain text: `code` in backticks, |x| and * mean nothing else, every field has its own line."""
    plain: list[str] = []
    for line in lines:
        if _FIELDS.match(line) and what == "class":
            plain.append("")
        parts = re.split(r"(?<![:`])(`[^`]+`)(?!`)", line)
        plain.append(
            "".join(
                _code(part)
                if part.startswith("`")
                else re.sub(r"([|*])", r"\\\1", part)
                for part in parts
            )
        )
    lines[:] = plain


def _code(text: str) -> str:
    return text if text.startswith("``") else f"`{text}`"


def setup(app: Any) -> None:
    reference.write(HERE / "generated")
    figures.draw(HERE / "generated")
    app.connect("autodoc-process-docstring", _plain, priority=400)
