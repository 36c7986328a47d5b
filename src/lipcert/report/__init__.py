"""Reports: what run folders hold, as one page, figures and tables. Nothing is computed again."""

from lipcert.report.comparison import compare
from lipcert.report.page import write_report

__all__ = ["compare", "write_report"]
