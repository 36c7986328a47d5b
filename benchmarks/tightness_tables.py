"""The comparison of bounds as tables and as a picture, from the figures of `tightness`."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from benchmarks.mlps import WIDTH
from lipcert.display.style import COLOURS, MEANING, new_figure, styled

TIME_SHARE = 0.05
Figures = dict[str, Any]


def random_tables(random: Figures) -> list[Table]:
    """The bounds of every random network, and what is required of them."""
    names = ("naive", "liplt", "rescaled", "eclipse_fast", "lipsdp", "sampled")
    table = Table("depth", "seed", *(name.replace("_", " ") for name in names), "rescaled/liplt",
                  "rescaled/eclipse", "rescaled s",
                  title=f"Random MLPs, 4-{WIDTH}-…-1: bounds of the network; sampled: from below")  # fmt: skip
    for row in random["networks"]:
        cells = [f"{row[name]:.4g}" if name in row else "" for name in names]
        table.add_row(str(row["depth"]), str(row["seed"]), *cells, f"{row['rescaled'] / row['liplt']:.3f}",
                      f"{row['rescaled'] / row['eclipse_fast']:.3f}", f"{row['seconds']['rescaled']:.1f}")  # fmt: skip
    checks = Table(
        "requirement, for every network",
        "worst",
        "geometric mean",
        "",
        title="Random MLPs",
    )
    for v in random["requirements"]:
        checks.add_row(
            v["requirement"],
            f"{v['worst']:.3f}",
            f"{v['geometric_mean']:.3f}",
            _word(v["passed"]),
        )
    eclipse = random["eclipse"]
    checks.caption = (
        f"ECLipsE-Fast on scaled identities: {eclipse['lowest_ratio_to_exact']:.6f} of the exact constant or more; "
        f"eclipse-nn: {eclipse['package']}"
    )
    return [table, checks]


def trained_tables(rows: Sequence[Figures], pair: tuple[int, int]) -> list[Table]:
    """The bounds of trained networks and of a pair of their classes, and the time of the rescaled ones."""
    table = Table("network", "constant", "naive", "liplt", "rescaled", "LipSDP", "sampled", "rescaled/LipSDP", "limit",
                  "", title=f"Trained on MNIST; the pair is {pair[0]}, {pair[1]}")  # fmt: skip
    times = Table("network", "constant", "rescaled s", "barrier s", "ratio", "cvxpy s", "ratio", "",
                  title=f"Time of rescaled; required: {TIME_SHARE:.0%} of the SDP solver's")  # fmt: skip
    for row in rows:
        values = [
            f"{row[k]:.4g}" for k in ("naive", "liplt", "rescaled", "lipsdp", "sampled")
        ]
        limit = (
            ["", ""]
            if row["limit"] is None
            else [f"{row['limit']:.2f}", _word(row["passed"])]
        )
        table.add_row(
            row["network"], row["constant"], *values, f"{row['ratio']:.3f}", *limit
        )
        own, barrier = row["seconds"]["rescaled"], row["seconds"]["lipsdp"]
        other = ["", "", ""]
        if cvxpy := row.get("cvxpy"):
            share, open_end = own / cvxpy["seconds"], not cvxpy["finished"]
            known = (
                not open_end or share <= TIME_SHARE
            )  # an interrupted solver proves a pass, but no failure
            other = [f"{'> ' if open_end else ''}{cvxpy['seconds']:.0f}", f"{'< ' if open_end else ''}{share:.3f}",
                     _word(share <= TIME_SHARE) if known else "unknown"]  # fmt: skip
        times.add_row(
            row["network"],
            row["constant"],
            f"{own:.1f}",
            f"{barrier:.1f}",
            f"{own / barrier:.3f}",
            *other,
        )
    return [table, times]


def convolutional_table(rows: Sequence[Figures]) -> Table:
    """Estimates of convolutional networks."""
    methods = ("naive", "liplt", "rescaled")
    table = Table("network", "weights", *methods, "rescaled/liplt", "rescaled s",
                  title="Mean pairwise constants: estimates, not guaranteed",
                  caption=f"scales per channel, {rows[0]['fit_steps']} steps")  # fmt: skip
    for row in rows:
        table.add_row(row["network"], row["weights"], *(f"{row[m]:.4g}" for m in methods),
                      f"{row['rescaled'] / row['liplt']:.3f}", f"{row['seconds']['rescaled']:.0f}")  # fmt: skip
    return table


@styled
def draw(networks: Sequence[Figures], path: Path) -> None:
    """Ratio to the naive bound over depth, geometric means with the range of the networks."""
    figure, (axes,) = new_figure(size=(7.0, 4.5))
    styles = {"liplt": ("LipLT", MEANING["liplt"], "o-"), "eclipse_fast": ("ECLipsE-Fast", COLOURS[4], "s-"),
              "rescaled": ("rescaled LipLT", MEANING["rescaled"], "D-"),
              "lipsdp": ("LipSDP-neuron", MEANING["lipsdp"], "^-"),
              "sampled": ("steepest slope found", MEANING["sampled"], "x:")}  # fmt: skip
    for method, (label, colour, line) in styles.items():
        points: dict[int, list[float]] = {}
        for row in networks:
            if method in row and row[method] > 0:
                points.setdefault(row["depth"], []).append(row[method] / row["naive"])
        depths, ratios = list(points), list(points.values())
        axes.plot(
            depths, list(map(geometric_mean, ratios)), line, color=colour, label=label
        )
        axes.fill_between(
            depths,
            list(map(min, ratios)),
            list(map(max, ratios)),
            color=colour,
            alpha=0.15,
        )
    axes.set(xscale="log", yscale="log", xlabel="layers", ylabel="ratio to the naive bound",
             title=f"Random MLPs, width {WIDTH}")  # fmt: skip
    lowest = min(row["rescaled"] / row["naive"] for row in networks)
    axes.set_ylim(bottom=lowest / 5)  # slopes of deep networks are far below all bounds
    ticks = sorted({row["depth"] for row in networks})
    axes.set_xticks(ticks, list(map(str, ticks)))
    axes.minorticks_off()
    axes.legend()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=150)


def geometric_mean(values: Sequence[float]) -> float:
    return exp(fmean(map(log, values)))


def _word(passed: bool) -> str:
    return "[green]pass[/]" if passed else "[bold red]FAIL[/]"
