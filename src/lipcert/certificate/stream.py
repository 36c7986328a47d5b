"""Certificates of a whole data set as a CSV file that grows row by row and can be continued."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable
from math import isnan
from pathlib import Path

import torch
from torch import Tensor

from lipcert.certificate.certificates import Certificates, concatenate
from lipcert.certificate.certify import Certifier
from lipcert.errors import ResumeError
from lipcert.files import replace_file
from lipcert.norms.certified import Progress, no_progress

HEADER = ("idx", "label", "prediction", "margin", "radius")
Batch = Callable[[int, int], tuple[Tensor, Tensor]]
"""Inputs and labels from one index up to another."""


def certify_to_csv(
    certifier: Certifier,
    batch: Batch,
    count: int,
    path: str | Path,
    *,
    origin: str,
    batch_size: int = 256,
    inspect: Callable[[int, Tensor, Certificates], None] = lambda first, x, certificates: None,
    progress: Progress = no_progress,
) -> Certificates:
    """Certify inputs 0..count−1, one flushed CSV row each; rows that are there already are kept, not computed again.

    `origin` says what the rows depend on besides the weights (the data set and its checksum, the method of the bound).
    It is written beside the file, and a file of another origin is refused. `inspect` sees every new batch before its
    rows are written.
    """
    path = Path(path)
    rows = _existing_rows(path, certifier.bound.facts.fingerprint, origin)
    if len(rows) > count:
        raise ResumeError(f"{path} holds {len(rows)} certificates, more than {count}; choose another folder")
    parts = [_from_rows(rows, certifier.bound.guarantee)] if rows else []
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        for first in range(len(rows), count, batch_size):
            x, label = batch(first, min(count, first + batch_size))
            part = certifier.certify(x, first, label)
            inspect(first, x, part)
            for k in range(len(part)):
                values = (
                    first + k,
                    int(label[k]),
                    int(part.prediction[k]),
                    float(part.margin[k]),
                    float(part.radius[k]),
                )
                writer.writerow(values)
            file.flush()
            os.fsync(file.fileno())
            parts.append(part)
            progress("certifying", min(count, first + batch_size) / count)
    return concatenate(parts)


def read_certificates(path: str | Path, guarantee: str = "") -> Certificates:
    """The certificates in a CSV file."""
    return _from_rows(_parse(Path(path).read_text()), guarantee)


def check_continues(path: Path, fingerprint: str, origin: str) -> None:
    """Refuse a file of certificates that are not of these weights and this origin."""
    mark = path.with_suffix(".origin.json")
    if path.exists() and not mark.exists():
        raise ResumeError(
            f"{path} exists, but not {mark.name} that says what it holds; remove it or choose another folder"
        )
    if path.exists() and _read_origin(mark) != _origin(fingerprint, origin):
        raise ResumeError(
            f"{path} holds certificates of other weights or data, or by another method; remove it or choose another "
            "folder"
        )


def _existing_rows(path: Path, fingerprint: str, origin: str) -> list[list[str]]:
    """The complete rows of a file to be continued; a half-written last row is cut off. A new file gets its header."""
    check_continues(path, fingerprint, origin)
    if path.exists():
        text = path.read_text()
        complete = text[: text.rfind("\n") + 1]
        rows = _parse(complete)
        if complete != text:
            with replace_file(path) as temporary:
                temporary.write_text(complete)
        return rows
    with replace_file(path.with_suffix(".origin.json")) as temporary:
        temporary.write_text(json.dumps(_origin(fingerprint, origin)) + "\n")
    with replace_file(path) as temporary:
        temporary.write_text(",".join(HEADER) + "\n")
    return []


def _origin(fingerprint: str, origin: str) -> dict[str, str]:
    return {"fingerprint": fingerprint, "origin": origin}


def _read_origin(mark: Path) -> object:
    try:
        return json.loads(mark.read_text())
    except ValueError:
        return None


def _parse(text: str) -> list[list[str]]:
    header, *rows = list(csv.reader(text.splitlines())) or [[]]
    if tuple(header) != HEADER or not all(_is_row(row, k) for k, row in enumerate(rows)):
        raise ResumeError(
            f"the certificates file is damaged: expected the columns {', '.join(HEADER)} and rows 0, 1, 2, …"
        )
    return rows


def _is_row(row: list[str], index: int) -> bool:
    try:
        return len(row) == len(HEADER) and int(row[0]) == index and not any(isnan(float(value)) for value in row[1:])
    except ValueError:
        return False


def _from_rows(rows: list[list[str]], guarantee: str) -> Certificates:
    columns = list(zip(*rows, strict=True)) or [()] * len(HEADER)
    label, prediction = (torch.tensor([int(v) for v in columns[k]], dtype=torch.long) for k in (1, 2))
    margin, radius = (torch.tensor([float(v) for v in columns[k]], dtype=torch.float64) for k in (3, 4))
    return Certificates(prediction, margin, radius, guarantee, label)
