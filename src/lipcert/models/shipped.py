"""Trained networks that come with lipcert: run folders, without what only training needs."""

from __future__ import annotations

from pathlib import Path

from lipcert.layout import MODEL

_FOLDER = Path(__file__).parents[1] / "shipped"


def shipped_names() -> list[str]:
    """The names of all of them: those of the presets that they were trained by."""
    return sorted(path.parent.name for path in _FOLDER.glob(f"*/{MODEL}"))


def shipped_folder(name: str) -> Path | None:
    """The folder of one, or None if there is none of this name."""
    # By the list, not by joining paths: a path is no name.
    if name not in shipped_names():
        return None
    return _FOLDER / name
