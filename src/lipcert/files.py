"""Files that are either complete or absent, and what finds out whether their contents were changed."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Write to the temporary path that is yielded; it replaces `path` at the end, or vanishes on an error.

    Its permissions follow the umask, also where a writer such as safetensors makes
    private files. A disk that is full or read-only is an OSError that names `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, so on the same disk: os.replace is atomic there, and readers
    # see the old file or the new one.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # An empty file of ours has the permissions that the umask gives; they are
        # restored after the writer.
        temporary.touch()
        mode = temporary.stat().st_mode
        yield temporary
        if temporary.stat().st_mode != mode:
            temporary.chmod(mode)
        os.replace(temporary, path)
    except OSError as error:
        # Users know `path`, and nothing of the temporary file.
        if error.errno is not None and error.filename in (None, str(temporary)):
            error.filename = str(path)
        raise
    except SafetensorError as error:  # as safetensors says that a disk is full
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """A text file, complete or absent."""
    with replace_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, values: Any) -> None:
    """A JSON file, complete or absent."""
    write_text(path, json.dumps(values, indent=2, ensure_ascii=False) + "\n")


def leftovers(folder: Path) -> list[Path]:
    """What processes that were killed while they wrote into a folder left: our temporary files, and safetensors'."""
    return [*folder.glob(".*.[0-9]*.tmp"), *folder.glob(".tmp??????")]


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of tensors on the CPU: their names, types, shapes and bytes."""
    digest = hashlib.sha256()
    # Shapes and types are part of it: the same bytes may be a float32 tensor or an
    # int32 one, a row or a column.
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
