"""The report of a run or a study: one HTML page with tables and figures, readable offline."""

from glocal.report.audit_page import write_audit_report
from glocal.report.classes import draw_classes
from glocal.report.deploy_page import write_deploy_report
from glocal.report.join_page import draw_join, write_join_report
from glocal.report.markdown import study_markdown
from glocal.report.page import write_report
from glocal.report.samples import draw_samples
from glocal.report.study_figures import draw_study
from glocal.report.study_page import write_study_report

__all__ = [
    "draw_classes",
    "draw_join",
    "draw_samples",
    "draw_study",
    "study_markdown",
    "write_audit_report",
    "write_deploy_report",
    "write_join_report",
    "write_report",
    "write_study_report",
]
