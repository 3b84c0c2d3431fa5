"""Runs in the terminal: progress bars, then the table and the report."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from glocal.cli.progress import download_bars, experiment_bars, part_step_callback, step_callback
from glocal.cli.tables import print_findings, print_groups, print_new_clients, print_table
from glocal.core.errors import InputError
from glocal.core.files import lock_folder, write_text
from glocal.datasets import ProgressCallback
from glocal.report import study_markdown, write_report, write_study_report
from glocal.studies import Settings
from glocal.studies.findings import read_findings, write_findings
from glocal.studies.merge_findings import merge_findings
from glocal.studies.run import is_run, read_results, run_study
from glocal.studies.study import Study
from glocal.studies.study_parts import (
    is_study,
    record_session,
    remove_unstarted,
    run_parts,
    write_study,
)


def run_and_report(settings: Settings, folder: Path) -> None:
    """Run or resume a study, print its table and write its report."""
    with _show_progress(folder) as (report, bars):
        show = step_callback(bars)
        for step in run_study(settings, folder, report=report):
            show(step)
    show_results(folder)


def show_results(folder: Path) -> None:
    """Print the results of a run, and write its report."""
    results = read_results(folder)
    print_table(results)
    print_groups(results)
    print_new_clients(results)
    print(f"report: {write_report(folder)}")


def start_parts(
    study: Study, folder: Path, *, patterns: Sequence[str], changes: Sequence[str], command: str
) -> None:
    """Start some parts of a paper's study, or all."""
    with lock_folder(folder):
        parts = write_study(study, folder, patterns=patterns, changes=changes)
        try:
            _run_parts(parts, folder, command)
        except InputError:
            remove_unstarted(folder)
            raise


def resume_parts(parts: Mapping[str, Settings], folder: Path, command: str) -> None:
    """Run or resume a paper's study, print its tables and write its report."""
    with lock_folder(folder):
        _run_parts(parts, folder, command)


def _run_parts(parts: Mapping[str, Settings], folder: Path, command: str) -> None:
    record_session(folder, parts, command)
    with _show_progress(folder) as (report, bars):
        show = part_step_callback(bars)
        for step in run_parts(parts, folder, report=report):
            show(step)
    report_study([folder], folder)


@contextmanager
def _show_progress(folder: Path) -> Iterator[tuple[ProgressCallback, Progress]]:
    """Bars for downloads and experiments; a stop prints how to continue."""
    console = Console(stderr=True)
    console.print(f"writing to {folder}", highlight=False)
    try:
        with download_bars() as report, experiment_bars() as bars:
            yield report, bars
    except KeyboardInterrupt:
        message = "stopped; nothing was saved"
        if is_study(folder) or is_run(folder):
            message = f"stopped; continue with: glocal resume {folder}"
        console.print(message, highlight=False)
        raise


def report_study(paths: Sequence[Path], folder: Path) -> None:
    """Print a paper's study, and write it as a page, as text and as numbers."""
    findings = merge_findings([read_findings(path) for path in paths])
    if not findings.parts:
        raise InputError(
            f"report: {paths[0]} has no finished experiment yet; "
            f"wait for one, or continue with `glocal resume {paths[0]}`"
        )
    print_findings(findings)
    write_findings(findings, folder / "findings.json")
    write_text(folder / "tables.md", study_markdown(findings))
    print(f"report: {write_study_report(findings, folder)}")


def free_folder(preferred: Path) -> Path:
    """The preferred folder, or the first of preferred-2, preferred-3, ... that does not exist."""
    folder, number = preferred, 1
    while folder.exists():
        number += 1
        folder = preferred.with_name(f"{preferred.name}-{number}")
    return folder
