"""What a differentiable Lipschitz estimate costs, compared with a plain training step."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.table import Table

from benchmarks.measure import peak_memory
from lipcert import Estimator, zoo
from lipcert_experiments.timing import TrainingStep, depth, growth, side_by_side

BATCH = 512
LIMITS = {("4C3F", 10): 0.30, ("6C2F", 5): 0.25, ("4C3F", 1): 0.12, ("6C2F", 1): 0.12}


def plain_step(name: str, *, channels_last: bool = False) -> Callable[[], None]:
    """Forward and backward pass of a cross-entropy on a batch of 512."""
    model = zoo.build(name, seed=0)
    x = torch.rand(BATCH, *zoo.ZOO[name].input_shape)
    if channels_last:
        model, x = (
            model.to(memory_format=torch.channels_last),
            x.to(memory_format=torch.channels_last),
        )
    labels = torch.randint(0, zoo.ZOO[name].classes, (BATCH,))

    def step() -> None:
        model.zero_grad()
        F.cross_entropy(model(x), labels).backward()

    return step


def estimate(
    name: str, iterations: int, method: str = "liplt", target: str = "pairwise"
) -> Callable[[], None]:
    """A differentiable estimate and its backward pass."""
    model = zoo.build(name, seed=0)
    estimator = Estimator(model, zoo.ZOO[name].input_shape, method, target, iterations)

    def run() -> None:
        model.zero_grad()
        estimator().sum().backward()

    return run


def _once(name: str, iterations: int | None) -> None:
    (plain_step(name) if iterations is None else estimate(name, iterations))()


def step_costs(repeats: int) -> tuple[list[dict[str, object]], Table]:
    """The cost of pairwise LipLT estimates as a fraction of a step."""
    table = Table(
        "net",
        "its",
        "step ms",
        "est. ms",
        "ratio",
        "limit",
        "vs channels-last",
        "step MiB",
        "est. MiB",
    )
    table.title = (
        f"Differentiable pairwise LipLT estimate, against a plain step of batch {BATCH}"
    )
    figures: list[dict[str, object]] = []
    for name in ("4C3F", "6C2F"):
        counts = [k for n, k in LIMITS if n == name]
        functions: dict[str, Callable[[], None]] = {
            "step": plain_step(name), "channels last": plain_step(name, channels_last=True)
        }  # fmt: skip
        functions |= {str(k): estimate(name, k) for k in counts}
        seconds = side_by_side(functions, repeats)
        step_memory = peak_memory(_once, name, None)
        for k in counts:
            ratio, other = (
                seconds[str(k)] / seconds["step"],
                seconds[str(k)] / seconds["channels last"],
            )
            memory = peak_memory(_once, name, k)
            figures.append({"network": name, "iterations": k, "ratio": ratio, "ratio_channels_last": other,
                            "limit": LIMITS[name, k], "step_seconds": seconds["step"],
                            "estimate_seconds": seconds[str(k)],
                            "step_mib": step_memory, "estimate_mib": memory})  # fmt: skip
            table.add_row(name, str(k), f"{1e3 * seconds['step']:.0f}", f"{1e3 * seconds[str(k)]:.0f}", f"{ratio:.3f}",
                          f"{LIMITS[name, k]:.2f}", f"{other:.3f}", f"{step_memory:.0f}", f"{memory:.0f}")  # fmt: skip
    return figures, table


def depth_growth(repeats: int) -> tuple[dict[str, object], Table]:
    """Time over the depth family, with 1 and with 5 iterations: the exponent of a power law, and how straight it is."""
    layers = {name: depth(name) for name in zoo.DEPTH_FAMILY}
    functions = {f"{name} {k}": estimate(name, k) for name in layers for k in (1, 5)}
    seconds = side_by_side(functions, repeats)
    table = Table(
        "network",
        "layers",
        "1 iteration: ms",
        "per layer",
        "5 iterations: ms",
        "per layer",
    )
    for name, count in layers.items():
        times = [1e3 * seconds[f"{name} {k}"] for k in (1, 5)]
        table.add_row(
            name,
            str(count),
            *(cell for ms in times for cell in (f"{ms:.0f}", f"{ms / count:.1f}")),
        )
    figures: dict[str, object] = {"layers": layers, "seconds": seconds}
    captions = []
    for k in (1, 5):
        counts, times = (
            list(layers.values()),
            [seconds[f"{name} {k}"] for name in layers],
        )
        figures[f"{k} iterations"] = fit = growth(counts, times)
        law = f"time ∝ layers^{fit['exponent']:.2f}, straight line R² {fit['r2_of_straight_line']:.3f}"
        captions.append(f"{k} iterations: {law}")
    table.title, table.caption = "Growth with depth", "; ".join(captions)
    return figures, table


def pairwise_cost(repeats: int) -> tuple[dict[str, object], Table]:
    """All 19,900 pairs of 200 classes, against the 200 per-class constants."""
    seconds = side_by_side(
        {t: estimate("8C2F", 1, target=t) for t in ("per-class", "pairwise")}, repeats
    )
    ratio = seconds["pairwise"] / seconds["per-class"]
    table = Table(
        "target",
        "seconds",
        "ratio",
        title="8C2F with 200 classes, 1 iteration, with gradient (limit 1.30)",
    )
    for target, value in seconds.items():
        table.add_row(target, f"{value:.2f}", f"{value / seconds['per-class']:.3f}")
    return {"ratio": ratio, "limit": 1.3, "seconds": seconds}, table


TRAINING_LIMITS = {10: 1.35, 1: 1.20}


def training_costs(repeats: int) -> tuple[dict[str, object], Table]:
    """What CRM adds to a training step, both in the memory format that training uses."""
    functions = {"standard": TrainingStep("4C3F", None, batch=BATCH)}
    functions |= {
        str(k): TrainingStep("4C3F", "liplt", k, batch=BATCH) for k in TRAINING_LIMITS
    }
    seconds = side_by_side(functions, repeats)
    table = Table(
        "step",
        "ms",
        "ratio",
        "limit",
        title=f"Training steps of 4C3F, batch {BATCH}, channels last",
    )
    table.add_row("cross-entropy", f"{1e3 * seconds['standard']:.0f}", "1.00", "")
    for k, limit in TRAINING_LIMITS.items():
        ratio = seconds[str(k)] / seconds["standard"]
        table.add_row(
            f"CRM, {k} iterations",
            f"{1e3 * seconds[str(k)]:.0f}",
            f"{ratio:.2f}",
            f"{limit:.2f}",
        )
    return {
        "ratios": {k: seconds[str(k)] / seconds["standard"] for k in TRAINING_LIMITS},
        "seconds": seconds,
    }, table
