"""Images decoded once: splits as read from an image folder or an archive, kept in the cache as safetensors."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from lipcert.data.archives import source_digest
from lipcert.data.dataset import Split, content_checksum
from lipcert.errors import DataError
from lipcert.files import replace_file

_LOG = logging.getLogger(__name__)
_VERSION = 1  # of the layout below; a higher one makes older files unused


@dataclass(frozen=True)
class Decoded:
    """Splits by name, the classes their labels count, and the formats of the image files."""

    splits: Mapping[str, Split]
    class_names: tuple[str, ...]
    formats: tuple[str, ...]


def cache_dir() -> Path:
    """The folder of downloaded and decoded data: LIPCERT_CACHE, or ~/.cache/lipcert."""
    configured = os.environ.get("LIPCERT_CACHE") or "~/.cache/lipcert"
    return Path(configured).expanduser()


def cached(source: Path, label: str, decode: Callable[[], Decoded]) -> Decoded:
    """What `decode` returns, from the cache if the source has not changed since it was put there.

    A damaged cache file is replaced. A cache that cannot be written is no failure, only
    slow the next time.
    """
    # The digest of the source is in the name: a changed source has another file, and a
    # stale one is never read.
    path = (
        cache_dir()
        / "decoded"
        / f"{label}-{source_digest(source)[:32]}-{_VERSION}.safetensors"
    )
    decoded = _read(path)
    if decoded is not None:
        return decoded
    decoded = decode()
    try:
        _write(decoded, path)
    except (OSError, SafetensorError) as error:
        _LOG.warning("the decoded images of %s are not cached: %s", source, error)
    return decoded


def _write(decoded: Decoded, path: Path) -> None:
    tensors = {}
    for name, split in decoded.splits.items():
        tensors[f"{name}.images"] = split.images
        tensors[f"{name}.labels"] = split.labels
    metadata = {
        "splits": json.dumps(list(decoded.splits)),
        "class_names": json.dumps(decoded.class_names),
        "formats": json.dumps(decoded.formats),
        "checksum": content_checksum(decoded.splits),
    }
    with replace_file(path) as temporary:
        save_file(tensors, temporary, metadata)


def _read(path: Path) -> Decoded | None:
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            splits = {}
            for name in json.loads(metadata["splits"]):
                splits[name] = Split(
                    file.get_tensor(f"{name}.images"), file.get_tensor(f"{name}.labels")
                )
        # Pixels that were damaged on the disk would otherwise be trained on, and
        # certified.
        if content_checksum(splits) == metadata["checksum"]:
            return Decoded(
                splits,
                tuple(json.loads(metadata["class_names"])),
                tuple(json.loads(metadata["formats"])),
            )
    except (
        OSError,
        SafetensorError,
        DataError,
        KeyError,
        ValueError,
        TypeError,
    ) as error:
        _LOG.debug("%s: %s", path, error)
    _LOG.warning("%s is damaged and will be replaced", path)
    return None
