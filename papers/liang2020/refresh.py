"""Rewrite the generated parts of the paper's pages from results/, and redraw their figures.

python papers/liang2020/refresh.py

A page of a study holds the report of its results between `<!-- results of NAME.json -->` and
`<!-- end -->`. docs/reproduction.md of the repository holds a table of the studies and one of all
claims, between `<!-- studies -->` or `<!-- claims -->` and `<!-- end -->`. Their rows are in
docs/claims.toml: what the paper claims, and the numbers to show, as placeholders. Each row's
template is filled in twice, with the paper's numbers and with ours:

    {paper-2 | LG 1200+100 | local}    a score; the measure "sent" is the number of parameters
    {lead | STATEMENT}                 the lead of a claim of the study, in points
    {goal | longest | LG}              the share of FedAvg's parameters that reach its accuracy

The verdict is that of the study's claims in `statements`, unless the row has words of its own.
"""

import os
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from glocal.report import draw_study, study_markdown
from glocal.report.comparison import comparison_row, published_lead, seeds_of
from glocal.report.formatting import PERCENT, duration, signed
from glocal.report.goals import ways_to_goal
from glocal.studies.findings import Findings, Verdict, read_findings
from liang2020.theory_figure import draw_theory

PACKAGE = Path(__file__).resolve().parent
RESULTS = PACKAGE / "results"
DOCS = PACKAGE / "docs"
IMAGES = PACKAGE / "images"
SUMMARY = PACKAGE.parents[1] / "docs" / "reproduction.md"
STUDY_HEADS = ("Study", "In the paper", "Seeds", "Time")
CLAIM_HEADS = ("Where", "Claim", "Published", "Ours", "Verdict")

_REPORT = re.compile(r"<!-- results of (?P<name>[\w.-]+) -->\n.*?<!-- end -->", re.DOTALL)
_TABLE = re.compile(r"<!-- (?P<name>studies|claims) -->\n.*?<!-- end -->", re.DOTALL)
_PLACEHOLDER = re.compile(r"\{([^}]+)\}")


def main() -> None:
    """Rewrite every page and draw every figure."""
    for page, text in refreshed_pages().items():
        page.write_text(text, encoding="utf-8")
        print(f"written: {page.name}")
    for name in reported_results():
        for picture in draw_study(findings_of(name), IMAGES):
            print(f"drawn: {picture.name}")
    print(f"drawn: {draw_theory(IMAGES / 'theory.png').name}")


def refreshed_pages() -> dict[Path, str]:
    """Every page with generated parts, as the committed results have it."""
    texts = {page: page.read_text(encoding="utf-8") for page in [*study_pages(), SUMMARY]}
    return {page: refreshed(text) for page, text in texts.items()}


def study_pages() -> list[Path]:
    """The pages that hold the report of a study's results."""
    return [page for page in sorted(DOCS.glob("*.md")) if _REPORT.search(page.read_text("utf-8"))]


def reported_results() -> list[str]:
    """The names of the results that a page reports."""
    return [
        match["name"]
        for page in study_pages()
        for match in _REPORT.finditer(page.read_text(encoding="utf-8"))
    ]


def refreshed(text: str) -> str:
    """A page with its generated parts written anew."""
    text = _REPORT.sub(lambda match: _report(match["name"]), text)
    return _TABLE.sub(lambda match: _summary(match["name"]), text)


def _report(name: str) -> str:
    report = study_markdown(findings_of(name)).strip()
    return f"<!-- results of {name} -->\n\n{report}\n\n<!-- end -->"


def _summary(name: str) -> str:
    table = studies_table() if name == "studies" else claims_table()
    return f"<!-- {name} -->\n\n{table}\n\n<!-- end -->"


@cache
def findings_of(name: str) -> Findings:
    """The findings in a file of results/."""
    return read_findings(RESULTS / name)


def studies_table() -> str:
    """Every study with the paper's tables and figures, how many seeds it ran, and how long."""
    return _table(STUDY_HEADS, map(study_cells, _rows("studies")))


def claims_table() -> str:
    """Every claim with the paper's numbers, ours and the verdict."""
    return _table(CLAIM_HEADS, map(claim_cells, _rows("claims")))


