"""Timing: medians, rounds that continue, the growth of times."""

import pytest

from lipcert_experiments.timing import (
    ALONE,
    INSIDE,
    WHOLE,
    TrainingStep,
    growth,
    rounds,
    side_by_side,
)


def counting(values):
    """A function that returns one value after the other."""
    left = iter(values)
    return lambda: {"seconds": next(left)}


def test_medians_without_the_first_call():
    found = rounds(
        {"a": counting([100.0, 3.0, 1.0, 2.0]), "b": counting([0.0, 5.0, 5.0, 8.0])}, 3
    )
    assert found == {"a": {"seconds": 2.0}, "b": {"seconds": 5.0}}


def test_functions_take_turns():
    calls = []
    side_by_side({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2)
    assert calls == ["a", "b"] * 3


def test_an_interrupted_measurement_continues(tmp_path):
    path = tmp_path / "rounds.json"

    def fail():
        raise KeyboardInterrupt

    interrupted = iter([lambda: 0.0, lambda: 1.0, lambda: 2.0, fail])
    with pytest.raises(KeyboardInterrupt):
        rounds(
            {"a": lambda: {"seconds": next(interrupted)()}}, 3, path, {"commit": "x"}
        )
    assert rounds({"a": counting([0.0, 9.0])}, 3, path, {"commit": "x"}) == {
        "a": {"seconds": 2.0}
    }
    never = {"a": lambda: pytest.fail("measured again")}
    assert rounds(never, 3, path, {"commit": "x"}) == {"a": {"seconds": 2.0}}


@pytest.mark.parametrize(("name", "origin"), [("a", "y"), ("b", "x")])
def test_rounds_of_something_else_do_not_count(tmp_path, name, origin):
    path = tmp_path / "rounds.json"
    rounds({"a": counting([0.0, 1.0])}, 1, path, {"commit": "x"})
    assert rounds({name: counting([0.0, 4.0])}, 1, path, {"commit": origin}) == {
        name: {"seconds": 4.0}
    }


def test_growth_of_a_square():
    fit = growth([1, 2, 3, 4], [1.0, 4.0, 9.0, 16.0])
    assert fit["exponent"] == pytest.approx(2.0)
    assert 0.9 < fit["r2_of_straight_line"] < 1.0


def test_a_training_step_moves_the_weights_and_times_its_parts():
    step = TrainingStep("2C2F", "naive", 1, batch=8)
    before = [parameter.clone() for parameter in step.model.parameters()]
    parts = step()
    assert 0 < parts[INSIDE] < parts[WHOLE]
    assert any(
        (a != b).any() for a, b in zip(before, step.model.parameters(), strict=True)
    )
    assert set(step.alone()) == {ALONE}
    assert set(TrainingStep("2C2F", None, batch=8)()) == {WHOLE}
