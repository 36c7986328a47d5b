"""The paper's run-time figures: constants alone, in training, the whole iteration; naive and LipLT."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lipcert.models import zoo
from lipcert_experiments import pictures
from lipcert_experiments.facts import environment
from lipcert_experiments.results import Cell, Outcome, Row, Table
from lipcert_experiments.tables import Study
from lipcert_experiments.timing import (
    ALONE,
    INSIDE,
    WHOLE,
    Parts,
    TrainingStep,
    depth,
    growth,
    rounds,
)

REPEATS = {"tiny": 1, "hour": 5, "paper": 25}
_BATCHES = {"4C3F": 512, "6C2F": 512, "8C2F": 256}
_TINY_BATCH = 4
_ITERATIONS = {"tiny": 1, "hour": 5, "paper": 5}
Line = tuple[list[float], list[float]]
"""Sizes and milliseconds."""
_METHODS = {"LipLT": "liplt", "naive": "naive"}
_QUANTITIES = (ALONE, INSIDE, WHOLE)


@dataclass(frozen=True)
class Case:
    """A network whose iterations are timed, and where it is on the axis."""

    head: tuple[str, ...]
    network: str
    batch: int
    size: float
    iterations: int
    input_shape: tuple[int, ...] | None = None
    classes: int | None = None
    target: str = "pairwise"

    def step(self, method: str | None) -> TrainingStep:
        return TrainingStep(
            self.network, method, self.iterations, batch=self.batch, input_shape=self.input_shape,
            classes=self.classes, target=self.target,
        )  # fmt: skip


def figure_depth(study: Study) -> Outcome:
    """fig:lipschitzRunTime: the depth family on CIFAR-10's shape, batch 512, 5 power iterations."""
    tiny, iterations = study.plan.budget == "tiny", _ITERATIONS[study.plan.budget]
    names = zoo.DEPTH_FAMILY[::3] if tiny else zoo.DEPTH_FAMILY
    batch = _TINY_BATCH if tiny else 512
    cases = [
        Case((name, str(depth(name))), name, batch, depth(name), iterations)
        for name in names
    ]
    times = _measure(study, cases)
    table = Table(("network", "layers"), _COLUMNS, _rows(cases, times))
    panels = {quantity: _series(cases, times, quantity) for quantity in _QUANTITIES}
    fits = _growth(panels)
    notes = [
        _NOTE,
        f"Batch {batch}, {iterations} power iterations.",
        *_growth_notes(fits, "layers"),
    ]
    return Outcome(
        table,
        notes,
        pictures.run_times(panels, "weight layers", 3),
        {"times": times, "growth": fits},
    )


def figure_iterations(study: Study) -> Outcome:
    """fig:effectOfPowerIteration: the network of each data set, with 1, 2, 5 and 10 power iterations."""
    tiny = study.plan.budget == "tiny"
    counts = (1, 5, 10) if tiny else (1, 2, 5, 10)
    networks = ("4C3F",) if tiny else ("4C3F", "6C2F", "8C2F")
    cases = [
        Case((name, str(k)), name, _TINY_BATCH if tiny else _BATCHES[name], k, k,
             target="last-layer" if name == "8C2F" else "pairwise")
        for name in networks for k in counts
    ]  # fmt: skip
    times = _measure(study, cases)
    table = Table(("network", "iterations"), _COLUMNS, _rows(cases, times))
    panels = {}
    for quantity in _QUANTITIES:
        for method in _METHODS:
            series = {name: _line([case for case in cases if case.network == name], times, method, quantity)
                      for name in networks}  # fmt: skip
            panels[f"{quantity}, {method}"] = series
    # A constant part does not grow with the iterations, so a straight line says more here than a power law.
    fits = {
        title: {
            name: growth(*line)["r2_of_straight_line"] for name, line in series.items()
        }
        for title, series in panels.items()
    }
    notes = [
        _NOTE,
        f"Batches: {_batches(cases)}; 8C2F: LipLT up to the last layer, then its norm.",
    ]
    notes += [f"Straight line, {title}: R² {', '.join(f'{n} {v:.3f}' for n, v in fit.items())}."
              for title, fit in fits.items()]  # fmt: skip
    figure = pictures.run_times(panels, "power iterations", 2)
    return Outcome(table, notes, figure, {"times": times, "r2_of_straight_line": fits})