def _rows(name: str) -> list[Any]:
    """The rows of a table of docs/claims.toml."""
    rows: list[Any] = tomllib.loads((DOCS / "claims.toml").read_text(encoding="utf-8"))[name]
    return rows


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rule = [":--"] * len(heads)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, rule, *rows))


def _link(words: str, page: str) -> str:
    return f"[{words}]({os.path.relpath(DOCS / page, SUMMARY.parent)})"


def study_cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A study: its page, its place in the paper, the seeds of its parts, the time of all."""
    findings = findings_of(row["results"])
    seeds = sorted({seeds_of(findings, part) for part in findings.parts})
    seconds = sum(part["seconds"] for part in findings.parts.values())
    return (
        _link(findings.study.name, row["page"]),
        row["where"],
        " or ".join(map(str, seeds)),
        duration(seconds),
    )


def claim_cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A claim: where the paper has it, the claim, the paper's numbers, ours, the verdict."""
    numbers = row.get("numbers", "–")
    return (
        _link(row["where"], row["page"]),
        row["claim"],
        fill(row.get("published", numbers), row, published_value),
        fill(row.get("ours", numbers), row, our_value),
        row.get("verdict") or verdict(row),
    )


Value = Callable[[Findings, list[str]], str]


def fill(template: str, row: dict[str, Any], value: Value) -> str:
    """A template with every placeholder replaced by its value."""

    def replaced(match: re.Match[str]) -> str:
        fields = [field.strip() for field in match[1].split("|")]
        return value(findings_of(row["results"]), fields)

    return _PLACEHOLDER.sub(replaced, template)


def our_value(findings: Findings, fields: list[str]) -> str:
    """Our number for a placeholder."""
    match fields:
        case ["lead", statement]:
            return signed(_verdict(findings, statement).lead.mean)
        case ["goal", part, name]:
            return _goal_share(findings, part, name)
        case [part, name, measure]:
            row = comparison_row(findings, part, name, _published_row(findings, part, name))
            return str(row.sent.ours if measure == "sent" else row.scores[measure].ours)
    raise ValueError(f"claims.toml: no number is named {fields}")


def published_value(findings: Findings, fields: list[str]) -> str:
    """The paper's number for a placeholder."""
    match fields:
        case ["lead", statement]:
            lead = published_lead(findings, _verdict(findings, statement).claim)
            return "–" if lead is None else signed(lead)
        case [part, name, measure] if part != "goal":
            row = comparison_row(findings, part, name, _published_row(findings, part, name))
            return str(row.sent.paper if measure == "sent" else row.scores[measure].paper)
    raise ValueError(f"claims.toml: the paper prints no number named {fields}")


def _published_row(findings: Findings, part: str, name: str) -> Any:
    return findings.study.parts[part].published.get(name)


def _goal_share(findings: Findings, part: str, name: str) -> str:
    """The parameters to the goal's accuracy relative to the goal's own row, in percent."""
    (way,) = (way for way in ways_to_goal(findings, part) if way.row == name)
    return "never" if way.way is None else f"{PERCENT * way.share:.1f} %"


def verdict(row: dict[str, Any]) -> str:
    """How many of the row's claims hold, fail and are open, such as "holds (3)" or "fails"."""
    findings = findings_of(row["results"])
    statuses: Counter[str] = Counter()
    for pattern in row["statements"]:
        statuses.update(each.status for each in _verdicts(findings, pattern))
    if statuses.total() == 1:
        return next(iter(statuses))
    counts = [(status, statuses[status]) for status in ("holds", "open", "fails")]
    return ", ".join(f"{status} ({count})" for status, count in counts if count)


def _verdict(findings: Findings, pattern: str) -> Verdict:
    """The only claim that matches a pattern."""
    verdicts = _verdicts(findings, pattern)
    if len(verdicts) > 1:
        raise ValueError(f"claims.toml: {len(verdicts)} claims match '{pattern}'; one was expected")
    return verdicts[0]


def _verdicts(findings: Findings, pattern: str) -> list[Verdict]:
    """The claims whose statements match a pattern, upper and lower case alike."""
    verdicts = [
        each
        for each in findings.verdicts()
        if fnmatchcase(each.claim.statement.lower(), pattern.lower())
    ]
    if not verdicts:
        raise ValueError(f"claims.toml: no claim of {findings.study.name} matches '{pattern}'")
    return verdicts


if __name__ == "__main__":
    main()
