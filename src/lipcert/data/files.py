"""The files of a folder or of an archive, one after the other, without unpacking anything to disk."""

from __future__ import annotations

import hashlib
import lzma
import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from lipcert.errors import DataError

ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.bz2", ".tbz2", ".zip")
_DAMAGED = (tarfile.TarError, zipfile.BadZipFile, lzma.LZMAError, zlib.error, EOFError, OSError, RuntimeError)


def is_archive(path: Path) -> bool:
    """Whether the path is a file whose name ends like an archive's."""
    return path.name.lower().endswith(ARCHIVES) and path.is_file()


def read_files(source: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """(relative path with forward slashes, content) of the wanted files; hidden files are skipped.

    `source` is a folder or an archive. A damaged archive is a DataError, raised when the damage is reached.
    """
    if source.is_dir():
        yield from _folder_files(source, wanted)
        return
    try:
        yield from _zip_files(source, wanted) if source.suffix.lower() == ".zip" else _tar_files(source, wanted)
    except _DAMAGED as error:
        raise DataError(f"{source} is truncated or not an archive ({error}); fetch it again") from error


def fingerprint(source: Path) -> str:
    """SHA-256 of an archive's bytes, or of the names, sizes and times of all files in a folder."""
    if source.is_file():
        with source.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    digest = hashlib.sha256()
    for path in _walk(source):
        stat = path.stat()
        digest.update(f"{path.relative_to(source).as_posix()}\n{stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def read_bytes(path: Path) -> bytes:
    """The content of a file; a DataError if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _folder_files(folder: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    for path in _walk(folder):
        name = _name(path.relative_to(folder).as_posix())
        if name and wanted(name):
            yield name, read_bytes(path)


def _walk(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder, followlinks=True):
        folders.sort()
        yield from (Path(parent, name) for name in sorted(files))


def _tar_files(archive: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(archive) as tar:
        for member in tar:
            name = _name(member.name)
            if not (name and member.isfile() and wanted(name)):
                continue
            file = tar.extractfile(member)
            if file is not None:
                yield name, file.read()


def _zip_files(archive: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(archive) as packed:
        for member in packed.infolist():
            name = _name(member.filename)
            if name and not member.is_dir() and wanted(name):
                yield name, packed.read(member)


def _name(path: str) -> str:
    """The path without leading dots and slashes, or nothing for a hidden file."""
    parts = [part for part in PurePosixPath(path).parts if part not in (".", "/")]
    hidden = any(part.startswith(".") or part == "__MACOSX" for part in parts)
    return "" if hidden else "/".join(parts)
