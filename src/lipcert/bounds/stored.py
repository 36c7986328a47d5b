"""Bounds in files, used again as long as they belong to the model."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from lipcert.bounds.bound import Bound
from lipcert.bounds.compute import bound_targets
from lipcert.bounds.fit import FitOptions
from lipcert.network.normal_form import Network
from lipcert.processes import of_first, process_rank
from lipcert.progress import Progress, no_progress


def stored_bound(
    model: nn.Module,
    network: Network,
    path: str | Path,
    progress: Progress = no_progress,
    method: str = "liplt",
    fit: FitOptions | None = None,
    earlier: Bound | None = None,
) -> Bound:
    """The bound that was saved at `path`, or else the earlier one, if it belongs to the model; otherwise a new one.

    `network` is the trace of the model. The scales of the earlier one are where those
    of a new one begin, unless `fit` says otherwise. What is found is saved at `path`.
    """
    wanted = (method, "pairwise", network.input_shape)
    # Processes may not see the same files: all of them take what the first one found.
    for known in of_first((Bound.find(path), earlier)):
        if (
            known is None
            or (known.method, known.target, known.facts.input_shape) != wanted
        ):
            continue
        # A bound of other weights is stale, however new its file is.
        if known.belongs_to(network):
            _save(known, path)
            return known
    if fit is None and earlier is not None:
        # Weights that were trained on are near the earlier ones, and so are their best
        # coordinates.
        fit = FitOptions(start=earlier.scales)
    shape, targets = network.input_shape, ("pairwise",)
    new = bound_targets(
        model, shape, method, targets, fit=fit, network=network, progress=progress
    )
    _save(new["pairwise"], path)
    return new["pairwise"]


def _save(made: Bound, path: str | Path) -> None:
    """Write a bound, which all processes have, once."""
    if process_rank() == 0:
        made.save(path)
