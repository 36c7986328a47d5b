"""What the machine has, and how its memory is used."""

import resource
import sys

import pytest
import torch

from lipcert.resources import groups_within, reused_memory

PAGES = 16384


def fewest_faults(repeats=16):
    """How often the system had to give a page for a large tensor: the best of some, for others take pages too."""
    fewest = PAGES * 2
    for _ in range(repeats):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(PAGES << 10)  # of 4 bytes, 4,096 to a page
        after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        fewest = min(fewest, after - before)
    return fewest


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_freed_memory_is_used_again_within():
    # Outside there are as many faults as pages, or fewer where the system gives
    # several or huge pages at once: that is the system's affair.
    with reused_memory():
        assert fewest_faults() < PAGES / 100


def test_groups_stay_within_the_memory():
    sizes = {"a": 2, "b": 2, "c": 5, "d": 1, "e": 3, "f": 1}
    assert groups_within(sizes, 4) == [["a", "b"], ["c"], ["d", "e"], ["f"]]
    assert groups_within({}, 4) == []
