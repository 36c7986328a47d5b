"""Every error lipcert raises on purpose: each names the culprit and says what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches


class LipcertError(Exception):
    """Base of all errors that lipcert raises on purpose; the command line exits with 2 on any of them.

    Example:
        >>> try:
        ...     lipcert.bound(nn.Linear(4, 3), (5,))
        ... except lipcert.LipcertError as error:
        ...     print(type(error).__name__)
        ShapeError
    """


@dataclass(frozen=True)
class UnsupportedNode:
    """One operation of a model that lipcert cannot bound, and the remedy."""

    name: str
    kind: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}): {self.remedy}"


class UnsupportedError(LipcertError):
    """The model contains operations without a rule; `nodes` lists every one of them.

    Example:
        >>> try:
        ...     lipcert.trace(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3)).eval(), (4,))
        ... except lipcert.UnsupportedError as error:
        ...     print([(node.name, node.kind) for node in error.nodes])
        [('0', 'LayerNorm')]
    """

    def __init__(self, nodes: Sequence[UnsupportedNode]) -> None:
        self.nodes = tuple(nodes)
        count = f"{len(nodes)} operations" if len(nodes) > 1 else "an operation"
        lines = "\n".join(f"  - {node}" for node in nodes)
        super().__init__(
            f"the model contains {count} that lipcert cannot bound:\n{lines}"
        )


class TrainingModeError(LipcertError):
    """The model is in training mode and behaves differently from the model that would be bounded."""


class ShapeError(LipcertError):
    """A tensor or an input shape does not fit the model."""


class LabelError(LipcertError):
    """Labels are not one class per input."""


class NonFiniteError(LipcertError):
    """Weights, inputs or results contain NaN or infinity."""


class TooLargeError(LipcertError):
    """The requested computation needs more memory than allowed."""


class SolverError(LipcertError):
    """A solver stopped before its optimum, so that its result is not what was asked for."""


class OptionError(LipcertError):
    """An option has a value that does not exist."""


class BoundError(LipcertError):
    """A bound does not belong to the model it is used with, or its file is damaged."""


class CertificateViolation(LipcertError):
    """An attack found an input inside a certified radius with another prediction: a certificate does not hold."""


class ResumeError(LipcertError):
    """A file to be continued belongs to another computation."""


class ModelError(LipcertError):
    """A model or its weights could not be loaded."""


class ConfigError(LipcertError):
    """A training configuration has a key or a value that does not exist."""


class CheckpointError(LipcertError):
    """A training checkpoint is missing, damaged or belongs to another run."""


class DivergenceError(LipcertError):
    """Training has left the finite numbers; the message says where, and which checkpoint is the last good one."""


class DataError(LipcertError):
    """A data set, a data file or labels are missing, damaged or not what their name says."""


def nearest(name: object, choices: Iterable[object]) -> str:
    """A hint at the choice that looks most like the name, or nothing."""
    near = get_close_matches(str(name), [*map(str, choices)], n=1, cutoff=0.4)
    return f"; did you mean {near[0]!r}?" if near else ""


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Refuse a value that is not one of the choices, naming the nearest one."""
    if value not in choices:
        listed = ", ".join(map(str, choices))
        raise OptionError(
            f"{name} is {value!r}, expected one of {listed}{nearest(value, choices)}"
        )
