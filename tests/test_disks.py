"""Disks that are full or cannot be written: one sentence that names the file, and nothing half-written."""

import errno
import resource
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import lipcert
from lipcert import cli
from lipcert.files import replace_file, write_text

TRAIN = (
    "train", "digits", "--set", "model=mlp-64", "--set", "epochs=1", "--set", "compare_standard=false", "--quiet",
    "--run-dir",
)  # fmt: skip


@contextmanager
def files_up_to(size):
    """No file may become larger: writing fails in the middle of one, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fails(monkeypatch, capsys, *arguments):
    """What a command says that ends with 2."""
    monkeypatch.setattr(sys, "argv", ["lipcert", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("writer", ["safetensors", "text"])
def test_a_file_that_cannot_be_completed_is_absent_and_named(writer, tmp_path):
    path = tmp_path / "large"
    write_text(path, "before")
    with files_up_to(2000), pytest.raises(OSError, match="File too large") as failure:  # noqa: PT012, SIM117
        with replace_file(path) as temporary:
            if writer == "text":
                temporary.write_text("x" * 10_000)
            else:
                save_file({"x": torch.zeros(10_000)}, temporary)
    assert failure.value.errno == errno.EFBIG
    assert failure.value.filename == str(path)
    assert [file.name for file in tmp_path.iterdir()] == ["large"]
    assert path.read_text() == "before"


def test_folders_that_cannot_be_made(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    assert "error: /proc/run: No such file or directory; choose" in fails(
        monkeypatch, capsys, *TRAIN, "/proc/run"
    )
    with (
        pytest.raises(OSError, match=r"No such file or directory: '/proc/net.onnx'"),
        replace_file(Path("/proc/net.onnx")),
    ):
        pass


def test_a_disk_that_is_read_only(monkeypatch, capsys, tmp_path):
    def refuse(path, *_, **__):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(Path, "mkdir", refuse)
    said = fails(monkeypatch, capsys, *TRAIN, tmp_path / "run")
    assert "Read-only file system; choose another place, or make room there" in said
    assert not list(tmp_path.iterdir())


def test_a_training_on_a_full_disk_can_be_continued(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("COLUMNS", "200")
    folder = tmp_path / "run"
    with files_up_to(5000):
        said = fails(monkeypatch, capsys, *TRAIN, folder)
    assert said.count("\n") == 1
    assert (
        "checkpoint.safetensors: File too large; choose another place, or make room there"
        in said
    )
    assert {file.name for file in folder.iterdir()} <= {
        "config.toml",
        "environment.json",
        "metrics.jsonl",
        ".lock",
    }
    assert lipcert.resume(folder).summary.epochs == 1
