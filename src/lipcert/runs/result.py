"""A finished run, as `lipcert.train` returns it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from lipcert.runs.metrics import Record
from lipcert.runs.summary import Summary
from lipcert.shown import Shown


@dataclass(frozen=True)
class Run(Shown):
    """A finished run.

    summary: clean and certified accuracies, by guaranteed bounds.
    metrics: one record per epoch, with estimates.
    standard: the twin that was trained by cross-entropy alone, if there is one.

    It shows its accuracies as a table. `plot` draws losses, accuracies and mean
    constants over the epochs, and `to_pandas` has the metrics, one row per epoch;
    constants and certified shares in both are estimates.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
        >>> quick = {"epochs": 1, "epsilons": [0.1], "attack_inputs": 0, "compare_standard": False}
        >>> data = torch.rand(20, 4), torch.arange(20) % 3
        >>> run = lipcert.train(quick, "run", model=model, data=data)
        >>> len(run.metrics), run.summary.at[0].epsilon
        (1, 0.1)
    """

    folder: Path
    summary: Summary
    metrics: list[Record] = field(repr=False)
    standard: Run | None = None

    def __repr__(self) -> str:
        summary = self.summary
        certified = ", ".join(
            f"{entry.certified:.2%} at ε = {entry.epsilon:.4g}" for entry in summary.at
        )
        return (
            f"Run({str(self.folder)!r}, {summary.model} on "
            f"{summary.data_title}, {summary.loss}, "
            f"clean {summary.clean:.2%}, certified {certified})"
        )
