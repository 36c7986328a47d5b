"""How a `Bound` looks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lipcert.bounds.bound import Bound
from lipcert.display.frames import data_frame
from lipcert.display.plots import contributions, heat_map
from lipcert.display.text_table import TextTable
from lipcert.display.views import frame, plot, table
from lipcert.errors import OptionError

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


@table.register(Bound)
def bound_table(bound: Bound) -> TextTable:
    """One row per site."""
    title = f"Lipschitz bound {bound.mean:.6g} ({bound.target})"
    if bound.value.dim():
        # "(pairwise)" becomes "(pairwise, mean of 10 × 10)".
        title = f"{title[:-1]}, mean of {' × '.join(map(str, bound.value.shape))})"
    # A constant network has the bound 0 and no shares.
    whole = bound.mean or 1.0
    rows = []
    for site, reached, share in zip(
        bound.facts.sites, _from_input(bound), bound.shares.tolist(), strict=True
    ):
        rows.append((site, f"{reached:.6g}", f"{share:.6g}", f"{share / whole:.1%}"))
    caption = f"{bound.method}, l2, {bound.guarantee}, {bound.seconds:.1f} s"
    return TextTable(
        title, ("site", "from the input", "contribution", "share"), rows, caption
    )


@plot.register(Bound)
def bound_figure(bound: Bound, classes: Sequence[str] | None = None) -> Figure:
    """A heat map of the constants of all pairs of classes; for other targets, the contributions of the sites."""
    if bound.value.dim() < 2:
        return contributions({bound.method: bound.contributions})
    count = len(bound.value)
    names = list(map(str, range(count))) if classes is None else list(classes)
    if len(names) != count:
        raise OptionError(
            f"classes has {len(names)} names, the bound is for {count} classes"
        )
    return heat_map(
        bound.value.numpy(),
        names,
        f"{bound.method}, {bound.target}: mean {bound.mean:.4g}",
    )


@frame.register(Bound)
def bound_frame(bound: Bound) -> pandas.DataFrame:
    """One row per site: the constant of the map from the input to it, and its contribution to the (mean) value."""
    columns = {
        "site": bound.facts.sites,
        "from_input": _from_input(bound),
        "contribution": bound.shares.tolist(),
    }
    return data_frame(columns, index="site")


def _from_input(bound: Bound) -> list[float]:
    """Constants of the maps from the input to each of the sites 0..n."""
    # `prefix` begins with site 1; the map from the input to itself has the constant 1.
    return [1.0, *bound.prefix.tolist()]
