"""How long work says where it is."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called with what is being done, the fraction done, and the latest figures."""

    def __call__(self, what: str, fraction: float, figures: str = "") -> None: ...


def no_progress(what: str, fraction: float, figures: str = "") -> None:
    """Shows nothing."""
