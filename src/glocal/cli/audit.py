"""The audit of a saved run in the terminal: three tables, then a page."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from glocal.cli.join import reserve_folder
from glocal.cli.progress import download_bars
from glocal.core.errors import InputError
from glocal.core.files import Json
from glocal.report import write_audit_report
from glocal.report.audit_page import read_audit
from glocal.report.audit_text import (
    KNOWLEDGE,
    audit_headline,
    differences,
    metric_of,
    with_interval,
)
from glocal.studies.metric_format import AUC
from glocal.studies.run import read_results, slug
from glocal.studies.saved_audit import AuditQuery, SavedAudit
from glocal.studies.saved_experiment import open_experiment


@dataclass(frozen=True)
class AuditTarget:
    """The experiment and seed of a run to audit, and the output folder."""

    folder: Path
    experiment: str | None
    seed: int | None
    out: Path | None

    def output_folder(self, audit: SavedAudit) -> Path:
        """The folder to write; an audit of the same attribute, experiment and seed is replaced."""
        seeds = len(read_results(self.folder)[audit.saved.experiment])
        words = [audit.name, audit.saved.experiment, *([f"seed {audit.seed}"] if seeds > 1 else [])]
        return self.out or self.folder / "audits" / "-".join(map(slug, words))

    def require_free_output(self) -> None:
        """Refuse to overwrite anything but an audit."""
        held = [
            name
            for name in ("settings.json", "study.json", "join.json")
            if self.out and (self.out / name).exists()
        ]
        if held:
            raise InputError(
                f"audit: {self.out} holds other files ({held[0]}); choose another --out"
            )


def audit_run(target: AuditTarget, question: AuditQuery, *, command: str) -> None:
    """Audit, print the results, and save them in a folder of their own."""
    target.require_free_output()
    with download_bars() as report:
        saved = open_experiment(target.folder, target.experiment, seed=target.seed, report=report)
    audit = SavedAudit(saved, question)
    output_folder, console = target.output_folder(audit), Console(stderr=True)
    with reserve_folder(output_folder, "audit"):
        with console.status(
            f"training attackers of {audit.name} on the output of '{audit.settings.layer}'"
        ):
            figures = audit.figures()
        audit.save(output_folder, figures, {"run": target.folder.name, "command": command})
    show_audit(output_folder)


def show_audit(folder: Path) -> None:
    """Write the page of an audit, and print its results."""
    report, page = read_audit(folder / "audit.json"), write_audit_report(folder)
    print(
        f"{report['experiment']}, seed {report['seed']}; "
        f"representation: the output of '{report['settings']['layer']}' ({report['layer_reason']})"
    )
    print(audit_headline(report))
    _print_leaks(report)
    _print_groups(report)
    print()
    for name, _ in differences(report):
        print(name)
    print(f"report: {page}")


def _print_leaks(report: Json) -> None:
    """One row per attacker: its AUC in percent with the interval, by what it knows."""
    cells = {(row["attacker"], row["knowledge"]): with_interval(row) for row in report["leaks"]}
    body: list[list[str]] = []
    for attacker in dict.fromkeys(row["attacker"] for row in report["leaks"]):
        body.append([attacker, *(cells.get((attacker, each), "-") for each in KNOWLEDGE)])
    _print(["AUC, %", *KNOWLEDGE.values()], body)


def _print_groups(report: Json) -> None:
    """One row per group; the rates of class 1 only where there are two classes."""
    metric, rates = metric_of(report), {}
    if report["classes"] == 2:
        rates = {
            "selection_rate": "selected %",
            "true_positive_rate": "true pos. %",
            "false_positive_rate": "false pos. %",
        }
    body = []
    for row in report["groups"]:
        name, people = report["values"][row["group"]], f"{row['people']:,}"
        figures = [metric.number(row["figure"]), *(AUC.number(row[rate]) for rate in rates)]
        body.append([name, people, *figures])
    _print([report["attribute"], "people", metric.label, *rates.values()], body)


def _print(heads: Sequence[str], body: Sequence[Sequence[str]]) -> None:
    table = Table(escape(heads[0]), box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in heads[1:]:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in body:
        table.add_row(*map(escape, row))
    print()
    Console().print(table, highlight=False)
