"""Tables in the terminal."""

from collections.abc import Iterable, Sequence
from math import isfinite
from statistics import fmean, stdev

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from glocal.core.files import Json
from glocal.studies.findings import Findings
from glocal.studies.study import Published, Score, Study

_WIDEST = 500


def print_table(results: dict[str, list[Json]]) -> None:
    """One row per case: means over seeds, and the spread where there is more than one."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("case", no_wrap=True)
    for heading in ("Local\nTest %", "worst\ntenth %", "New\nTest %", "sent", "paper's\ncount", "never\nsampled"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, seeds in results.items():
        local, worst = ([result["local_test"][key] for result in seeds] for key in ("mean", "worst_tenth"))
        new = [result["new_test"]["logits"] if result["new_test"] else None for result in seeds]
        sent = sum(result["ledger"]["total"]["bytes"] for result in seeds) / len(seeds)
        paper = sum(result["ledger"]["paper"]["parameters"] for result in seeds) / len(seeds)
        never = max(result["never_sampled"] for result in seeds)
        counted = f"{paper:.1e}".replace("e+", "e") if paper else "0"
        figures = (*map(percents, (local, worst, new)), readable(sent), counted, str(never))
        table.add_row(escape(name), *figures)
    Console().print(table)


def print_groups(results: dict[str, list[Json]]) -> None:
    """What became of each group in each case: accuracy early, at its best and in the end, and what it forgot."""
    cases = {name: seeds for name, seeds in results.items() if seeds[0].get("groups")}
    if not cases:
        return
    table = _wide("case", "group", right=("after its\nfirst round %", "best %", "last %", "forgetting\nin points"))
    for case, seeds in cases.items():
        for group in seeds[0]["groups"]:
            found = [result["groups"][group] for result in seeds if result["groups"][group]]
            figures = [percents([each[column] for each in found]) for column in ("arrival", "best", "last", "forgetting")]
            table.add_row(escape(case), escape(group), *figures)
    print()
    _print_wide(table)


def print_newcomers(results: dict[str, list[Json]]) -> None:
    """One row for every case at whose end a newcomer came; nothing where none did."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("case", no_wrap=True)
    for heading in ("normal %,\nbefore", "\nafter", "new %,\nbefore", "\nafter", "sent"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, seeds in results.items():
        if "arrival" in seeds[0]:
            met = [result["arrival"] for result in seeds]
            before = [result["new_test"]["logits"] if result["new_test"] else None for result in seeds]
            columns = [before, *([row[key] for row in met] for key in ("normal", "rotated_before", "rotated"))]
            table.add_row(escape(name), *map(percents, columns), readable(fmean(row["ledger"]["total"]["bytes"] for row in met)))
    if table.row_count:
        Console().print(table)


def percents(values: Sequence[float | None], digits: int = 1) -> str:
    """Mean and standard deviation over seeds; one alone in two digits."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return f"{100 * known[0]:.2f}" if known else "-"
    return f"{100 * fmean(known):.{digits}f} ± {100 * stdev(known):.{digits}f}"


def percent(value: float | None) -> str:
    """One share in percent."""
    return "-" if value is None else f"{100 * value:.2f} %"


def readable(size: float) -> str:
    """Bytes for people.

    >>> readable(1_234_567)
    '1.2 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def print_classes(counts: list[list[int]]) -> None:
    """Devices down, classes across; the fuller the block, the more examples."""
    most = max(max(row) for row in counts) or 1
    shades = " ░▒▓█"
    table = Table("device", *(str(label) for label in range(len(counts[0]))), "examples", box=None, pad_edge=False)
    for device, row in enumerate(counts):
        blocks = [shades[-(-count * (len(shades) - 1) // most)] * 2 for count in row]
        table.add_row(str(device), *blocks, str(sum(row)))
    Console().print(table)


def show_study(study: Study) -> None:
    """What is claimed, the parts, and the paper's numbers."""
    print(f"{study.name}: {study.title}\n{study.source}\n\n{study.says}\n")
    known = {(name, case): part.published_for(case) for name, part in study.parts.items() for case in part.settings.cases}
    told = _printed_measures(study, known.values())
    heads = [study.measures[measure].removesuffix(" Test") for measure in told]
    if any(row.printed for row in known.values() if row):
        heads.append("sent")
    table = _wide("part", "case", right=("rounds", *(f"paper: {head}" for head in heads[:1]), *heads[1:]))
    for (name, case), row in known.items():
        settings, scores = study.parts[name].settings.cases[case], row.by_measure(study.measures) if row else {}
        rounds = f"{settings.after_round or ''}{' + ' if settings.after else ''}{settings.rounds}"
        cells = [*(str(scores.get(measure, "")) for measure in told), row.printed if row else ""]
        table.add_row(name, escape(case), rounds, *cells[: len(heads)])
    _print_wide(table)
    print("\nClaims, tested over paired seeds:")
    for claim in study.claims:
        print(f"- {claim.says}{f' (at most {claim.margin:g} points below)' if claim.margin else ''}")


def print_findings(findings: Findings) -> None:
    """Every row beside the paper's and how far apart they are, then the claims."""
    study = findings.study
    cases = {(name, case): figures for name, found in findings.parts.items() for case, figures in found["cases"].items()}
    known = {(name, case): study.parts[name].published_for(case) for name, case in cases}
    told = _printed_measures(study, known.values())
    heads = []
    for measure, words in study.measures.items():
        heads += [f"{words.removesuffix(' Test')} %", *(("paper", "apart") if measure in told else ())]
    table = _wide("part", "case", right=heads)
    for (name, case), figures in cases.items():
        row, cells = known[name, case], []
        scores = row.by_measure(study.measures) if row else {}
        for measure in study.measures:
            ours = figures.get(measure, [])
            cells += [percents(ours, 2), *(_beside(ours, scores.get(measure)) if measure in told else ())]
        table.add_row(name, escape(case), *cells)
    _print_wide(table)
    for claim, lead, word in findings.verdicts():
        reach = f"[{lead.low:+.2f}, {lead.high:+.2f}]" if isfinite(lead.low) else "(one seed)"
        print(f"{word:5}  {claim.says}: {lead.mean:+.2f} {reach}")


def _wide(*left: str, right: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in left:
        table.add_column(heading, no_wrap=True)
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _print_wide(table: Table) -> None:
    """A table whose rows are wider than many a terminal: lines are left whole."""
    Console(width=max(Console().width, _WIDEST)).print(table)


def _printed_measures(study: Study, rows: Iterable[Published | None]) -> list[str]:
    """The measures that the paper prints of any of these rows."""
    most = max((len(row.scores) for row in rows if row), default=0)
    return [*study.measures][:most]


def _beside(values: Sequence[float | None], published: Score | None) -> tuple[str, str]:
    """The published score, and how far our mean is from it, in points."""
    if published is None:
        return "", ""
    known = [value for value in values if value is not None]
    return str(published), f"{100 * fmean(known) - published.mean:+.2f}" if known else ""
