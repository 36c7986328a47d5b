"""How `Certificates` look."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from lipcert.certificate import Certificates
from lipcert.display.frames import data_frame
from lipcert.display.plots import accuracy_curve, radius_histogram
from lipcert.display.text_table import NOTHING, TextTable
from lipcert.display.views import frame, plot, table

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

_QUANTILES = {
    "smallest": 0.0,
    "25 %": 0.25,
    "median": 0.5,
    "75 %": 0.75,
    "largest": 1.0,
}


@table.register(Certificates)
def certificates_table(certificates: Certificates) -> TextTable:
    """How large radii are: of all inputs and, with labels, of correct and wrong predictions."""
    radius = certificates.radius
    groups = {"all": radius}
    caption = (
        f"l2 in the units of the input, {certificates.guarantee}, rounding included"
    )
    if certificates.label is not None:
        correct = certificates.correct
        groups |= {"correct": radius[correct], "wrong": radius[~correct]}
        # The mean over no inputs is NaN.
        if len(certificates):
            caption = f"clean accuracy {certificates.clean_accuracy:.2%}; {caption}"
    rows = []
    for name, radii in groups.items():
        rows.append((name, f"{len(radii):,}", *_quantiles(radii)))
    title = f"Certified radii of {len(certificates):,} inputs"
    return TextTable(title, ("which", "inputs", *_QUANTILES), rows, caption)


def _quantiles(radius: Tensor) -> list[str]:
    """Entries of the sorted radii, rounded down to an existing one."""
    if len(radius) == 0:
        return [NOTHING] * len(_QUANTILES)
    ordered = radius.sort().values
    last = len(ordered) - 1
    # Never interpolated: what the table shows is a radius that some input has.
    return [f"{ordered[int(share * last)]:.4g}" for share in _QUANTILES.values()]


@plot.register(Certificates)
def certificates_figure(certificates: Certificates, unit: str = "l2") -> Figure:
    """Certified accuracy over ε; without labels, the distribution of the radii."""
    if certificates.label is None:
        return radius_histogram(certificates.radius.numpy(), unit=unit)
    radii = certificates.radius[certificates.correct].numpy()
    return accuracy_curve({"certified": (radii, len(certificates))}, unit=unit)


@frame.register(Certificates)
def certificates_frame(certificates: Certificates) -> pandas.DataFrame:
    """One row per input: prediction, margin, radius and, with labels, label and whether the prediction is right."""
    columns = {
        "prediction": certificates.prediction.numpy(),
        "margin": certificates.margin.numpy(),
        "radius": certificates.radius.numpy(),
    }
    if certificates.label is not None:
        columns["label"] = certificates.label.numpy()
        columns["correct"] = certificates.correct.numpy()
    return data_frame(columns)
