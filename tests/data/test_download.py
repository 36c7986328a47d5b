"""Downloads: checked, whole or absent, from the first address that works."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from lipcert.data.download import Remote, fetch
from lipcert.errors import DataError

CONTENT = b"a data set" * 1000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def good(tmp_path: Path) -> str:
    """The address of the file as it should be."""
    (tmp_path / "remote.gz").write_bytes(CONTENT)
    return (tmp_path / "remote.gz").as_uri()


@pytest.fixture
def bad(tmp_path: Path) -> str:
    """The address of a truncated file."""
    (tmp_path / "truncated.gz").write_bytes(CONTENT[:-1])
    return (tmp_path / "truncated.gz").as_uri()


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_file_is_in_place(good: str, tmp_path: Path) -> None:
    path = fetch(Remote("data.gz", SHA256, (good,)), tmp_path / "new" / "folder")
    assert path == tmp_path / "new" / "folder" / "data.gz"
    assert path.read_bytes() == CONTENT
    assert files(path.parent) == ["data.gz"]


def test_other_addresses_are_tried(good: str, bad: str, tmp_path: Path) -> None:
    missing = (tmp_path / "nothing").as_uri()
    path = fetch(Remote("data.gz", SHA256, (missing, bad, good)), tmp_path / "target")
    assert path.read_bytes() == CONTENT


def test_a_file_that_is_there_is_not_fetched_again(tmp_path: Path) -> None:
    (tmp_path / "data.gz").write_bytes(CONTENT)
    assert fetch(Remote("data.gz", SHA256, ()), tmp_path) == tmp_path / "data.gz"


def test_a_damaged_file_is_fetched_again(good: str, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "data.gz").write_bytes(b"damaged")
    assert fetch(Remote("data.gz", SHA256, (good,)), target).read_bytes() == CONTENT


def test_a_wrong_checksum_leaves_nothing_behind(bad: str, tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match=rf"data.gz could not be downloaded .*SHA-256 is \w+, expected {SHA256}",
    ):
        fetch(Remote("data.gz", SHA256, (bad,)), tmp_path / "target")
    assert files(tmp_path / "target") == []


def test_every_failure_is_named(tmp_path: Path) -> None:
    urls = ("https://example.invalid/data.gz", (tmp_path / "nothing").as_uri())
    with pytest.raises(
        DataError,
        match=r"example.invalid/data.gz: no network in tests; file://.*/nothing: ",
    ):
        fetch(Remote("data.gz", SHA256, urls), tmp_path / "target")
    assert files(tmp_path / "target") == []


def test_a_folder_that_cannot_be_made(good: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match=r"data.gz could not be downloaded .*file"):
        fetch(Remote("data.gz", SHA256, (good,)), tmp_path / "file" / "folder")
