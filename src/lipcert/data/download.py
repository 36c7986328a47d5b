"""Files from their public addresses: checked by SHA-256, and in place whole or not at all."""

from __future__ import annotations

import hashlib
import logging
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from lipcert.data.archives import file_digest
from lipcert.errors import DataError
from lipcert.files import replace_file

_LOG = logging.getLogger(__name__)
_CHUNK = 1 << 20
_TIMEOUT = 30.0


@dataclass(frozen=True)
class Remote:
    """A file with its SHA-256 and the addresses it can be had from, tried in this order."""

    file: str
    sha256: str
    urls: tuple[str, ...]


def fetch(remote: Remote, folder: Path) -> Path:
    """The path of the file in the folder, downloaded unless it is there already with the right checksum."""
    target = folder / remote.file
    # Not its presence alone: what another program left there may be half a file.
    if target.is_file() and file_digest(target) == remote.sha256:
        return target
    failures = []
    for url in remote.urls:
        try:
            return _fetch_from(url, remote, target)
        except (OSError, HTTPException, DataError) as error:
            # Mirrors come and go. Only if all fail is it an error, with all reasons.
            failures.append(f"{url}: {error}")
    raise DataError(f"{remote.file} could not be downloaded ({'; '.join(failures)})")


def _fetch_from(url: str, remote: Remote, target: Path) -> Path:
    _LOG.info("downloading %s", url)
    digest = hashlib.sha256()
    with replace_file(target) as temporary:
        with (
            urllib.request.urlopen(url, timeout=_TIMEOUT) as response,
            temporary.open("wb") as file,
        ):
            while chunk := response.read(_CHUNK):
                digest.update(chunk)
                file.write(chunk)
        # Still within `replace_file`: an error here removes what was downloaded.
        if digest.hexdigest() != remote.sha256:
            raise DataError(
                f"its SHA-256 is {digest.hexdigest()}, expected {remote.sha256}"
            )
    return target
