"""Code of one's own by its name, `module:attribute`, with the current folder on the path."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lipcert.errors import LipcertError
from lipcert.network.explain import user_line

GIVEN = " (given in Python)"
"""Ends the name of what a program has given as an object: such a name finds nothing again."""


def is_own(name: str) -> bool:
    """Whether a name stands for code of the user, as module:attribute."""
    return ":" in name and not name.endswith(GIVEN)


def given_name(value: object) -> str:
    """What an object is called where its name has to stand for it."""
    name = getattr(value, "__name__", type(value).__name__)
    return f"{name}{GIVEN}"


@contextmanager
def own_code(spec: str, kind: type[LipcertError]) -> Iterator[Any]:
    """What the name stands for; the current folder stays on the path meanwhile, errors name the user's line."""
    module_name, _, attribute = spec.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        try:
            found = getattr(importlib.import_module(module_name), attribute)
        except Exception as error:  # whatever the user's code raises
            raise failure(spec, "cannot be imported", error, kind) from error
        yield found
    finally:
        sys.path.pop(0)


def failure(
    spec: str, problem: str, error: Exception, kind: type[LipcertError]
) -> LipcertError:
    """That the user's code has failed, and where."""
    return kind(f"{spec} {problem} ({type(error).__name__}{user_line(error)}: {error})")
