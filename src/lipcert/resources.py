"""What the machine has: memory that may be used, and products of bfloat16 numbers."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import torch

T = TypeVar("T")
_SHARE = 0.6
_MOST = 2 << 30
_UNKNOWN = 1 << 30
# Options of glibc's mallopt, and what they are unless somebody changes them.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_DEFAULTS = {_TRIM_THRESHOLD: 128 << 10, _MMAP_MAX: 65536}
_REUSED = {_TRIM_THRESHOLD: (1 << 31) - 1, _MMAP_MAX: 0}


def free_memory() -> int:
    """Bytes that are available, without what the limits of the process leave out; a guess where nobody tells."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        # Given in KiB. Unlike MemFree, it counts caches that the system would give up.
        free = int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        free = _guess()
    return min(free, _left_by_limits())


def usable_memory() -> int:
    """60 % of what is free, at most 2 GiB: more makes nothing faster."""
    return max(1, min(int(_SHARE * free_memory()), _MOST))


def share_of_memory(device: torch.device) -> int:
    """60 % of what is free on a device."""
    free = (
        torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
    )
    return max(1, int(_SHARE * free))


def groups_within(sizes: Mapping[T, int], memory: int) -> list[list[T]]:
    """Consecutive groups whose sizes stay within the memory; what is larger has a group of its own.

    Sizes of 2, 2, 5 and 1 in a memory of 4 are the groups [2, 2], [5], [1].
    """
    groups: list[list[T]] = []
    room = 0
    for name, size in sizes.items():
        if not groups or size > room:
            groups.append([])
            room = memory
        groups[-1].append(name)
        room -= size
    return groups


@contextmanager
def reused_memory() -> Iterator[None]:
    """Within, what is freed stays with the process (glibc only; elsewhere nothing changes).

    Tensors of many megabytes are otherwise taken from the system and given back at every
    operation, and the system clears each page again: a quarter of a step of `cifar10-hour`.
    """
    _set_malloc(_REUSED)
    try:
        yield
    finally:
        _set_malloc(_DEFAULTS)


def _set_malloc(options: dict[int, int]) -> None:
    """Options of the allocator, where there is one that takes them."""
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    # Other C libraries of Linux do not have it.
    if not hasattr(library, "mallopt"):
        return
    for option, value in options.items():
        library.mallopt(option, value)
    # What has been kept goes back to the system.
    library.malloc_trim(0)


def shown_bytes(size: float) -> str:
    """A size for people: "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"


@cache
def bfloat16_works() -> bool:
    """Whether this processor multiplies bfloat16 matrices; some say so, and end the process instead."""
    # In a process of its own: an illegal instruction ends it, and no exception can be
    # caught.
    trial = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"
    return (
        subprocess.run(
            [sys.executable, "-c", trial], capture_output=True, check=False
        ).returncode
        == 0
    )


def _guess() -> int:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return _UNKNOWN


def _left_by_limits() -> int:
    """What the limit on the address space of the process leaves."""
    try:
        import resource

        # A limit on addresses, not on memory: what is only reserved counts too.
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit == resource.RLIM_INFINITY:
            return 1 << 60
        with open("/proc/self/statm", encoding="ascii") as file:
            # The first number is the size of the address space, in pages.
            used = int(file.read().split()[0]) * resource.getpagesize()
    except (ImportError, OSError, ValueError):
        return 1 << 60
    return max(0, limit - used)
