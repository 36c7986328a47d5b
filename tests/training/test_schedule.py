"""The paper's learning-rate schedule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lipcert.training.config_parts import ScheduleConfig
from lipcert.training.schedule import learning_rate


def test_values():
    schedule = ScheduleConfig(lr0=1e-3, lrf=1e-5, decay_epoch=2)
    rates = [learning_rate(schedule, epoch, 6) for epoch in range(6)]
    assert rates == pytest.approx([1e-3, 1e-3, 10**-3.5, 1e-4, 10**-4.5, 1e-5])


@given(st.integers(0, 20), st.integers(1, 30), st.floats(1e-5, 1), st.floats(1e-8, 1))
def test_constant_then_geometric_to_the_final_rate(decay, more, lr0, lrf):
    schedule, epochs = ScheduleConfig(lr0=lr0, lrf=lrf, decay_epoch=decay), decay + more
    rates = [lr0, *(learning_rate(schedule, epoch, epochs) for epoch in range(epochs))]
    assert rates[: decay + 1] == [lr0] * (decay + 1)
    assert rates[-1] == pytest.approx(lrf)
    factors = [
        after / before
        for before, after in zip(rates[decay:], rates[decay + 1 :], strict=False)
    ]
    assert factors == pytest.approx([factors[0]] * more)


def test_the_linear_schedule_warms_up_and_falls_to_zero_step_by_step():
    schedule = ScheduleConfig(decay="linear", lr0=1.0, warmup_steps=4)
    rates = [
        learning_rate(schedule, epoch, 5, step, 10)
        for epoch in range(5)
        for step in range(10)
    ]
    assert rates[:4] == pytest.approx([0.25, 0.5 * 0.98, 0.75 * 0.96, 0.94])
    assert rates[10] == pytest.approx(0.8)
    assert rates[-1] == pytest.approx(0.02)
    late = ScheduleConfig(decay="linear", lr0=1.0, decay_epoch=3)
    assert learning_rate(late, 2, 5, 9, 10) == 1.0
    assert learning_rate(late, 4, 5) == pytest.approx(0.5)
