"""The runs side by side, as cells of text: for the page, in Markdown and in LaTeX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lipcert.report.folder import RunFolder

NOTHING = "–"
_LATEX = {"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}", "ε": r"$\varepsilon$",
          "–": "--", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}",
          "\u2009": r"\,"}  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """Cells of text, a row per run; the first `words` columns are words, the others numbers."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int

    def markdown(self) -> str:
        sides = [":---" if k < self.words else "---:" for k in range(len(self.columns))]
        lines = [[cell.replace("|", r"\|") for cell in row] for row in (self.columns, *self.rows)]
        return "".join(f"| {' | '.join(line)} |\n" for line in (lines[0], sides, *lines[1:]))

    def latex(self) -> str:
        """A tabular; it needs the package booktabs."""
        sides = "l" * self.words + "r" * (len(self.columns) - self.words)
        head, *body = (" & ".join(map(_latex, row)) + r" \\" for row in (self.columns, *self.rows))
        lines = [rf"\begin{{tabular}}{{{sides}}}", r"\toprule", head, r"\midrule", *body, r"\bottomrule"]
        return "\n".join([*lines, r"\end{tabular}"]) + "\n"


def compare(runs: Sequence[RunFolder]) -> Comparison:
    """Clean, attacked and certified accuracies at every ε of any run, radii, constants and times.

    Attacked accuracies are shares of the inputs attacked; if these are fewer than those certified, a column says so.
    """
    epsilons = sorted({epsilon for run in runs for epsilon in run.epsilons})
    attacked = any(run.distance is not None for run in runs)
    partly = any(run.distance is not None and len(run.distance) < len(run.certificates) for run in runs)
    pairs = [(kind, epsilon) for epsilon in epsilons for kind in (["attacked"] if attacked else []) + ["certified"]]
    columns = ["run", "network", "trained by", "data", "clean", *(["inputs attacked"] if partly else []),
               *(f"{kind} at ε = {eps:.4g}" for kind, eps in pairs),
               "median radius", "mean constant", "training time"]  # fmt: skip
    rows = []
    for run in runs:
        shares = [run.certified_at(eps) if kind == "certified" else run.attacked_at(eps) for kind, eps in pairs]
        constant, seconds = run.summary.get("mean_constant"), run.summary.get("training_seconds")
        rows.append(
            [
                run.name, run.model, run.loss or NOTHING, run.data, percent(run.clean),
                *([_attacked(run)] if partly else []), *map(percent, shares),
                f"{float(run.certificates.radius.median()):.4g}",
                f"{constant:.4g}" if constant is not None else NOTHING,
                duration(seconds) if seconds is not None else NOTHING,
            ]
        )  # fmt: skip
    return Comparison(columns, rows, words=4)


def _attacked(run: RunFolder) -> str:
    return NOTHING if run.distance is None else f"{len(run.distance):,} of {len(run.certificates):,}"


def percent(share: float | None, digits: int = 2) -> str:
    return NOTHING if share is None else f"{100 * share:.{digits}f}\u2009%"


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g}\u2009s"
    return f"{seconds / 60:.0f}\u2009min" if seconds < 7200 else f"{seconds / 3600:.1f}\u2009h"


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)
