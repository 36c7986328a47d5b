"""How results look: tables, figures and data frames of bounds, certificates and runs, and what they are drawn with."""

from lipcert.display import bound_view, certificates_view, run_view
from lipcert.display.frames import data_frame
from lipcert.display.plots import (
    accuracy_curve,
    contributions,
    draw_lines,
    heat_map,
    lines,
    radius_histogram,
)
from lipcert.display.style import inline_svg, new_figure, save_figure
from lipcert.display.text_table import NOTHING, TextTable
from lipcert.display.views import frame, plot, table

__all__ = [
    "NOTHING",
    "TextTable",
    "accuracy_curve",
    "bound_view",
    "certificates_view",
    "contributions",
    "data_frame",
    "draw_lines",
    "frame",
    "heat_map",
    "inline_svg",
    "lines",
    "new_figure",
    "plot",
    "radius_histogram",
    "run_view",
    "save_figure",
    "table",
]
