"""Threads of our own: several pieces of work at a time, each with its part of the cores.

torch's threads spin for a while after every operation, and take the cores from whoever
else has something to do. So they rest while ours work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from threading import Event, Lock
from typing import TypeVar

import torch

from lipcert.progress import Report

T = TypeVar("T")
_threads: ContextVar[int | None] = ContextVar("threads of this work", default=None)


class _Stopped(Exception):
    """Another piece of the work has failed, or somebody has interrupted it."""


def own_threads() -> int:
    """How many threads this piece of work may use: torch's number, or its part of it."""
    return _threads.get() or torch.get_num_threads()


class _Rest:
    """torch's number of threads, while somebody may put it to rest: one number for all who do so at a time."""

    lock = Lock()
    users = 0
    threads = 1


@contextmanager
def torch_restored() -> Iterator[None]:
    """Within, torch may be put to rest; when the last one leaves, it has its threads again."""
    with _Rest.lock:
        if _Rest.users == 0:
            _Rest.threads = torch.get_num_threads()
        _Rest.users += 1
    token = _threads.set(_threads.get() or _Rest.threads)
    try:
        yield
    finally:
        _threads.reset(token)
        with _Rest.lock:
            _Rest.users -= 1
            if _Rest.users == 0:
                torch.set_num_threads(_Rest.threads)


def let_torch_rest() -> None:
    """From now on torch has one thread; only within `torch_restored`."""
    if _threads.get() is not None and torch.get_num_threads() > 1:
        torch.set_num_threads(1)


def side_by_side(tasks: Sequence[Callable[[Report], T]], report: Report) -> list[T]:
    """The results of all tasks, each on a thread of its own, the first one here.

    Each has its part of the threads, and says how far it is; what the first one says is
    reported. They end early if the first one fails or is interrupted.
    """
    stopped = Event()
    each = max(1, own_threads() // len(tasks))

    def listen(fraction: float) -> None:
        if stopped.is_set():
            raise _Stopped

    def begin(task: Callable[[Report], T], heard: Report) -> T:
        _threads.set(each)
        return task(heard)

    with torch_restored(), ThreadPoolExecutor(len(tasks)) as pool:
        torch.set_num_threads(each)
        others = []
        for task in tasks[1:]:
            others.append(pool.submit(copy_context().run, begin, task, listen))
        try:
            first = copy_context().run(begin, tasks[0], report)
        except BaseException:
            stopped.set()
            raise
        return [first, *(other.result() for other in others)]
