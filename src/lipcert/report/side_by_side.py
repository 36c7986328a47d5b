"""The runs side by side, as cells of text."""

from __future__ import annotations

from collections.abc import Sequence

from lipcert.display import NOTHING, TextTable
from lipcert.runs import RunFolder


def compare(runs: Sequence[RunFolder]) -> TextTable:
    """Clean, attacked and certified accuracies at every ε of any run, radii, constants and times.

    Attacked accuracies are shares of the inputs attacked; if these are fewer than those
    certified, a column says so, and the certified and the clean share of the same
    inputs stand around them.
    """
    # Columns are those of all runs together: a run that was not made for an ε still has
    # a certified share at it.
    every_epsilon: set[float] = set()
    attacked = partly = False
    for run in runs:
        every_epsilon.update(run.summary.epsilons)
        if run.distance is not None:
            attacked = True
            partly |= len(run.distance) < len(run.certificates)
    epsilons = sorted(every_epsilon)
    columns = ["run", "network", "trained by", "data", "clean"]
    if partly:
        columns.append("inputs attacked")
    for epsilon in epsilons:
        if attacked:
            columns.append(f"attacked at ε = {epsilon:.4g}")
        columns.append(f"certified at ε = {epsilon:.4g}")
    columns += ["median radius", "mean constant", "training time"]
    rows = [_row(run, epsilons, attacked, partly) for run in runs]
    return TextTable("", columns, rows, words=4)


def _row(
    run: RunFolder, epsilons: Sequence[float], attacked: bool, partly: bool
) -> list[str]:
    """The cells of one run; `attacked` and `partly` say which columns there are."""
    cells = [run.name, run.model, run.loss or NOTHING, run.data, percent(run.clean)]
    if partly:
        cells.append(_attacked_inputs(run))
    for epsilon in epsilons:
        if attacked:
            cells.append(_attacked(run, epsilon))
        cells.append(percent(run.certified_at(epsilon)))
    cells.append(f"{float(run.certificates.radius.median()):.4g}")
    constant = run.summary.mean_constant
    cells.append(NOTHING if constant is None else f"{constant:.4g}")
    cells.append(duration(run.summary.training_seconds))
    return cells


def _attacked(run: RunFolder, epsilon: float) -> str:
    """The share that attacks leave standing; of a part, between the certified and the clean share of the same."""
    around = around_attacked(run, epsilon)
    # Certified ≤ attacked ≤ clean holds for the same inputs only; of all of them, the
    # columns show it.
    if (
        around is None
        or run.distance is None
        or len(run.distance) == len(run.certificates)
    ):
        return percent(run.attacked_at(epsilon))
    certified, clean = around
    return (
        f"{percent(certified)} ≤ {percent(run.attacked_at(epsilon))} ≤ {percent(clean)}"
    )


def around_attacked(run: RunFolder, epsilon: float) -> tuple[float, float] | None:
    """The certified and the clean share of the inputs that were attacked: that left standing lies between them."""
    if run.attacked is None:
        return None
    return run.attacked.certified_accuracy(epsilon), run.attacked.clean_accuracy


def _attacked_inputs(run: RunFolder) -> str:
    if run.distance is None:
        return NOTHING
    return f"{len(run.distance):,} of {len(run.certificates):,}"


def percent(share: float | None, digits: int = 2) -> str:
    """A share in percent."""
    if share is None:
        return NOTHING
    return f"{100 * share:.{digits}f}\u202f%"


def duration(seconds: float | None) -> str:
    """Some time in the unit that suits it."""
    if seconds is None:
        return NOTHING
    if seconds < 120:
        return f"{seconds:.3g}\u202fs"
    if seconds < 7200:
        return f"{seconds / 60:.0f}\u202fmin"
    return f"{seconds / 3600:.1f}\u202fh"
