"""Pictures and tables from plain numbers; knows nothing of networks."""

from lipcert.figures.plots import accuracy_curve, bars, contributions, draw_lines, heat_map, lines, radius_histogram
from lipcert.figures.style import inline_svg, new_figure, save_figure
from lipcert.figures.tables import TextTable, data_frame

__all__ = [
    "TextTable",
    "accuracy_curve",
    "bars",
    "contributions",
    "data_frame",
    "draw_lines",
    "heat_map",
    "inline_svg",
    "lines",
    "new_figure",
    "radius_histogram",
    "save_figure",
]
