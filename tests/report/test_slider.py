"""The chart with the slider: its lines and the numbers behind it."""

import re

import numpy as np
import pytest

from lipcert.report.slider import HEIGHT, LEFT, RIGHT, TOP, WIDTH, slider
from lipcert.runs import read_runs


def points(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"([\d.]+),([\d.]+)", path)]


def height_at(path: str, x: float) -> float:
    """The lowest point of a staircase at or before x."""
    return max(y for place, y in points(path) if place <= x)


def test_lines_show_the_accuracies(finished):
    (run, twin), chart = read_runs([finished]), slider(read_runs([finished]))
    assert [curve.kind for curve in chart.curves] == ["certified", "attacked"] * 2
    assert chart.area == ""
    end = chart.numbers["end"]
    for one, (certified, attacked) in zip(
        (run, twin), (chart.curves[:2], chart.curves[2:]), strict=True
    ):
        for epsilon in np.linspace(0.01, end * 0.99, 23):
            x = LEFT + (WIDTH - LEFT - RIGHT) * epsilon / end
            for curve, accuracy in (
                (certified, one.certified_at),
                (attacked, one.attacked_at),
            ):
                near = [
                    accuracy(epsilon * (1 + step) + step) for step in (-1e-3, 1e-3)
                ]  # paths are rounded
                share = 1 - (height_at(curve.path, x) - TOP) / (HEIGHT - TOP - 36)
                assert min(near) - 2e-3 <= share <= max(near) + 2e-3


def test_lines_fall_and_have_few_points(finished):
    for curve in slider(read_runs([finished])).curves:
        x, y = zip(*points(curve.path), strict=True)
        assert list(x) == sorted(x)
        assert list(y) == sorted(y)
        assert (x[0], x[-1]) == (LEFT, WIDTH - RIGHT)
        assert len(x) <= 20 * WIDTH + 2


def test_numbers_are_those_of_the_files(finished):
    run = read_runs([finished])[0]
    numbers = slider([run]).numbers["runs"][0]
    certificates = run.certificates
    assert numbers["radii"] == sorted(
        certificates.radius[certificates.correct].tolist()
    )
    assert numbers["count"] == len(certificates)
    assert numbers["attacked"] == len(run.distance)
    proved = sum(radius >= 0.25 for radius in numbers["attacked_radii"])
    if numbers["attacked"] < numbers["count"]:
        assert (
            proved / numbers["attacked"]
            <= run.attacked_at(0.25)
            <= numbers["survivors"] / numbers["attacked"]
        )
        assert proved > 0
    left = numbers["survivors"] - sum(
        distance <= 0.25 for distance in numbers["distances"]
    )
    assert left / numbers["attacked"] == pytest.approx(run.attacked_at(0.25))
