"""The norm and the size of balls, as users give them."""

from __future__ import annotations

from math import inf, isfinite
from typing import Any

from lipcert.errors import OptionError


def checked_norm(norm: float | str) -> float:
    """2 or ∞, also as text."""
    if norm in (inf, "inf"):
        return inf
    if norm in (2, "2"):
        return 2.0
    raise OptionError(f"norm is {norm!r}, expected 2 or inf")


def checked_epsilon(epsilon: Any) -> float | None:
    """A positive number, of any numeric type or a tensor of one entry, as a float."""
    if epsilon is None:
        return None
    problem = f"epsilon is {epsilon!r}, expected a positive number"
    if isinstance(epsilon, bool | str | bytes):
        raise OptionError(problem)
    try:
        value = float(epsilon)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise OptionError(f"{problem}, one for all inputs") from None
    if not (isfinite(value) and value > 0):
        raise OptionError(problem)
    return value
