"""Reports: what run folders hold, as one page, figures and tables. Nothing is computed again."""

from lipcert.report.folder import RunFolder, read_runs
from lipcert.report.page import PAGE, write_report
from lipcert.report.table import Comparison, compare

__all__ = ["PAGE", "Comparison", "RunFolder", "compare", "read_runs", "write_report"]
