"""Metadata that are computed: the README with absolute links, which package indices need. All else: pyproject.toml."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def description() -> str:
    """The README; links and pictures lead to the repository of [project.urls]."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    repository = project["urls"]["Repository"]
    pictures = (
        f"{repository.replace('//github.com/', '//raw.githubusercontent.com/')}/main/"
    )
    text = (ROOT / "README.md").read_text("utf-8")
    text = re.sub(
        r"(!\[[^\]]*\]\()(?!https?:|#)", lambda found: found[1] + pictures, text
    )
    return re.sub(
        r"(\]\()(?!https?:|#)", lambda found: f"{found[1]}{repository}/blob/main/", text
    )


setup(long_description=description(), long_description_content_type="text/markdown")
