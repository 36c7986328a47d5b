"""Certificates as the rows of a CSV file."""

from __future__ import annotations

import csv
from math import isfinite
from pathlib import Path

import torch
from torch import Tensor

from lipcert.certificate.certificates import Certificates
from lipcert.errors import ResumeError

HEADER = ("idx", "label", "prediction", "margin", "radius")


def parse_rows(content: bytes, path: Path) -> list[list[str]]:
    """The rows below the header; anything but certificates is refused."""
    # An empty file has no lines, but needs a header to be compared.
    header, *rows = [*csv.reader(content.decode(errors="replace").splitlines())] or [[]]
    if tuple(header) != HEADER or not all(map(_is_row, rows, range(len(rows)))):
        raise ResumeError(
            f"{path} is damaged: expected the columns {', '.join(HEADER)}, rows 0, "
            "1, 2, …, classes from 0 on, and "
            "finite margins and radii that are not negative; remove it "
            "and certify again"
        )
    return rows


def _is_row(row: list[str], index: int) -> bool:
    try:
        place, label, prediction = map(int, row[:3])
        margin, radius = map(float, row[3:])
    except ValueError:
        return False
    # Rows are numbered without gaps, so that the number of rows says where to go on.
    # torch counts in 64 bits.
    if place != index or min(label, prediction) < 0 or max(label, prediction) >= 2**63:
        return False
    return isfinite(margin) and isfinite(radius) and min(margin, radius) >= 0


def rows_of_certificates(
    first: int, label: Tensor, certificates: Certificates
) -> bytes:
    """Certificates as lines of the file; `first` is the index of their first input."""
    text = ""
    prediction, margin = certificates.prediction, certificates.margin
    radius = certificates.radius
    for k in range(len(certificates)):
        # repr gives the shortest text that reads back as the same float64: radii
        # survive the file bit for bit.
        text += f"{first + k},{int(label[k])},{int(prediction[k])},{float(margin[k])!r},{float(radius[k])!r}\n"
    return text.encode()


def certificates_of_rows(rows: list[list[str]], guarantee: str) -> Certificates:
    """The certificates that were written."""
    # A file with a header alone has five empty columns.
    columns = list(zip(*rows, strict=True)) or [()] * len(HEADER)
    classes = [[*map(int, column)] for column in columns[1:3]]
    label, prediction = torch.tensor(classes, dtype=torch.long)
    numbers = [[*map(float, column)] for column in columns[3:]]
    margin, radius = torch.tensor(numbers, dtype=torch.float64)
    return Certificates(prediction, margin, radius, guarantee, label)
