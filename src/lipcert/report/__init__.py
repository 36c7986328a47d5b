"""Reports: what run folders hold, as one page, figures and tables. Nothing is computed again."""

from lipcert.report.page import write_report
from lipcert.report.side_by_side import compare

__all__ = ["compare", "write_report"]
