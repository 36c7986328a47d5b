"""How tight the bounds are: against each other, LipSDP, ECLipsE-Fast and the steepest slopes found."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from math import exp, log
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Group, RenderableType
from rich.table import Table
from torch import Tensor, nn

import lipcert
from benchmarks.measure import RESULTS
from lipcert.bounds.lipsdp import lipsdp_constants
from lipcert.bounds.scales import FitOptions, fit_scales
from lipcert.errors import DataError
from lipcert.loading import load_model

WIDTH = 80
SEEDS = {2: 3, 5: 3, 10: 3, 20: 3, 50: 1}  # by depth: how many networks
SDP_DEPTHS = (2, 5)
LIMITS = {5: 0.85, 10: 0.70, 20: 0.50}  # of rescaled/LipLT, for every network
TRAINED = ((60, 60), (100, 100), (200, 200), (100, 100, 100, 100))
NEAR = {"network": 1.15, "pair": 1.35}  # of rescaled/LipSDP-neuron
MUST = TRAINED[:2]
PAIR = (3, 5)
TIME_SHARE = 0.05
CVXPY_SECONDS = 200
CONV_FIT = FitOptions(steps=30)

Figures = dict[str, Any]


def compare(repeats: int, models: Sequence[str] = ()) -> tuple[Figures, RenderableType]:
    """Random MLPs, trained MLPs and convolutional networks; `repeats` limits the random networks of each depth."""
    random, random_tables = _random_networks(repeats)
    trained, trained_tables = _trained_networks()
    conv, conv_table = _convolutional(models)
    _plot(random["networks"])
    return {"random": random, "trained": trained, "convolutional": conv}, Group(
        *random_tables, *trained_tables, conv_table
    )


def random_mlp(depth: int, seed: int) -> nn.Sequential:
    """4 inputs, 1 output, normal weights with spectral norms drawn from [0.4, 1.8], no biases."""
    generator = torch.Generator().manual_seed(1000 * depth + seed)
    layers: list[nn.Module] = []
    for n, m in pairwise([4, *[WIDTH] * (depth - 1), 1]):
        layer = nn.Linear(n, m)
        weight = torch.randn(m, n, generator=generator, dtype=torch.float64)
        norm = 0.4 + 1.4 * torch.rand((), generator=generator, dtype=torch.float64)
        layer.weight.data = (weight * norm / torch.linalg.matrix_norm(weight, 2)).float()
        nn.init.zeros_(layer.bias)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1]).eval()


def weights(model: nn.Module) -> list[Tensor]:
    return [m.weight.detach().double() for m in model.modules() if isinstance(m, nn.Linear)]


def eclipse_fast(matrices: Sequence[Tensor]) -> float:
    """ECLipsE-Fast (Xu and Sivaranjani, NeurIPS 2024) for slopes in [0, 1]; not rounded up.

    X_0 = I, K_i = ¼ W_i X_{i−1}⁻¹ W_iᵀ, λ_i = 1/(2‖K_i‖), X_i = λ_i I − λ_i² K_i; then L² = ‖W_l X⁻¹ W_lᵀ‖.
    """
    x = torch.eye(matrices[0].shape[1], dtype=torch.float64)
    for w in matrices[:-1]:
        k = w @ torch.linalg.solve(x, w.T) / 4
        k = (k + k.T) / 2
        multiplier = 1 / (2 * torch.linalg.eigvalsh(k)[-1])
        x = multiplier * torch.eye(len(k), dtype=torch.float64) - multiplier**2 * k
    square = matrices[-1] @ torch.linalg.solve(x, matrices[-1].T)
    return float(torch.linalg.eigvalsh((square + square.T) / 2)[-1].sqrt())


def check_eclipse() -> Figures:
    """Chains of scaled identities have the product of the scales as their constant: nothing may be below it."""
    lowest, package = 1.0, "not installed"
    estimators: list[Callable[[Sequence[Tensor]], float]] = [eclipse_fast]
    try:
        from eclipse_nn import LipConstEstimator  # type: ignore[import-not-found]

        package = version("eclipse-nn")
        estimators.append(lambda ws: float(LipConstEstimator(weights=list(ws)).estimate("ECLipsE_Fast")))
    except (ImportError, PackageNotFoundError):
        pass
    for scales in ((2.0, 0.5, 3.0), (1.7,) * 6, (0.3, 2.5, 4.0, 1.0), (0.5,) * 20):
        exact = exp(sum(map(log, scales)))
        chain = [scale * torch.eye(5, dtype=torch.float64) for scale in scales]
        lowest = min(lowest, *(estimate(chain) / exact for estimate in estimators))
    difference = 0.0
    for depth in (2, 5, 10):
        own, *others = (estimate(weights(random_mlp(depth, 0))) for estimate in estimators)
        difference = max(difference, *(abs(other / own - 1) for other in others), 0.0)
    return {"package": package, "lowest_ratio_to_exact": lowest, "valid": lowest > 1 - 1e-9,
            "largest_difference_of_package": difference if len(estimators) > 1 else None}  # fmt: skip


def _timed(function: Callable[[], float | Tensor]) -> tuple[float, float]:
    began = time.perf_counter()
    value = float(function())
    return value, time.perf_counter() - began


def _random_networks(repeats: int) -> tuple[Figures, list[Table]]:
    eclipse = check_eclipse()
    networks: list[Figures] = []
    for depth, count in SEEDS.items():
        for seed in range(min(count, repeats)):
            model = random_mlp(depth, seed)
            row: Figures = {"depth": depth, "seed": seed, "seconds": {}}
            methods: dict[str, Callable[[], float | Tensor]] = {
                method: lambda m=model, name=method: lipcert.bound(m, (4,), name, "network").value
                for method in ("naive", "liplt", "rescaled")
            }
            methods["eclipse_fast"] = lambda m=model: eclipse_fast(weights(m))
            if depth in SDP_DEPTHS:
                methods["lipsdp"] = lambda m=model: _lipsdp(m, (4,), "network")
            methods["sampled"] = lambda m=model: lipcert.estimate_sampled(m, (4,))
            for name, function in methods.items():
                row[name], row["seconds"][name] = _timed(function)
            networks.append(row)
    names = ("naive", "liplt", "rescaled", "eclipse_fast", "lipsdp", "sampled")
    table = Table("depth", "seed", *(name.replace("_", " ") for name in names), "rescaled/liplt",
                  "rescaled/eclipse", "rescaled s",
                  title=f"Random MLPs, 4-{WIDTH}-…-1: bounds of the network; sampled: from below")  # fmt: skip
    for row in networks:
        cells = [f"{row[name]:.4g}" if name in row else "" for name in names]
        table.add_row(str(row["depth"]), str(row["seed"]), *cells, f"{row['rescaled'] / row['liplt']:.3f}",
                      f"{row['rescaled'] / row['eclipse_fast']:.3f}", f"{row['seconds']['rescaled']:.1f}")  # fmt: skip
    checks = Table("requirement, for every network", "worst", "geometric mean", "", title="Random MLPs")
    verdicts = []
    for depth, limit in LIMITS.items():
        ratios = [row["rescaled"] / row["liplt"] for row in networks if row["depth"] == depth]
        verdicts.append(_verdict(f"rescaled/liplt ≤ {limit:.2f} at {depth} layers", ratios, limit))
    ratios = [row["rescaled"] / row["eclipse_fast"] for row in networks]
    verdicts.append(_verdict("rescaled below ECLipsE-Fast", ratios, 1.0))
    for v in verdicts:
        checks.add_row(v["requirement"], f"{v['worst']:.3f}", f"{v['geometric_mean']:.3f}", _word(v["passed"]))
    checks.caption = (
        f"ECLipsE-Fast on scaled identities: {eclipse['lowest_ratio_to_exact']:.6f} of the exact constant or more; "
        f"eclipse-nn: {eclipse['package']}"
    )
    return {"networks": networks, "requirements": verdicts, "eclipse": eclipse}, [table, checks]


def _verdict(requirement: str, ratios: Sequence[float], limit: float) -> Figures:
    mean = exp(fmean(map(log, ratios)))
    return {"requirement": requirement, "limit": limit, "worst": max(ratios), "geometric_mean": mean,
            "passed": max(ratios) <= limit}  # fmt: skip


def _word(passed: bool) -> str:
    return "[green]pass[/]" if passed else "[bold red]FAIL[/]"


def _lipsdp(model: nn.Module, shape: tuple[int, ...], what: str, solver: str = "barrier") -> float:
    """LipSDP-neuron for the network or for the pair of classes."""
    network = lipcert.trace(copy.deepcopy(model).double(), shape)
    if what == "network":
        value = lipsdp_constants(network, solver=solver)
    else:
        value = lipsdp_constants(network, "pairwise", pairs=[PAIR], solver=solver)[PAIR]
    return float(value)


def trained_mlp(hidden: Sequence[int], data: lipcert.data.Dataset, epochs: int = 2) -> nn.Sequential:
    """784-…-10, by cross-entropy and Adam."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Flatten()]
    for n, m in pairwise([784, *hidden, 10]):
        layers += [nn.Linear(n, m), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(epochs):
        for index in torch.randperm(len(data.train)).split(128):
            optimizer.zero_grad()
            F.cross_entropy(model(data.train.pixels(index)), data.train.labels[index]).backward()
            optimizer.step()
    return model.eval()


def _rescaled(model: nn.Module, what: str) -> Tensor:
    if what == "network":
        return lipcert.bound(model, (1, 28, 28), "rescaled", "network").value
    return lipcert.bound(model, (1, 28, 28), "rescaled", "pairwise", fit=FitOptions(pair=PAIR)).value[PAIR]


def _liplt(model: nn.Module, what: str, method: str = "liplt") -> Tensor:
    value = lipcert.bound(model, (1, 28, 28), method, "network" if what == "network" else "pairwise").value
    return value if what == "network" else value[PAIR]


def _slope(model: nn.Module, what: str) -> Tensor:
    value = lipcert.estimate_sampled(model, (1, 28, 28), "network" if what == "network" else "pairwise")
    return value if what == "network" else value[PAIR]


def _trained_networks() -> tuple[list[Figures], list[RenderableType]]:
    try:
        data = lipcert.data.load("mnist", download=False)
    except DataError as error:
        return [], [f"Trained MLPs were left out: {error}"]
    rows: list[Figures] = []
    for hidden in TRAINED:
        model = trained_mlp(hidden, data)
        name = "-".join(map(str, (784, *hidden, 10)))
        with torch.no_grad():
            accuracy = float((model(data.test.pixels()).argmax(1) == data.test.labels).double().mean())
        for what in ("network", "pair"):
            row: Figures = {"network": name, "constant": what, "accuracy": accuracy, "seconds": {}}
            methods: dict[str, Callable[[], float | Tensor]] = {
                "naive": partial(_liplt, model, what, "naive"),
                "liplt": partial(_liplt, model, what),
                "rescaled": partial(_rescaled, model, what),
                "lipsdp": partial(_lipsdp, model, (1, 28, 28), what),
                "sampled": partial(_slope, model, what),
            }
            for method, function in methods.items():
                row[method], row["seconds"][method] = _timed(function)
            row["ratio"], row["limit"] = row["rescaled"] / row["lipsdp"], NEAR[what] if hidden in MUST else None
            row["passed"] = None if row["limit"] is None else row["ratio"] <= row["limit"]
            if hidden == TRAINED[0] and what == "network":
                row["cvxpy"] = _in_time(model, what)
            rows.append(row)
    table = Table("network", "constant", "naive", "liplt", "rescaled", "LipSDP", "sampled", "rescaled/LipSDP", "limit",
                  "", title=f"Trained on MNIST; the pair is {PAIR[0]}, {PAIR[1]}")  # fmt: skip
    times = Table("network", "constant", "rescaled s", "barrier s", "ratio", "cvxpy s", "ratio", "",
                  title=f"Time of rescaled; required: {TIME_SHARE:.0%} of the SDP solver's")  # fmt: skip
    for row in rows:
        values = [f"{row[k]:.4g}" for k in ("naive", "liplt", "rescaled", "lipsdp", "sampled")]
        limit = ["", ""] if row["limit"] is None else [f"{row['limit']:.2f}", _word(row["passed"])]
        table.add_row(row["network"], row["constant"], *values, f"{row['ratio']:.3f}", *limit)
        own, barrier = row["seconds"]["rescaled"], row["seconds"]["lipsdp"]
        other = ["", "", ""]
        if cvxpy := row.get("cvxpy"):
            share, open_end = own / cvxpy["seconds"], not cvxpy["finished"]
            known = not open_end or share <= TIME_SHARE  # an interrupted solver proves a pass, but no failure
            other = [f"{'> ' if open_end else ''}{cvxpy['seconds']:.0f}", f"{'< ' if open_end else ''}{share:.3f}",
                     _word(share <= TIME_SHARE) if known else "unknown"]  # fmt: skip
        times.add_row(row["network"], row["constant"], f"{own:.1f}", f"{barrier:.1f}", f"{own / barrier:.3f}", *other)
    return rows, [table, times]


def _in_time(model: nn.Module, what: str) -> Figures:
    """LipSDP by cvxpy in a process of its own, ended after a while."""
    context = get_context("spawn")
    queue: Any = context.Queue()
    process = context.Process(target=_solve, args=(queue, model, what))
    process.start()
    queue.get(timeout=CVXPY_SECONDS)  # its imports are done
    began = time.perf_counter()
    process.join(CVXPY_SECONDS)
    seconds, finished = time.perf_counter() - began, not process.is_alive()
    if not finished:
        process.terminate()
        process.join()
    finished = finished and process.exitcode == 0
    return {"seconds": seconds, "finished": finished, "value": queue.get() if finished else None}


def _solve(queue: Any, model: nn.Module, what: str) -> None:
    import cvxpy  # noqa: F401

    queue.put("ready")
    queue.put(_lipsdp(model, (1, 28, 28), what, "cvxpy"))


def _convolutional(models: Sequence[str]) -> tuple[list[Figures], Table]:
    table = Table("network", "weights", "naive", "liplt", "rescaled", "rescaled/liplt", "rescaled s",
                  title="Mean pairwise constants: estimates, not guaranteed")  # fmt: skip
    rows: list[Figures] = []
    candidates = [(Path(name).name, "given", load_model(name)) for name in models]
    if not candidates:
        candidates = [(name, "untrained", load_model(name)) for name in ("4C3F", "6C2F")]
    for name, origin, loaded in candidates:
        row: Figures = {"network": name, "weights": origin, "seconds": {}, "guarantee": "estimate",
                        "fit_steps": CONV_FIT.steps, "input_shape": loaded.input_shape}  # fmt: skip
        for method in ("naive", "liplt", "rescaled"):
            row[method], row["seconds"][method] = _timed(partial(_estimate, loaded.model, loaded.input_shape, method))
        rows.append(row)
        table.add_row(name, origin, *(f"{row[m]:.4g}" for m in ("naive", "liplt", "rescaled")),
                      f"{row['rescaled'] / row['liplt']:.3f}", f"{row['seconds']['rescaled']:.0f}")  # fmt: skip
    table.caption = f"scales per channel, {CONV_FIT.steps} steps"
    return rows, table


def _estimate(model: nn.Module, shape: tuple[int, ...], method: str) -> float:
    estimator = lipcert.Estimator(model.requires_grad_(False), shape, method, power_iterations=40)
    if method == "rescaled":
        return fit_scales(estimator, CONV_FIT)
    value = estimator()
    return float(value.sum()) / (len(value) * (len(value) - 1))


def _plot(networks: Sequence[Figures]) -> None:
    """Ratio to the naive bound over depth, geometric means with the range of the networks."""
    try:
        import matplotlib as mpl
    except ImportError:
        print("no plot: matplotlib is missing")
        return
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    # Okabe and Ito's colours, told apart by markers too
    styles = {"liplt": ("LipLT", "#0072B2", "o"), "eclipse_fast": ("ECLipsE-Fast", "#E69F00", "s"),
              "rescaled": ("rescaled LipLT", "#009E73", "D"), "lipsdp": ("LipSDP-neuron", "#CC79A7", "^"),
              "sampled": ("steepest slope found", "#000000", "x")}  # fmt: skip
    for method, (label, colour, marker) in styles.items():
        points: dict[int, list[float]] = {}
        for row in networks:
            if method in row and row[method] > 0:
                points.setdefault(row["depth"], []).append(row[method] / row["naive"])
        depths = list(points)
        means = [exp(fmean(map(log, ratios))) for ratios in points.values()]
        axes.plot(
            depths, means, color=colour, marker=marker, label=label, linestyle=":" if method == "sampled" else "-"
        )
        axes.fill_between(
            depths, list(map(min, points.values())), list(map(max, points.values())), color=colour, alpha=0.15
        )
    axes.set(xscale="log", yscale="log", xlabel="layers", ylabel="ratio to the naive bound",
             title=f"Random MLPs, width {WIDTH}")  # fmt: skip
    lowest = min(row["rescaled"] / row["naive"] for row in networks)
    axes.set_ylim(bottom=lowest / 5)  # slopes of deep networks are far below all bounds
    axes.set_xticks(list(SEEDS), list(map(str, SEEDS)))
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    RESULTS.mkdir(exist_ok=True)
    figure.savefig(RESULTS / "tightness.png", dpi=150)
    plt.close(figure)
