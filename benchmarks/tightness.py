"""How tight the bounds are: against each other, LipSDP, ECLipsE-Fast and the steepest slopes found."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Group, RenderableType
from torch import Tensor, nn

import lipcert
from benchmarks.eclipse import check_eclipse, eclipse_fast
from benchmarks.measure import RESULTS
from benchmarks.mlps import random_mlp, trained_mlp, weights
from benchmarks.tightness_tables import (
    Figures,
    convolutional_table,
    draw,
    geometric_mean,
    random_tables,
    trained_tables,
)
from lipcert.bounds.fit import FitOptions, fit_scales
from lipcert.bounds.semidefinite import lipsdp_constants
from lipcert.data import Dataset
from lipcert.errors import DataError
from lipcert.models import load_model

SEEDS = {2: 3, 5: 3, 10: 3, 20: 3, 50: 1}  # by depth: how many networks
SDP_DEPTHS = (2, 5)
LIMITS = {5: 0.85, 10: 0.70, 20: 0.50}  # of rescaled/LipLT, for every network
TRAINED = ((60, 60), (100, 100), (200, 200), (100, 100, 100, 100))
NEAR = {"network": 1.15, "pair": 1.35}  # of rescaled/LipSDP-neuron
MUST = TRAINED[:2]
PAIR = (3, 5)
CVXPY_SECONDS = 200
CONV_FIT = FitOptions(steps=30)

Shape = tuple[int, ...]


def compare(repeats: int, models: Sequence[str] = ()) -> tuple[Figures, RenderableType]:
    """Random MLPs, trained MLPs and convolutional networks; `repeats` limits the random networks of each depth."""
    random = _random_networks(repeats)
    trained: list[Figures] = []
    shown: list[RenderableType]
    try:
        data = lipcert.data.load("mnist", download=False)
    except DataError as error:
        shown = [f"Trained MLPs were left out: {error}"]
    else:
        trained = _trained_networks(data)
        shown = [*trained_tables(trained, PAIR)]
    conv = _convolutional(models)
    draw(random["networks"], RESULTS / "tightness.png")
    tables = Group(*random_tables(random), *shown, convolutional_table(conv))
    return {"random": random, "trained": trained, "convolutional": conv}, tables


def _measure(
    row: Figures, methods: Mapping[str, Callable[[], float | Tensor]]
) -> Figures:
    """The row with the value of each method, and the seconds it took."""
    row["seconds"] = {}
    for name, method in methods.items():
        began = time.perf_counter()
        row[name] = float(method())
        row["seconds"][name] = time.perf_counter() - began
    return row


def _random_networks(repeats: int) -> Figures:
    eclipse = check_eclipse()
    networks: list[Figures] = []
    for depth, count in SEEDS.items():
        for seed in range(min(count, repeats)):
            model = random_mlp(depth, seed)
            methods: dict[str, Callable[[], float | Tensor]] = {
                method: partial(_bound, model, (4,), "network", method)
                for method in ("naive", "liplt", "rescaled")
            }
            methods["eclipse_fast"] = partial(eclipse_fast, weights(model))
            if depth in SDP_DEPTHS:
                methods["lipsdp"] = partial(_lipsdp, model, (4,), "network")
            methods["sampled"] = partial(_slope, model, (4,), "network")
            networks.append(_measure({"depth": depth, "seed": seed}, methods))
    verdicts = []
    for depth, limit in LIMITS.items():
        ratios = [
            row["rescaled"] / row["liplt"] for row in networks if row["depth"] == depth
        ]
        verdicts.append(
            _verdict(f"rescaled/liplt ≤ {limit:.2f} at {depth} layers", ratios, limit)
        )
    ratios = [row["rescaled"] / row["eclipse_fast"] for row in networks]
    verdicts.append(_verdict("rescaled below ECLipsE-Fast", ratios, 1.0))
    return {"networks": networks, "requirements": verdicts, "eclipse": eclipse}


def _verdict(requirement: str, ratios: Sequence[float], limit: float) -> Figures:
    return {"requirement": requirement, "limit": limit, "worst": max(ratios),
            "geometric_mean": geometric_mean(ratios), "passed": max(ratios) <= limit}  # fmt: skip


def _trained_networks(data: Dataset) -> list[Figures]:
    rows: list[Figures] = []
    shape = data.input_shape
    for hidden in TRAINED:
        model = trained_mlp(hidden, data)
        name = "-".join(map(str, (784, *hidden, 10)))
        with torch.no_grad():
            accuracy = float(
                (model(data.test.pixels()).argmax(1) == data.test.labels)
                .double()
                .mean()
            )
        for what in ("network", "pair"):
            methods: dict[str, Callable[[], float | Tensor]] = {
                method: partial(_bound, model, shape, what, method)
                for method in ("naive", "liplt", "rescaled")
            }
            methods["lipsdp"] = partial(_lipsdp, model, shape, what)
            methods["sampled"] = partial(_slope, model, shape, what)
            row = _measure(
                {"network": name, "constant": what, "accuracy": accuracy}, methods
            )
            row["ratio"], row["limit"] = (
                row["rescaled"] / row["lipsdp"],
                NEAR[what] if hidden in MUST else None,
            )
            row["passed"] = (
                None if row["limit"] is None else row["ratio"] <= row["limit"]
            )
            if hidden == TRAINED[0] and what == "network":
                row["cvxpy"] = _in_time(model, shape, what)
            rows.append(row)
    return rows


def _bound(model: nn.Module, shape: Shape, what: str, method: str) -> Tensor:
    """The constant of the network or of the pair of classes, guaranteed."""
    if what == "network":
        return lipcert.bound(model, shape, method, "network").value
    fit = FitOptions(pair=PAIR) if method == "rescaled" else None
    return lipcert.bound(model, shape, method, "pairwise", fit=fit).value[PAIR]


def _slope(model: nn.Module, shape: Shape, what: str) -> Tensor:
    """The steepest slope found of the network or of the difference between the two classes."""
    if what == "network":
        return lipcert.estimate_sampled(model, shape)
    return lipcert.estimate_sampled(model, shape, "pairwise")[PAIR]


def _lipsdp(
    model: nn.Module, shape: Shape, what: str, solver: str = "barrier"
) -> float:
    """LipSDP-neuron for the network or for the pair of classes."""
    network = lipcert.trace(copy.deepcopy(model).double(), shape)
    if what == "network":
        return float(lipsdp_constants(network, solver=solver))
    return float(
        lipsdp_constants(network, "pairwise", pairs=[PAIR], solver=solver)[PAIR]
    )


def _in_time(model: nn.Module, shape: Shape, what: str) -> Figures:
    """LipSDP by cvxpy in a process of its own, ended after a while."""
    context = get_context("spawn")
    queue: Any = context.Queue()
    process = context.Process(target=_solve, args=(queue, model, shape, what))
    process.start()
    queue.get(timeout=CVXPY_SECONDS)  # its imports are done
    began = time.perf_counter()
    process.join(CVXPY_SECONDS)
    seconds, finished = time.perf_counter() - began, not process.is_alive()
    if not finished:
        process.terminate()
        process.join()
    finished = finished and process.exitcode == 0
    return {
        "seconds": seconds,
        "finished": finished,
        "value": queue.get() if finished else None,
    }


def _solve(queue: Any, model: nn.Module, shape: Shape, what: str) -> None:
    import cvxpy  # noqa: F401

    queue.put("ready")
    queue.put(_lipsdp(model, shape, what, "cvxpy"))


def _convolutional(models: Sequence[str]) -> list[Figures]:
    candidates = [(Path(name).name, "given", load_model(name)) for name in models]
    if not candidates:
        candidates = [
            (name, "untrained", load_model(name)) for name in ("4C3F", "6C2F")
        ]
    rows: list[Figures] = []
    for name, origin, loaded in candidates:
        row: Figures = {"network": name, "weights": origin, "guarantee": "estimate", "fit_steps": CONV_FIT.steps,
                        "input_shape": loaded.input_shape}  # fmt: skip
        methods = {method: partial(_estimate, loaded.model, loaded.input_shape, method)
                   for method in ("naive", "liplt", "rescaled")}  # fmt: skip
        rows.append(_measure(row, methods))
    return rows


def _estimate(model: nn.Module, shape: Shape, method: str) -> float:
    estimator = lipcert.Estimator(
        model.requires_grad_(False), shape, method, power_iterations=40
    )
    if method == "rescaled":
        return fit_scales(estimator, CONV_FIT)
    value = estimator()
    return float(value.sum()) / (len(value) * (len(value) - 1))