def figure_input_size(study: Study) -> Outcome:
    """fig:effectOfDataset: 6C2F on the inputs and classes of the three data sets."""
    tiny, iterations = study.plan.budget == "tiny", _ITERATIONS[study.plan.budget]
    shapes = {
        "MNIST": (1, 28, 28, 10, 512),
        "CIFAR-10": (3, 32, 32, 10, 512),
        "Tiny-ImageNet": (3, 64, 64, 200, 256),
    }
    cases = []
    for k, (name, (channels, height, width, classes, batch)) in enumerate(
        shapes.items()
    ):
        shape = (channels, height, width)
        head = (name, f"{channels}×{height}×{width}")
        target = "last-layer" if classes > 10 else "pairwise"
        size = _TINY_BATCH if tiny else batch
        cases.append(
            Case(
                head,
                "6C2F",
                size,
                k,
                iterations,
                input_shape=shape,
                classes=classes,
                target=target,
            )
        )
    times = _measure(study, cases)
    table = Table(("data", "input"), _COLUMNS, _rows(cases, times))
    panels = {quantity: _series(cases, times, quantity) for quantity in _QUANTITIES}
    notes = [_NOTE, f"6C2F, {iterations} power iterations. Batches: {_batches(cases)}. Tiny-ImageNet: 200 classes, "
             "LipLT up to the last layer, then its norm."]  # fmt: skip
    ticks = {case.size: f"{case.head[0]}\n{case.head[1]}" for case in cases}
    figure = pictures.run_times(panels, "", 3, ticks)
    return Outcome(table, notes, figure, {"times": times})


_NOTE = (
    "Milliseconds, medians of rounds in which all take turns, on random inputs. Alone: estimates of the constants "
    "without gradient. Training: the same, differentiable, inside an iteration. Iteration: forward pass, constants, "
    "CRM loss, backward pass, Adam; standard: without constants. The paper shows curves, measured on an A100, and no "
    "numbers."
)
_COLUMNS = (
    *(
        f"{short} {method}"
        for short in ("alone", "training", "iteration")
        for method in _METHODS
    ),
    "iteration standard",
    "alone LipLT/naive",
    "iteration LipLT/standard",
)


def _measure(study: Study, cases: list[Case]) -> dict[str, Parts]:
    """Medians by "head, method", each with its quantities; standard iterations by network and input."""
    functions: dict[str, Callable[[], Parts]] = {}
    for case in cases:
        for method, name in _METHODS.items():
            functions[_key(case, method)] = _all_quantities(case.step(name))
        # A plain iteration has no power iterations, so cases that differ in them only share it.
        functions.setdefault(_standard(case), case.step(None))
    facts = environment()
    origin: Mapping[str, Any] = {
        key: facts[key] for key in ("commit", "hardware", "torch")
    }
    path = study.folder / "measurements.json"
    return rounds(functions, REPEATS[study.plan.budget], path, origin, study.progress)


def _all_quantities(step: TrainingStep) -> Callable[[], Parts]:
    return lambda: {**step.alone(), **step()}


def _key(case: Case, method: str) -> str:
    return ", ".join((*case.head, method))


def _standard(case: Case) -> str:
    shape = case.input_shape or zoo.ZOO[case.network].input_shape
    return f"{case.network} on {'×'.join(map(str, shape))}, standard"


def _rows(cases: list[Case], times: Mapping[str, Parts]) -> list[Row]:
    rows = []
    for case in cases:
        ours = {method: times[_key(case, method)] for method in _METHODS} | {
            "standard": times[_standard(case)]
        }
        values = [
            1e3 * ours[method][quantity]
            for quantity in _QUANTITIES
            for method in _METHODS
        ]
        values.append(1e3 * ours["standard"][WHOLE])
        cells = [Cell(value, digits=1) for value in values]
        cells.append(Cell(ours["LipLT"][ALONE] / ours["naive"][ALONE]))
        cells.append(Cell(ours["LipLT"][WHOLE] / ours["standard"][WHOLE]))
        rows.append(Row(case.head, dict(zip(_COLUMNS, cells, strict=True))))
    return rows


def _line(
    cases: list[Case], times: Mapping[str, Parts], method: str, quantity: str
) -> Line:
    keys = [
        _standard(case) if method == "standard" else _key(case, method)
        for case in cases
    ]
    return [case.size for case in cases], [1e3 * times[key][quantity] for key in keys]


def _series(
    cases: list[Case], times: Mapping[str, Parts], quantity: str
) -> dict[str, Line]:
    methods = [*_METHODS, *(["standard"] if quantity == WHOLE else [])]
    return {method: _line(cases, times, method, quantity) for method in methods}


def _growth(
    panels: Mapping[str, Mapping[str, Line]],
) -> dict[str, dict[str, dict[str, float]]]:
    return {
        title: {name: growth(*line) for name, line in series.items()}
        for title, series in panels.items()
    }


def _growth_notes(
    fits: Mapping[str, Mapping[str, Mapping[str, float]]], size: str
) -> list[str]:
    return [
        f"{title}: " + "; ".join(f"{name} ∝ {size}^{fit['exponent']:.2f}, straight line R² "
                                 f"{fit['r2_of_straight_line']:.3f}" for name, fit in series.items()) + "."
        for title, series in fits.items()
    ]  # fmt: skip


def _batches(cases: list[Case]) -> str:
    return ", ".join(
        f"{name} {batch}"
        for name, batch in {case.head[0]: case.batch for case in cases}.items()
    )
