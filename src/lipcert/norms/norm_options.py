"""How norms are bounded."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from lipcert.errors import OptionError
from lipcert.resources import usable_memory


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
    keep: Path | None = None

    def __post_init__(self) -> None:
        if not 0 < self.inflation < 1:
            raise OptionError(
                f"inflation is {self.inflation}, expected a number between 0 "
                "and 1, such as 0.005"
            )
        if not 0 < self.failure_probability < 1:
            raise OptionError(
                f"failure_probability is {self.failure_probability}, expected a "
                "number between 0 and 1"
            )
        if self.dense_limit < 0 or self.memory <= 0:
            raise OptionError(
                f"dense_limit is {self.dense_limit} and memory {self.memory}, "
                "expected at least 0 and 1"
            )
