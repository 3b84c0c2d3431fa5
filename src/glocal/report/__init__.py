"""The report of a run: one page of HTML with tables and figures that opens anywhere, offline."""

from glocal.report.classes import draw_classes
from glocal.report.page import write_report

__all__ = ["draw_classes", "write_report"]
