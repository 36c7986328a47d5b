"""What guaranteed bounds and certificates cost."""

from __future__ import annotations

import os
import time

import torch
from rich.table import Table

import lipcert
from benchmarks.measure import own_peak
from lipcert.certificate import Certifier
from lipcert.models import zoo
from lipcert_experiments.timing import side_by_side

MINUTES = {"4C3F": 3, "6C2F": 3, "8C2F": 20}
INPUTS = 10_000
IMAGES = 1024


def bound_times(names: list[str]) -> tuple[list[dict[str, object]], Table]:
    """Time and peak memory of guaranteed pairwise bounds."""
    table = Table(
        "network",
        "seconds",
        "limit",
        "peak GiB so far",
        "guarantee",
        title="Guaranteed pairwise LipLT bounds",
    )
    figures: list[dict[str, object]] = []
    for name in names:
        model = zoo.build(name, seed=0).eval()
        began = time.perf_counter()
        bound = lipcert.bound(model, zoo.ZOO[name].input_shape)
        seconds = time.perf_counter() - began
        peak = own_peak() / 1024
        figures.append({"network": name, "seconds": seconds, "limit": 60 * MINUTES[name], "peak_gib": peak,
                        "guarantee": bound.guarantee, "inflation": bound.inflation})  # fmt: skip
        table.add_row(
            name,
            f"{seconds:.1f}",
            f"{60 * MINUTES[name]}",
            f"{peak:.2f}",
            bound.guarantee,
        )
    return figures, table


def certification_speed(repeats: int) -> tuple[dict[str, object], Table]:
    """Speed of `certify` and of CertifiedClassifier against plain inference, 10,000 inputs of 28×28."""
    model = zoo.build("4C3F", seed=0).eval()
    x = torch.rand(INPUTS, 1, 28, 28)
    bound = lipcert.bound(model, (1, 28, 28))
    certifier, classifier = (
        Certifier(model, bound),
        lipcert.CertifiedClassifier(model, bound),
    )

    def batches(function: object) -> None:
        with torch.no_grad():
            for first in range(0, INPUTS, 256):
                function(x[first : first + 256])  # type: ignore[operator]

    seconds = side_by_side(
        {
            "plain": lambda: batches(model),
            "certify": lambda: batches(certifier.certify),
            "classifier": lambda: batches(classifier),
        },
        repeats,
    )
    table = Table(
        "", "seconds", "speed", title=f"4C3F, {INPUTS} inputs (certify: at least 0.40)"
    )
    for name, value in seconds.items():
        table.add_row(name, f"{value:.2f}", f"{seconds['plain'] / value:.2f}×")
    return {
        "speed": {name: seconds["plain"] / value for name, value in seconds.items()},
        "seconds": seconds,
    }, table


def execution_speed(repeats: int) -> tuple[dict[str, object], Table]:
    """The shipped CIFAR-10 network: plain, with sums in parts, settled, and in float64.

    Training images, drawn at random: how many are run again depends on them.
    """
    loaded = lipcert.load_model("cifar10-hour")
    wide = loaded.executed_in("float64")
    data = lipcert.data.load("cifar10", os.environ.get("LIPCERT_DATA_DIR"))
    drawn = torch.randperm(len(data.train), generator=torch.manual_seed(0))
    x = data.train.pixels(drawn[:IMAGES])
    x = x.contiguous(memory_format=torch.channels_last)
    assert wide.earlier is not None
    settled = lipcert.SettledClassifier(wide.model, wide.earlier)
    modules = {
        "plain": loaded.model,
        "split": loaded.executed_in("float32-split").executed,
        "settled": settled,
        "float64": wide.model,
    }

    def run(name: str) -> None:
        batch = x.to(torch.float64 if name == "float64" else torch.float32)
        with torch.no_grad():
            modules[name](batch)

    seconds = side_by_side(
        {name: lambda name=name: run(name) for name in modules}, repeats
    )
    again = 1 - float(settled.first_pass(x)[1].double().mean())
    table = Table(
        "",
        "seconds",
        "time",
        title=f"cifar10-hour, {IMAGES} images, {again:.1%} of them run again (settled: at most 1.5)",
    )
    for name, value in seconds.items():
        table.add_row(name, f"{value:.3f}", f"{value / seconds['plain']:.2f}×")
    return {
        "time": {name: value / seconds["plain"] for name, value in seconds.items()},
        "run again": again,
        "seconds": seconds,
    }, table
