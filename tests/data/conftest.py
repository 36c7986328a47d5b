"""Data tests never use the network, nor the user's data and cache; those marked `data` read LIPCERT_DATA_DIR."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def isolated(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    session_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own cache for every test, and downloads from file addresses only."""
    needs_data = request.node.get_closest_marker("data") is not None
    if needs_data and not os.environ.get("LIPCERT_DATA_DIR"):
        pytest.skip(
            "needs real data: set LIPCERT_DATA_DIR to a folder with mnist, cifar10-jpeg and tiny-imagenet"
        )
    if not needs_data:
        monkeypatch.delenv("LIPCERT_DATA_DIR", raising=False)
    monkeypatch.setenv(
        "LIPCERT_CACHE", str(session_cache if needs_data else tmp_path / "cache")
    )
    urlopen: Callable[..., object] = urllib.request.urlopen

    def only_files(url: str, **options: object) -> object:
        if not url.startswith("file:"):
            raise OSError("no network in tests")
        return urlopen(url, **options)

    monkeypatch.setattr(urllib.request, "urlopen", only_files)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """The cache folder of the test."""
    return tmp_path / "cache"
