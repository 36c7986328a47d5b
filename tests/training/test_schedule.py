"""The paper's learning-rate schedule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lipcert.training.config import ScheduleConfig
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
    factors = [after / before for before, after in zip(rates[decay:], rates[decay + 1 :], strict=False)]
    assert factors == pytest.approx([factors[0]] * more)
