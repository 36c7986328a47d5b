"""Methods and targets by their names."""

from __future__ import annotations

from typing import ClassVar, Protocol, TypeVar

from lipcert.errors import check_choice


class _Named(Protocol):
    name: ClassVar[str]
    rank: ClassVar[int]


T = TypeVar("T", bound=_Named)


class Register(dict[str, T]):
    """One object of each class by its name, in the order of their ranks."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    def add(self, kind: type[T]) -> type[T]:
        """Decorator: makes a class known by its name."""
        self[kind.name] = kind()
        # A dictionary keeps the order of insertion: tables and messages list names by
        # rank, whoever came first.
        ordered = sorted(self.items(), key=lambda item: item[1].rank)
        self.clear()
        self.update(ordered)
        return kind

    def find(self, name: str) -> T:
        """The object of this name; an error that lists all names if there is none."""
        check_choice(self._what, name, tuple(self))
        return self[name]
