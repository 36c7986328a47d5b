"""What a data set with a name is: the interface, the names, and how files are looked for and downloaded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, TypeVar

from lipcert.data.dataset import Dataset, Split
from lipcert.data.download import Remote, fetch
from lipcert.errors import DataError

VARIABLE = "LIPCERT_DATA_DIR"


class IncompleteError(DataError):
    """A folder holds some of the files of a data set, but not all."""


class Source(ABC):
    """A data set with a name. Adding one is a subclass in a file of its own with `@register_source`."""

    name: ClassVar[str]
    rank: ClassVar[int] = 10
    """Where it stands in lists: from the smallest to the largest."""

    @abstractmethod
    def load(self, folders: Sequence[Path], *, seed: int, download: bool) -> Dataset:
        """The data set from the first folder that holds it; the last folder is the cache.

        `seed` is that of the split into train and test, for data without one.
        """


class FileSource(Source):
    """A data set in files that lie in a folder, and are downloaded if they do not."""

    title: ClassVar[str]
    remotes: ClassVar[tuple[Remote, ...]]
    layout: ClassVar[str]
    """What has to be put into a folder, for the message when nothing is found."""

    @abstractmethod
    def read(self, root: Path) -> Dataset | None:
        """The data set in a folder or in its usual subfolders; None if it is there in no known form.

        An IncompleteError if the folder plainly holds a part.
        """

    def load(self, folders: Sequence[Path], *, seed: int, download: bool) -> Dataset:
        cache = folders[-1]
        for folder in folders:
            try:
                dataset = self.read(folder)
            except IncompleteError:
                if folder != cache or not download:
                    raise
                continue  # an interrupted download goes on
            if dataset is not None:
                return dataset
        # Found nowhere: the cache is the only folder that is ever written to.
        target = cache / self.name
        reason = "downloading is switched off"
        if download:
            try:
                for remote in self.remotes:
                    fetch(remote, target)
            except DataError as error:
                reason = str(error)
            else:
                dataset = self.read(target)
                if dataset is not None:
                    return dataset
                reason = f"{target} does not hold it after the download"
        looked = ", ".join(map(str, folders))
        raise DataError(
            f"{self.title} was not found in {looked}: {reason}. "
            f"Put {self.layout} into {target}, or into a folder given as "
            f"data_dir or {VARIABLE}"
        )


SOURCES: dict[str, Source] = {}
Kind = TypeVar("Kind", bound=Source)


def register_source(kind: type[Kind]) -> type[Kind]:
    """Decorator: makes a data set known by its name."""
    SOURCES[kind.name] = kind()
    # Modules are imported by name; lists show small data sets first.
    ordered = sorted(SOURCES.items(), key=lambda item: item[1].rank)
    SOURCES.clear()
    SOURCES.update(ordered)
    return kind


def with_remarks(title: str, remarks: Sequence[str]) -> str:
    """The title with what a reader of figures has to know: "CIFAR-10 (JPEG, a part: 20 and 10 images)"."""
    if not remarks:
        return title
    return f"{title} ({', '.join(remarks)})"


def part_remarks(train: Split, test: Split, whole: tuple[int, int]) -> list[str]:
    """That the splits are not whole, if so."""
    if (len(train), len(test)) == whole:
        return []
    return [f"a part: {len(train):,} and {len(test):,} images"]
