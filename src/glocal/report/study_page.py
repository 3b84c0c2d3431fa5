"""The page of a paper's study: its claims, the results beside its own, and figures."""

import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from glocal.report.comparison import ComparisonTable, all_tables, sweep_points
from glocal.report.drawing import BACKGROUND, FOREGROUND, colour_theme, figure_html
from glocal.report.goals import GOAL_HEADS, goal_cells, goal_text, ways_to_goal
from glocal.report.page import figure_grid, section, write_page
from glocal.report.study_figures import study_drawings
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
from glocal.report.tables import boxed_table, grouped_head, scrolling
from glocal.studies.findings import Findings
from glocal.studies.study import StudyPart


def write_study_report(findings: Findings, folder: Path) -> Path:
    """Write folder/report.html from what a study has found so far."""
    sections = [_notice(findings), _claims(findings), _tables(findings), _figures(findings)]
    sections += [_goals(findings), _sweeps(findings), _time(findings)]
    return write_page(
        folder, title=findings.study.title, summary=_summary(findings), sections=sections
    )


def _summary(findings: Findings) -> str:
    return "\n".join(
        f"<p>{_html(words)}</p>" for words in (about_paper(findings), about_run(findings))
    )


def _notice(findings: Findings) -> str:
    """What is still open, and what was run with other settings than the study's."""
    notices = [
        words
        for words in (about_open(findings), about_changes(findings), about_left_out(findings))
        if words
    ]
    return "\n".join(f'<p class="notice">{_html(words)}</p>' for words in notices)


def _claims(findings: Findings) -> str:
    if not findings.study.claims:
        return ""
    rows = [_claim_row(*claim_cells(findings, verdict)) for verdict in findings.verdicts()]
    table = boxed_table(_head(CLAIM_HEADS, 2), rows, "Claims") if rows else ""
    return section("What the paper claims", f"<p>{_html(claims_text(findings))}</p>\n{table}")


def _claim_row(says: str, word: str, *numbers: str) -> str:
    marked = f'<span class="below">{word}</span>' if word == "fails" else word
    cells = "".join(f"<td>{number}</td>" for number in numbers)
    return (
        f'<tr><th scope="row" class="says name">{_html(says)}</th><td '
        f'class="name">{marked}</td>{cells}</tr>'
    )


def _tables(findings: Findings) -> str:
    """Every table with the protocols side by side, first what they mean."""
    tables = all_tables(findings)
    meaning = "".join(f"<li>{_html(protocol)}</li>\n" for protocol in about_protocols(findings))
    note = f'<p class="note">{_html(about_columns(findings))}</p>'
    inner = f"<ul>{meaning}</ul>{note}\n" + "\n".join(map(_side_by_side, tables))
    return section("Beside the paper’s tables", inner) if tables else ""


def _side_by_side(table: ComparisonTable) -> str:
    head = grouped_head(
        ("Method",), [(column.group, _html(column.head)) for column in columns_of(table)]
    )
    rows = (
        f"<tr>{_name(name)}{''.join(map(_cell, entries(table, name)))}</tr>" for name in table.rows
    )
    box, text = boxed_table(head, rows, table.title), "<br>".join(map(_html, notes(table)))
    return (
        f'<h3>{escape(table.title)}</h3>\n<div class="dense">{box}</div>\n<p '
        f'class="note">{text}</p>'
    )


def _cell(entry: Entry) -> str:
    text = f'<span class="below">{entry.text} {entry.mark}</span>' if entry.mark else entry.text
    note = f'<span class="small">{escape(entry.note)}</span>' if entry.note else ""
    return f"<td>{text}{note}</td>"


def _figures(findings: Findings) -> str:
    """Every figure with measurements; the lead figure, or the only one, is wide and first."""
    with colour_theme(FOREGROUND, BACKGROUND):
        drawn = {
            name: drawing._replace(caption=_html(drawing.caption))
            for name, drawing in study_drawings(findings).items()
        }
        lead = findings.study.lead_figure
        wide = [name for name in drawn if name == lead or len(drawn) == 1]
        first = "".join(figure_html(drawn.pop(name), name, kind="beside") for name in wide)
        others = (
            figure_grid(figure_html(drawing, name) for name, drawing in drawn.items())
            if drawn
            else ""
        )
    return section("Figures", first + others) if first or others else ""


def _goals(findings: Findings) -> str:
    """How soon the goal is reached, for every part that has one."""
    tables = []
    for name, part in findings.study.parts.items():
        ways = ways_to_goal(findings, name)
        if ways:
            text = f"<p>{_html(goal_text(findings, name))}</p>"
            table = _table(GOAL_HEADS, map(goal_cells, ways), "Goal")
            tables.append(f"{_part_heading(part)}\n{text}\n{table}")
    return section("How soon the goal is reached", "\n".join(tables)) if tables else ""


def _part_heading(part: StudyPart) -> str:
    return f"<h3>{_html(f'{part.title}, `{part.protocol}`')}</h3>"


def _sweeps(findings: Findings) -> str:
    """The splits of every part that has them."""
    tables = []
    for name, part in findings.study.parts.items():
        splits = sweep_points(findings, name)
        if splits:
            table = _plain(split_heads(findings), map(split_cells, splits), "Splits")
            tables.append(f"{_part_heading(part)}\n{table}")
    if not tables:
        return ""
    note = f"<p>{_html(SPLITS_NOTE)}</p>\n"
    return section("How much to share", note + "\n".join(tables))


def _time(findings: Findings) -> str:
    """How long each part took, and what was typed."""
    lines = escape("\n".join(commands(findings)))
    typed = scrolling(f"<pre>{lines}</pre>", "Commands") if lines else ""
    return section(
        "Time and commands", f"{_plain(TIME_HEADS, time_rows(findings), 'Time')}\n{typed}"
    )


def _plain(heads: Sequence[str], rows: Iterable[Sequence[str]], label: str) -> str:
    """A table of few columns."""
    return f'<div class="brief">{_table(heads, rows, label)}</div>'


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], label: str) -> str:
    """A table of one column of words, then numbers."""
    written = (
        f"<tr>{_name(name)}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
        for name, *cells in rows
    )
    return boxed_table(_head(heads, 1), written, label)


def _head(heads: Sequence[str], words: int) -> str:
    """One row of heads, the first few of them over words."""
    named = "".join(f'<th scope="col" class="name">{head}</th>' for head in heads[:words])
    numbers = "".join(f'<th scope="col">{head}</th>' for head in heads[words:])
    return f"<tr>{named}{numbers}</tr>"


def _name(words: str) -> str:
    return f'<th scope="row" class="name">{_html(words)}</th>'


def _html(words: str) -> str:
    """Text as HTML: names in backticks as code, and text between double asterisks strong."""
    return re.sub(
        r"\*\*(.+?)\*\*",
        r"<strong>\1</strong>",
        re.sub("`([^`]*)`", r"<code>\1</code>", escape(words)),
    )
