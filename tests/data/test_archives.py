"""Files of folders and archives, and what is not an archive."""

from __future__ import annotations

import io
import os
import tarfile
import zipfile
from pathlib import Path

import pytest
from makers import pack

from lipcert.data.archives import is_archive, read_bytes, read_files, source_digest
from lipcert.errors import DataError

FILES = {"a.txt": b"1", "b/c.txt": b"22", "b/d/e.bin": os.urandom(5000)}


def everything(_: str) -> bool:
    return True


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "folder"
    for name, content in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    (root / ".hidden").write_bytes(b"x")
    (root / "b" / "._c.txt").write_bytes(b"x")
    return root


def zipped(folder: Path, archive: Path) -> Path:
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for path in sorted(folder.rglob("*")):
            packed.write(path, path.relative_to(folder))
        packed.writestr("__MACOSX/a.txt", b"x")
    return archive


@pytest.mark.parametrize("form", ["folder", "tar", "tar.gz", "tar.xz", "zip"])
def test_every_form_holds_the_same_files(
    folder: Path, tmp_path: Path, form: str
) -> None:
    source = folder
    if form == "zip":
        source = zipped(folder, tmp_path / "packed.zip")
    elif form != "folder":
        source = pack(folder, tmp_path / f"packed.{form}")
    assert dict(read_files(source, everything)) == FILES
    assert dict(read_files(source, lambda name: name.endswith(".txt"))) == {
        k: FILES[k] for k in ("a.txt", "b/c.txt")
    }
    assert is_archive(source) == (form != "folder")


def test_links_and_paths_that_lead_outside_are_harmless(tmp_path: Path) -> None:
    """Nothing is unpacked, so a path is only a name."""
    archive = tmp_path / "evil.tar"
    with tarfile.open(archive, "w") as tar:
        link = tarfile.TarInfo("link.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
        climbing = tarfile.TarInfo("../../climbing.txt")
        climbing.size = 2
        tar.addfile(climbing, io.BytesIO(b"hi"))
    assert not any(name == "link.txt" for name, _ in read_files(archive, everything))
    assert not (tmp_path.parent.parent / "climbing.txt").exists()


@pytest.mark.parametrize("form", ["tar", "tar.gz", "tar.xz", "zip"])
@pytest.mark.parametrize("part", [0.0, 0.3, 0.9])
def test_truncated_archives(
    folder: Path, tmp_path: Path, form: str, part: float
) -> None:
    archive = tmp_path / f"packed.{form}"
    zipped(folder, archive) if form == "zip" else pack(folder, archive)
    content = archive.read_bytes()
    size = (
        5000 if form == "tar" and part == 0.9 else int(part * len(content))
    )  # tar ends in padding
    archive.write_bytes(content[:size])
    with pytest.raises(
        DataError, match=rf"packed.{form} is truncated or not an archive"
    ):
        list(read_files(archive, everything))


@pytest.mark.parametrize("form", ["tar", "tar.gz", "tar.xz", "zip"])
def test_other_content_under_the_name_of_an_archive(tmp_path: Path, form: str) -> None:
    archive = tmp_path / f"packed.{form}"
    archive.write_bytes(b"<html>404</html>" * 100)
    with pytest.raises(
        DataError, match=rf"packed.{form} is truncated or not an archive"
    ):
        list(read_files(archive, everything))


def test_fingerprints_follow_the_content(folder: Path, tmp_path: Path) -> None:
    first, archive = source_digest(folder), pack(folder, tmp_path / "a.tar")
    assert source_digest(folder) == first
    packed = source_digest(archive)
    (folder / "a.txt").write_bytes(b"longer")
    assert source_digest(folder) != first
    pack(folder, archive)
    assert source_digest(archive) != packed
    (folder / "a.txt").write_bytes(FILES["a.txt"])
    os.utime(folder / "a.txt", ns=(1, 1))
    assert source_digest(folder) != first


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"missing\.bin cannot be read: No such file"):
        read_bytes(tmp_path / "missing.bin")
    assert not is_archive(tmp_path / "missing.tar")
