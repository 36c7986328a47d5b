"""Several processes that share the work of a command under `torchrun`: who this is, and how results come together.

torch is imported where it is needed: commands ask who they are before.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

K = TypeVar("K")
T = TypeVar("T")
# Set within `sharing_work`. Whoever asks outside of it is alone, even under torchrun.
_state = {"sharing": False}


def launched() -> int:
    """How many processes were started together; 1 without `torchrun`."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_process() -> bool:
    """Whether this process is the one that shows and writes."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def sharing_work(wanted: bool = True) -> Iterator[None]:
    """Within, the processes of `torchrun` divide work among them, if wanted; all of them have to do the same calls."""
    # Within another sharing_work there is nothing to set up, and nothing to end.
    if launched() == 1 or _state["sharing"] or not wanted:
        yield
        return
    from torch import distributed as dist

    own_group = not dist.is_initialized()
    if own_group:
        # Results are Python objects in the memory of processors, whatever device
        # computes them.
        dist.init_process_group("gloo")
    _state["sharing"] = True
    try:
        yield
    finally:
        _state["sharing"] = False
        if own_group:
            dist.destroy_process_group()


def process_count() -> int:
    """How many processes share the work."""
    if not _state["sharing"]:
        return 1
    from torch.distributed import get_world_size

    return get_world_size()


def process_rank() -> int:
    """Which of them this is."""
    if not _state["sharing"]:
        return 0
    from torch.distributed import get_rank

    return get_rank()


def gathered(value: T) -> list[T]:
    """The values of all processes, in their order, for each of them."""
    if not _state["sharing"]:
        return [value]
    from torch.distributed import all_gather_object

    values: list[Any] = [None] * process_count()
    all_gather_object(values, value)
    return values


def of_first(value: T) -> T:
    """The value of the first process, for each of them; they wait for each other."""
    return gathered(value)[0]


def own_share(work: Mapping[K, float]) -> list[K]:
    """The items of this process, in their order: the largest are dealt out first, each to whom has least."""
    # Every process deals out all items in the same way, so that nobody has to be asked
    # who does what.
    loads = [0.0] * process_count()
    own = set()
    for item in sorted(work, key=lambda item: -work[item]):
        least = loads.index(min(loads))
        loads[least] += work[item]
        if least == process_rank():
            own.add(item)
    return [item for item in work if item in own]
