"""The paper's numbers, read from published.toml."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(
        (files("lipcert_experiments") / "published.toml").read_text("utf-8")
    )


def published_rows(label: str) -> list[dict[str, Any]]:
    """The rows of the paper's table with that label, by column; None where the paper gives no number."""
    table = _tables()[label]
    return [
        {
            column: None if value == "" else value
            for column, value in zip(table["columns"], row, strict=True)
        }
        for row in table["rows"]
    ]


def published_row(label: str, **keys: Any) -> dict[str, Any]:
    """The row whose columns have the given values; empty if the paper has none."""
    matching = (
        row
        for row in published_rows(label)
        if all(row[name] == value for name, value in keys.items())
    )
    return next(matching, {})
