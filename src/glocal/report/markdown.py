"""The report of a paper's study as GitHub markdown, to be kept beside the code."""

from collections.abc import Iterable, Sequence

from glocal.report.comparison import ComparisonTable, all_tables, sweep_points
from glocal.report.goals import GOAL_HEADS, goal_cells, goal_text, ways_to_goal
from glocal.report.study_text import (
    CLAIM_HEADS,
    SPLITS_NOTE,
    TIME_HEADS,
    Entry,
    about_changes,
    about_columns,
    about_left_out,
    about_open,
    about_paper,
    about_protocols,
    about_run,
    claim_cells,
    claims_text,
    columns_of,
    commands,
    entries,
    notes,
    split_cells,
    split_heads,
    time_rows,
)
from glocal.studies.findings import Findings


def study_markdown(findings: Findings) -> str:
    """Everything that was found so far, beside what the paper printed."""
    blocks = [
        f"## {findings.study.title}",
        *_summary(findings),
        *_claims(findings),
        *_tables(findings),
    ]
    blocks += [*_goals(findings), *_sweeps(findings), *_times(findings), *_commands(findings)]
    return "\n\n".join(filter(None, blocks)) + "\n"


def _summary(findings: Findings) -> list[str]:
    lines = [
        about_paper(findings),
        about_run(findings),
        about_open(findings),
        about_changes(findings),
        about_left_out(findings),
    ]
    return [*lines, "\n".join(f"- {protocol}" for protocol in about_protocols(findings))]


def _claims(findings: Findings) -> list[str]:
    if not findings.study.claims:
        return []
    rows = [claim_cells(findings, verdict) for verdict in findings.verdicts()]
    table = _table(CLAIM_HEADS, rows, left=2) if rows else ""
    return ["### What the paper claims", claims_text(findings), table]


def _tables(findings: Findings) -> list[str]:
    tables = all_tables(findings)
    return (
        [about_columns(findings), *(block for table in tables for block in _side_by_side(table))]
        if tables
        else []
    )


def _side_by_side(table: ComparisonTable) -> list[str]:
    heads = ["Method", *(column.alone for column in columns_of(table))]
    rows = [[name, *map(_cell, entries(table, name))] for name in table.rows]
    return [
        f"### {table.title}",
        _table(heads, rows),
        "\n".join(f"- {note}" for note in notes(table)),
    ]


def _cell(entry: Entry) -> str:
    note = f" ({entry.note})" if entry.note else ""
    return f"{entry.text}{note} {entry.mark}".rstrip()


def _goals(findings: Findings) -> list[str]:
    """How soon the goal is reached, of every part that has one."""
    blocks = []
    for name, part in findings.study.parts.items():
        if ways := ways_to_goal(findings, name):
            title = f"### How soon the goal is reached, {part.title}, `{part.protocol}`"
            blocks += [title, goal_text(findings, name), _table(GOAL_HEADS, map(goal_cells, ways))]
    return blocks


def _sweeps(findings: Findings) -> list[str]:
    """The splits of every part that has them."""
    blocks = []
    for name, part in findings.study.parts.items():
        if splits := sweep_points(findings, name):
            table = _table(split_heads(findings), map(split_cells, splits))
            blocks += [
                f"### How much to share, {part.title}, `{part.protocol}`",
                SPLITS_NOTE,
                table,
            ]
    return blocks


def _times(findings: Findings) -> list[str]:
    return ["### Time", _table(TIME_HEADS, time_rows(findings))]


def _commands(findings: Findings) -> list[str]:
    lines = commands(findings)
    return ["### Commands", "\n".join(["```sh", *lines, "```"])] if lines else []


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """A table whose first columns hold words and whose other ones hold numbers."""
    rule = [":--" if place < left else "--:" for place in range(len(heads))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, rule, *rows))
