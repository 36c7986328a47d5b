"""The files of a folder or of an archive, one after the other, without unpacking anything to disk."""

from __future__ import annotations

import hashlib
import lzma
import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath

from lipcert.errors import DataError

ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.bz2", ".tbz2", ".zip")
_DAMAGED = (
    tarfile.TarError,
    zipfile.BadZipFile,
    lzma.LZMAError,
    zlib.error,
    EOFError,
    OSError,
    RuntimeError,
)


def is_archive(path: Path) -> bool:
    """Whether the path is a file whose name ends like an archive's."""
    return path.name.lower().endswith(ARCHIVES) and path.is_file()


def only_archive(folder: Path, start: str) -> Path | None:
    """The archive in the folder whose name begins so, if there is one; several are a DataError."""
    archives = sorted(filter(is_archive, folder.glob(f"{start}*")))
    # Which one is meant would depend on their names, and figures on the guess.
    if len(archives) > 1:
        listed = ", ".join(path.name for path in archives)
        raise DataError(
            f"{folder} holds several archives, {listed}; keep one of them there"
        )
    return archives[0] if archives else None


def read_files(
    source: Path, wanted: Callable[[str], bool]
) -> Iterator[tuple[str, bytes]]:
    """(relative path with forward slashes, content) of the wanted files; hidden files are skipped.

    `source` is a folder or an archive. A damaged archive is a DataError, raised when
    the damage is reached.
    """
    try:
        for path, read in _files(source):
            name = _visible(path)
            if name and wanted(name):
                yield name, read()
    # Around the reading, not the opening: a truncated archive opens well and fails in
    # the middle.
    except _DAMAGED as error:
        raise DataError(
            f"{source} is truncated or not an archive ({error}); fetch it again"
        ) from error


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def source_digest(source: Path) -> str:
    """SHA-256 of an archive's bytes, or of the names, sizes and times of all files in a folder."""
    if source.is_file():
        return file_digest(source)
    digest = hashlib.sha256()
    for path in _walk(source):
        # Contents would take as long as decoding does. An edit changes the time.
        stat = path.stat()
        digest.update(
            f"{path.relative_to(source).as_posix()}\n{stat.st_size} "
            f"{stat.st_mtime_ns}\n".encode()
        )
    return digest.hexdigest()


def read_bytes(path: Path) -> bytes:
    """The content of a file; a DataError if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _walk(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder, followlinks=True):
        # In place, which os.walk follows: file systems have orders of their own, and
        # the digest must not.
        folders.sort()
        for name in sorted(files):
            yield Path(parent, name)


def _files(source: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """The relative path of every file, and what reads its content."""
    if source.is_dir():
        for path in _walk(source):
            yield path.relative_to(source).as_posix(), partial(read_bytes, path)
    elif source.suffix.lower() == ".zip":
        with zipfile.ZipFile(source) as packed:
            for member in packed.infolist():
                if not member.is_dir():
                    yield member.filename, partial(packed.read, member)
    else:
        with tarfile.open(source) as tar:
            for entry in tar:
                # Links and devices are left out: nothing outside of the archive is ever
                # read.
                file = tar.extractfile(entry) if entry.isfile() else None
                if file is not None:
                    yield entry.name, file.read


def _visible(path: str) -> str:
    """The path without leading dots and slashes, or nothing for a hidden file."""
    names = []
    for name in PurePosixPath(path).parts:
        if name in (".", "/"):
            continue
        if name.startswith(".") or name == "__MACOSX":
            return ""
        names.append(name)
    return "/".join(names)
