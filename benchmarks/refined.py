"""What `best` gains on networks that are too large for LipSDP: mean pairwise constants, guaranteed."""

from __future__ import annotations

from rich.table import Table

import lipcert
from benchmarks.mlps import trained_mlp
from benchmarks.tightness_tables import Figures

HIDDEN = ((200, 200), (200, 200, 200), (512, 512))
METHODS = ("liplt", "rescaled", "lt-sdp", "best")


def compare_refined(repeats: int) -> tuple[Figures, Table]:
    """Networks trained on MNIST for one epoch; nothing is repeated."""
    data = lipcert.data.load("mnist", download=False)
    table = Table("network", *METHODS, "won by", title="Mean pairwise constants")
    rows: list[Figures] = []
    for hidden in HIDDEN:
        model = trained_mlp(hidden, data, epochs=1)
        bounds = {
            method: lipcert.bound(model, data.input_shape, method) for method in METHODS
        }
        name = "-".join(map(str, (784, *hidden, 10)))
        winners = {
            what: won
            for what, won in bounds["best"].winners.items()
            if what.startswith("pairwise")
        }
        rows.append({"network": name, "winners": winners, "values": {m: b.mean for m, b in bounds.items()},
                     "seconds": {m: b.seconds for m, b in bounds.items()}})  # fmt: skip
        won = ", ".join(
            f"{won} {what.removeprefix('pairwise').strip()}".strip()
            for what, won in winners.items()
        )
        table.add_row(
            name, *(f"{b.mean:.4g} ({b.seconds:.0f} s)" for b in bounds.values()), won
        )
    return {"networks": rows}, table
