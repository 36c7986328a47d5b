"""Certificates of a whole data set as a CSV file that grows row by row and can be continued."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from lipcert.bounds.bound import Bound
from lipcert.certificate.certificate_rows import (
    HEADER,
    certificates_of_rows,
    parse_rows,
    rows_of_certificates,
)
from lipcert.certificate.certificates import Certificates, concatenate
from lipcert.certificate.inputs import CertifyBatch
from lipcert.errors import ResumeError
from lipcert.files import replace_file
from lipcert.processes import gathered, of_first, process_count, process_rank
from lipcert.progress import Progress, no_progress

Batch = Callable[[int, int], tuple[Tensor, Tensor]]
"""Inputs and labels from one index up to another."""


# Invariant of the two files: the rows that the checksum covers are complete and of this
# origin. A batch is appended first and covered afterwards; a process that is killed in
# between leaves rows that the next one cuts off and repeats.
def certify_to_csv(
    certify: CertifyBatch,
    bound: Bound,
    batch: Batch,
    count: int,
    path: str | Path,
    *,
    origin: str,
    batch_size: int = 256,
    progress: Progress = no_progress,
) -> Certificates:
    """Certify inputs 0..count−1, one flushed CSV row each; rows that are there already are kept, not computed again.

    `bound` is what the certificates rest on, and says whose they are; `origin` says
    what the rows depend on besides the weights (the data set and its checksum, the
    method of the bound). It is written beside the file with a checksum of the rows,
    after every batch. A file of another origin is refused, and so is one whose rows
    were changed. Processes that share work divide the batches; the first one writes,
    and all return all certificates.
    """
    path, fingerprint, rank = Path(path), bound.facts.fingerprint, process_rank()
    covered = of_first(_begin(path, fingerprint, origin) if rank == 0 else b"")
    digest = hashlib.sha256(covered)
    batches = [_earlier(covered, path, bound.guarantee, count)]
    # Two processes, batches of 4: inputs 0–3 | 4–7, then 8–11 | 12–15; gathered in this
    # order.
    for start in range(len(batches[0]), count, batch_size * process_count()):
        own = range(start, count)[rank * batch_size :][:batch_size]
        piece = _certified(certify, batch, own)
        for first, label, certificates in filter(None, gathered(piece)):
            written = rows_of_certificates(first, label, certificates)
            digest.update(written)
            last = first + len(certificates)
            if rank == 0:
                _append(path, written)
                _write_origin(path, fingerprint, origin, last, digest.hexdigest())
            batches.append(certificates)
            progress("certifying", last / count)
    return concatenate(batches)


def _earlier(content: bytes, path: Path, guarantee: str, count: int) -> Certificates:
    """What is there already of this many certificates."""
    certificates = certificates_of_rows(parse_rows(content, path), guarantee)
    if len(certificates) > count:
        raise ResumeError(
            f"{path} holds {len(certificates)} certificates, more than {count}; "
            "choose another folder"
        )
    return certificates


def _certified(
    certify: CertifyBatch, batch: Batch, indices: range
) -> tuple[int, Tensor, Certificates] | None:
    """The first index, the labels and the certificates of a batch; None if it is empty."""
    if not indices:
        return None
    first = indices.start
    x, label = batch(first, indices.stop)
    return first, label, certify(x, first, label)


def _append(path: Path, written: bytes) -> None:
    """Add to a file, and wait until it is on the disk."""
    with path.open("ab") as file:
        file.write(written)
        file.flush()
        # On the disk before the checksum is: after a power cut it must not cover rows
        # that were never written.
        os.fsync(file.fileno())


def read_certificates(path: str | Path, guarantee: str = "") -> Certificates:
    """The certificates in a CSV file; if there is a checksum beside it, those that it covers."""
    path = Path(path)
    recorded = read_origin(path)
    # Rows behind those that are covered may be half written.
    if "sha256" in recorded:
        content = _covered(path, recorded)
    else:
        content = path.read_bytes()
    return certificates_of_rows(parse_rows(content, path), guarantee)


def check_continues(path: Path, fingerprint: str, origin: str) -> None:
    """Refuse a file of certificates that are not of these weights and this origin, or that were changed."""
    if not path.exists():
        return
    recorded = read_origin(path)
    reason = ""
    if not recorded:
        reason = f"exists, but not {_origin_path(path).name} that says what it holds"
    elif (recorded.get("fingerprint"), recorded.get("origin")) != (fingerprint, origin):
        reason = "holds certificates of other weights or data, or by another method"
    elif "sha256" not in recorded:
        reason = (
            "was written by an earlier version of lipcert, without a "
            "checksum of its rows"
        )
    if reason:
        raise ResumeError(f"{path} {reason}; remove it or choose another folder")
    _covered(path, recorded)


def _begin(path: Path, fingerprint: str, origin: str) -> bytes:
    """What a file to be continued holds, up to where its checksum reaches; the rest is cut off. A new one is made."""
    check_continues(path, fingerprint, origin)
    if path.exists():
        covered = _covered(path, read_origin(path))
        # Appending behind half a row would damage it and the next one.
        os.truncate(path, len(covered))
        return covered
    header = (",".join(HEADER) + "\n").encode()
    # Origin first: a file without one is refused, an origin without a file is begun
    # anew.
    _write_origin(path, fingerprint, origin, 0, hashlib.sha256(header).hexdigest())
    with replace_file(path) as temporary:
        temporary.write_bytes(header)
    return header


def _covered(path: Path, recorded: dict[str, Any]) -> bytes:
    """The header and the rows that the checksum covers. It finds changes, but stops nobody who computes it anew."""
    lines = path.read_bytes().splitlines(keepends=True)
    # The header is a line, too.
    covered = b"".join(lines[: 1 + recorded["rows"]])
    if hashlib.sha256(covered).hexdigest() != recorded["sha256"]:
        raise ResumeError(
            f"{path} was edited or is damaged: its first {recorded['rows']} rows do "
            "not have the checksum in "
            f"{_origin_path(path).name}; remove it and certify again"
        )
    return covered


def _origin_path(path: Path) -> Path:
    return path.with_suffix(".origin.json")


def _write_origin(
    path: Path, fingerprint: str, origin: str, rows: int, sha256: str
) -> None:
    """Write beside a file what its first rows depend on, and the checksum of the file up to their end."""
    recorded: dict[str, str | int] = {"fingerprint": fingerprint, "origin": origin}
    recorded |= {"rows": rows, "sha256": sha256}
    with replace_file(_origin_path(path)) as temporary:
        temporary.write_text(json.dumps(recorded) + "\n")


def read_origin(path: Path) -> dict[str, Any]:
    """What is written beside a file; empty if there is nothing."""
    if not _origin_path(path).exists():
        return {}
    try:
        recorded = json.loads(_origin_path(path).read_text())
    except ValueError:
        recorded = None
    if not isinstance(recorded, dict) or (
        "sha256" in recorded and not isinstance(recorded.get("rows"), int)
    ):
        raise ResumeError(
            f"{_origin_path(path)} is damaged; remove it and {path.name} "
            "and certify again"
        )
    return recorded
