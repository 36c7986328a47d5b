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


class Work:
    """Parts of different sizes of one piece of work: what is reported is the share of all of it that is done."""

    def __init__(self, what: str, total: float, progress: Progress) -> None:
        self._what, self._total, self._progress = what, total, progress
        self._done = 0.0

    def part(self, amount: float) -> Report:
        """Reports on the next part, which is so large."""
        # Reports of a part are absolute: called twice with the same fraction, it counts
        # once.
        before = self._done

        def report(fraction: float) -> None:
            self._done = before + amount * fraction
            self._progress(self._what, min(self._done / self._total, 1.0))

        return report
