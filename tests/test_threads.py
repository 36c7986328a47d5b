"""Threads of our own: each task has its part of the cores, and torch gets its threads back."""

import time
from threading import Event

import pytest
import torch

from lipcert.threads import let_torch_rest, own_threads, side_by_side, torch_restored


@pytest.fixture
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_each_task_has_its_part_of_the_threads(four_threads):
    seen = []

    def task(report):
        seen.append((own_threads(), torch.get_num_threads()))
        report(1.0)
        return len(seen)

    heard = []
    assert sorted(side_by_side([task, task], heard.append)) == [1, 2]
    assert seen == [(2, 2), (2, 2)]
    # Only the first one is heard.
    assert heard == [1.0]
    assert (own_threads(), torch.get_num_threads()) == (4, 4)


def test_torch_rests_only_where_it_is_woken_again(four_threads):
    let_torch_rest()
    assert torch.get_num_threads() == 4
    with torch_restored():
        let_torch_rest()
        assert torch.get_num_threads() == 1
        assert own_threads() == 4
    assert torch.get_num_threads() == 4


def test_torch_has_its_threads_again_when_the_last_one_leaves(four_threads):
    """Bounds of two threads at a time: the second one comes when torch rests already."""
    first, second = torch_restored(), torch_restored()
    first.__enter__()
    let_torch_rest()
    second.__enter__()
    assert own_threads() == 4
    second.__exit__(None, None, None)
    assert torch.get_num_threads() == 1
    first.__exit__(None, None, None)
    assert torch.get_num_threads() == 4


def test_the_others_end_when_the_first_is_interrupted():
    running, rounds = Event(), []

    def interrupted(report):
        running.wait(60)
        raise KeyboardInterrupt

    def endless(report):
        while True:
            rounds.append(None)
            running.set()
            time.sleep(0.001)
            report(0.0)

    with pytest.raises(KeyboardInterrupt):
        side_by_side([interrupted, endless], lambda fraction: None)
    done = len(rounds)
    time.sleep(0.05)
    assert len(rounds) == done


def test_what_goes_wrong_elsewhere_is_said():
    def fails(report):
        raise ValueError("here")

    with pytest.raises(ValueError, match="here"):
        side_by_side([lambda report: None, fails], lambda fraction: None)
