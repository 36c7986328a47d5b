"""Files that are either complete or absent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Write to the temporary path that is yielded; it replaces `path` at the end, or vanishes on an error.

    Its permissions follow the umask, also where a writer such as safetensors makes private files.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        yield temporary
        if temporary.stat().st_mode != mode:
            temporary.chmod(mode)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
