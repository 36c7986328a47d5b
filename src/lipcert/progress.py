"""How work that takes long says how far it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

Report = Callable[[float], None]
"""Called with the fraction that is done."""


class Progress(Protocol):
    """Called with what is being done, the fraction of it that is done, and the latest figures, if there are any."""

    def __call__(self, what: str, fraction: float, figures: str = "") -> None: ...


def no_progress(what: str, fraction: float, figures: str = "") -> None:
    """Reports nothing."""


def no_report(fraction: float) -> None:
    """Reports nothing."""
