"""The two files of a bound: facts and a checksum of everything in .json, numbers in .safetensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lipcert.errors import BoundError
from lipcert.files import replace_file, tensors_digest

_FORMAT = 3


def write_bound(
    path: str | Path, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Write both files, each completely or not at all."""
    base = base_path(path)
    stored = {"format": _FORMAT, **facts}
    stored["checksum"] = checksum(stored, tensors)
    # The checksum of both files is in the one that is written last: a process that is
    # killed in between leaves a pair that does not fit and is refused.
    with replace_file(base.with_name(base.name + ".safetensors")) as temporary:
        save_file(dict(tensors), temporary)
    with replace_file(base.with_name(base.name + ".json")) as temporary:
        temporary.write_text(json.dumps(stored, indent=2) + "\n")


def read_bound(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The facts and the tensors of a bound.

    The checksum finds edits and damage, but stops nobody who computes it anew.
    """
    base = base_path(path)
    facts, tensors = _read_files(base)
    # Asked first: the checksum of another format need not be the one below.
    if facts.get("format") != _FORMAT:
        raise BoundError(
            f"the bound {base} was written by another version of lipcert (format "
            f"{facts.get('format')}, "
            f"expected {_FORMAT}); compute it again with lipcert.bound"
        )
    # The left side is evaluated first, so that the checksum is not part of what it
    # covers.
    if facts.pop("checksum", None) != checksum(facts, tensors):
        raise BoundError(
            f"the bound {base} was edited or is damaged; compute it again "
            "with lipcert.bound"
        )
    return facts, tensors


def _read_files(base: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    facts_file = base.with_name(base.name + ".json")
    numbers_file = base.with_name(base.name + ".safetensors")
    try:
        facts = json.loads(facts_file.read_text())
        if not isinstance(facts, dict):
            raise ValueError("expected a JSON object")
        return facts, load_file(numbers_file)
    except FileNotFoundError as error:
        missing = numbers_file if facts_file.exists() else facts_file
        raise BoundError(
            f"{missing} does not exist; a bound is a .json and a .safetensors file"
        ) from error
    except (
        ValueError,
        RecursionError,
        SafetensorError,
        OSError,
    ) as error:  # ValueError: neither JSON nor text
        raise BoundError(
            f"the bound {base} is damaged ({error}); compute it again "
            "with lipcert.bound"
        ) from error


def checksum(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of all facts and tensors, with their names, types and shapes."""
    # JSON has no tuples, so facts have the same checksum before they are stored and
    # after they were read.
    content = json.dumps(facts, sort_keys=True) + tensors_digest(tensors)
    return hashlib.sha256(content.encode()).hexdigest()


def base_path(path: str | Path) -> Path:
    """The path of a bound without the suffix of one of its files."""
    path = Path(path)
    if path.suffix in (".json", ".safetensors"):
        return path.with_suffix("")
    return path
