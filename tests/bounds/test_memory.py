"""Under a hard limit of the address space, a bound is computed or refused with a forecast; the process never dies."""

import subprocess
import sys

import pytest
import torch

import lipcert
from lipcert.bounds import output_rows
from lipcert.errors import TooLargeError
from models import dense_chain

SCRIPT = """
import resource
import torch
from torch import nn
import lipcert

def bound(size, channels):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, channels, 3, 2, 1), nn.ReLU(), nn.Conv2d(channels, channels, 3, 2, 1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * (size // 4) ** 2, 4)).eval()
    options = lipcert.NormOptions(dense_limit=512, inflation=0.02)
    return lipcert.bound(model, (3, size, size), options=options)

bound(32, 2)  # everything is imported now
for mebibytes in (150, 900):
    pages = int(open("/proc/self/statm").read().split()[0])
    limit = pages * resource.getpagesize() + mebibytes * 2**20
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    try:
        print(bound(256, 16).inflation)
    except lipcert.LipcertError as error:
        print(type(error).__name__, " ".join(str(error).split()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and limits")
def test_a_limit_on_the_address_space():
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    little, enough = done.stdout.splitlines()
    assert little.startswith("TooLargeError"), done.stdout
    assert "MiB may be used" in little
    assert "about 0:0" in little  # how long it would take with more
    assert enough.startswith("0."), done.stdout


def test_rows_that_do_not_fit_are_refused_before_any_work(monkeypatch):
    monkeypatch.setattr(output_rows, "share_of_memory", lambda device: 1000)
    model = dense_chain(5, 8, 6)
    with pytest.raises(
        TooLargeError,
        match=r"rows of 6 logits take about 1.5 KiB, 1e\+03 B may be used; bound the",
    ):
        lipcert.bound(model, (5,))
    assert torch.isfinite(lipcert.bound(model, (5,), target="network").value)
