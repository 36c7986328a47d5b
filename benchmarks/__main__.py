"""`python -m benchmarks [part …]`: run all parts or some, print tables, store JSON in benchmarks/results."""

from __future__ import annotations

import argparse
import shlex
import sys

import torch
from rich.console import Console

from benchmarks import (
    certificates,
    estimates,
    limits,
    local,
    ordinary,
    refined,
    tightness,
)
from benchmarks.measure import store

PARTS = {
    "steps": estimates.step_costs,
    "training": estimates.training_costs,
    "depth": estimates.depth_growth,
    "pairwise": lambda repeats: estimates.pairwise_cost(max(3, repeats // 3)),
    "bounds": lambda repeats: certificates.bound_times(["4C3F", "6C2F", "8C2F"]),
    "ordinary": ordinary.ordinary,
    "ceilings": limits.ceilings,
    "processes": limits.processes,
    "certify": lambda repeats: certificates.certification_speed(max(3, repeats // 3)),
    "executions": certificates.execution_speed,
    "tightness": tightness.compare,
    "refined": refined.compare_refined,
    "local": local.compare_local,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "parts", nargs="*", help=f"some of {', '.join(PARTS)}; default: all"
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--models",
        nargs="*",
        default=[],
        help="trained networks for tightness: run folders, checkpoints",
    )
    parser.add_argument(
        "--networks", nargs="*", default=[], help="networks for local; default: all"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(
            f"unknown part {', '.join(unknown)}; choose from {', '.join(PARTS)}"
        )
    torch.set_flush_denormal(True)
    console = Console(
        width=None if sys.stdout.isatty() else 140
    )  # files have no width of their own
    for name in arguments.parts or PARTS:
        option = {"tightness": "models", "local": "networks"}.get(name, "")
        given = getattr(arguments, option) if option else []
        options = {option: given} if given else {}
        figures, table = PARTS[name](arguments.repeats, **options)
        console.print(table)
        command = f"python -m benchmarks {name} --repeats {arguments.repeats}".split()
        command += [f"--{option}"] if given else []
        store(name, shlex.join([*command, *given]), figures)


if __name__ == "__main__":
    main()
