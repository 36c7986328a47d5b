"""How norms are bounded."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from lipcert.errors import OptionError
from lipcert.resources import usable_memory

_SURE = 1e-30
"""No less than this: random starts have 128 bits, so that nothing is surer than 3e-39."""


@dataclass(frozen=True)
class NormOptions:
    """How norms are bounded.

    dense_limit: the largest side for which the Gram matrix is formed and the bound is
    proved.

    inflation: by how much randomised bounds on norms may enlarge the constants.

    failure_probability: of all randomised bounds together, rounding included.

    memory: bytes that matrices and Lanczos bases may take at a time; 60 % of what is
    free, at most 2 GiB, by default. What fits into it only piece by piece takes more
    rounds; a norm that needs more is refused with a forecast.

    seed: of the random starts; by default they come from the operating system's
    entropy, after the weights are fixed.

    keep: a folder for norms that are done, so that a bound that is interrupted
    continues there; none by default.
    """

    dense_limit: int = 4096
    inflation: float = 0.01
    failure_probability: float = 1e-9
    memory: int = field(default_factory=usable_memory)
    seed: int | None = None
    keep: str | Path | None = None

    def __post_init__(self) -> None:
        _check("inflation", self.inflation, 0.0, 1.0)
        _check("failure_probability", self.failure_probability, _SURE, 1.0)
        _check_whole("dense_limit", self.dense_limit, 0)
        _check_whole("memory", self.memory, 1)
        if self.seed is not None:
            _check_whole("seed", self.seed, 0)
        if self.keep is not None and not isinstance(self.keep, str | Path):
            raise OptionError(f"keep is {self.keep!r}, expected the path of a folder")


def _check(name: str, value: float, low: float, high: float) -> None:
    """Refuse what is no number between two others."""
    if not isinstance(value, int | float) or not low < value < high:
        raise OptionError(
            f"{name} is {value!r}, expected a number between {low:g} and {high:g}"
        )


def _check_whole(name: str, value: int, least: int) -> None:
    """Refuse what is no whole number of at least so much."""
    if not isinstance(value, int) or value < least:
        raise OptionError(
            f"{name} is {value!r}, expected a whole number, at least {least}"
        )
