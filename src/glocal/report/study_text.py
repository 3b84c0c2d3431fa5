"""The cells and sentences that a study's page and its markdown have in common.

`Names` are in backticks.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import NamedTuple

from glocal.report.comparison import (
    ComparisonTable,
    Row,
    SweepPoint,
    changes_of,
    left_out,
    missing_experiments,
    published_lead,
    score,
    seeds_of,
)
from glocal.report.formatting import PERCENT, duration, mean_power_of_ten, pluralize, signed, size
from glocal.studies.findings import Findings, Verdict
from glocal.studies.study import MEASURES

EMPTY_CELL = "–"
TIME_HEADS = ("Part", "Seeds", "Time")
SPLITS_NOTE = (
    "Every split starts from the same FedAvg model. The first layers are nearest the input, the "
    "last nearest the output. The number of shared parameters is counted on the study’s model."
)
_BELOW = "below the published mean less its standard deviation"
_ABOVE = "above the published mean plus its standard deviation"
CLAIM_HEADS = ("Claim", "Verdict", "Published lead", "Our lead, points", "95 % interval")


class Entry(NamedTuple):
    """A cell: a number, a note beside it, and the mark of one that is worse than published."""

    text: str
    note: str = ""
    mark: str = ""


class Column(NamedTuple):
    """A column's heads: its group's, its own below that, and one for tables without groups."""

    group: str
    head: str
    alone: str


def about_paper(findings: Findings) -> str:
    """What the paper says, and where."""
    return f"{findings.study.source}. What the paper says: {findings.study.statement}"


def about_run(findings: Findings) -> str:
    """What was run, on which machine, and how long it took."""
    if not findings.parts:
        return "Nothing has been run yet."
    run, all_parts = len(findings.parts), len(findings.study.parts)
    seeds = sorted({seeds_of(findings, part) for part in findings.parts})
    repeats = "one seed" if seeds == [1] else f"{' or '.join(map(str, seeds))} seeds"
    version = f", with glocal {findings.about['version']}" if "version" in findings.about else ""
    time = duration(_seconds(findings))
    what = (
        f"Run: {run} of {pluralize(all_parts, 'part')}, with {repeats} "
        f"each{_machine(findings)}{version}"
    )
    return f"{what}; the times of the parts add up to {time}."


def about_open(findings: Findings) -> str:
    """Which parts have not been run, or not to their end."""
    waiting = [f"`{part}`" for part in findings.study.parts if part not in findings.parts]
    begun = [
        f"`{part}` (without {', '.join(experiments)})"
        for part in findings.parts
        if (experiments := missing_experiments(findings, part))
    ]
    return f"Not run yet: {', '.join([*begun, *waiting])}." if begun or waiting else ""


def about_changes(findings: Findings) -> str:
    """Which parts were run with other settings than the study's."""
    changed: dict[str, list[str]] = {}
    for part in findings.parts:
        if changes := ", ".join(changes_of(findings, part)):
            changed.setdefault(changes, []).append(f"`{part}`")
    text = "; ".join(f"{', '.join(parts)} with {changes}" for changes, parts in changed.items())
    return f"Run with other settings than the study’s: {text}." if text else ""


def about_left_out(findings: Findings) -> str:
    """Which experiments were given up in which seeds."""
    lines = []
    for part in findings.parts:
        experiments = [
            f"{name} ({_seeds_text(seeds)})" for name, seeds in left_out(findings, part).items()
        ]
        lines += [f"`{part}`: {', '.join(experiments)}"] if experiments else []
    return f"Left out because training diverged: {'; '.join(lines)}." if lines else ""


def _seeds_text(seeds: Sequence[int]) -> str:
    """Which seeds, in words; all of them if none is named."""
    return (
        f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}"
        if seeds
        else "all seeds"
    )


def about_protocols(findings: Findings) -> list[str]:
    """What each protocol that was run means."""
    known = findings.study.protocols
    run = {findings.study.parts[part].protocol for part in findings.parts}
    return [f"`{protocol}`: {meaning}." for protocol, meaning in known.items() if protocol in run]


def about_columns(findings: Findings) -> str:
    """What the tables' columns hold."""
    many = any(seeds_of(findings, part) > 1 for part in findings.parts)
    spread = "± is the sample standard deviation over seeds. " if many else ""
    lower_is_better = (
        f" ↑ marks what is {_ABOVE}, where less is better."
        if findings.study.lower_is_better
        else ""
    )
    return (
        f"{findings.study.caption} {spread}Numbers with a sign beside "
        f"`{findings.study.reference_protocol}` are differences to the published mean. "
        f"{EMPTY_CELL} means: not measured, or not in the paper. "
        f"↓ marks what is {_BELOW}.{lower_is_better}"
    )


def claims_text(findings: Findings) -> str:
    """How many of the claims hold."""
    words = [verdict.status for verdict in findings.verdicts()]
    counts = [f"{word}: {words.count(word)}" for word in ("holds", "fails", "open")]
    waiting = len(findings.study.claims) - len(words)
    wait = f", waiting for parts that have not been run: {waiting}" if waiting else ""
    return (
        f"{pluralize(len(findings.study.claims), 'claim')}; {', '.join(counts)}{wait}. A claim "
        "holds if the 95 % interval of its lead (paired over seeds, Student’s t) lies above its "
        "limit, and fails if it lies below; else it is open. The published lead is computed from "
        "the paper’s means."
    )


def claim_cells(findings: Findings, verdict: Verdict) -> tuple[str, ...]:
    """The claim, its verdict, its lead in the paper and here, and the 95 % interval."""
    margin = f" (at most {verdict.claim.margin:g} points below)" if verdict.claim.margin else ""
    published = published_lead(findings, verdict.claim)
    ends = (verdict.lead.low, verdict.lead.high)
    where = " to ".join(map(signed, ends)) if all(map(isfinite, ends)) else EMPTY_CELL
    lead = EMPTY_CELL if published is None else signed(published)
    return verdict.claim.statement + margin, verdict.status, lead, signed(verdict.lead.mean), where


def columns_of(table: ComparisonTable) -> list[Column]:
    """The columns after the method's name."""
    ours = [f"`{protocol}`" for protocol in table.protocols]
    scores = [
        Column(f"{words}{table.unit(measure)}", head, f"{words.removesuffix(' Test')}, {head}")
        for measure, words in table.measures.items()
        for head in (["published", *ours] if table.published(measure) else ours)
    ]
    if table.counts:
        return [
            *scores,
            *(
                Column("Parameters sent", head, f"Sent, {head}")
                for head in ("published", "ours", "on the wire")
            ),
        ]
    bytes_sent = (
        Column("Sent", "for joining", "Sent for joining")
        if table.has_new_clients
        else Column("Sent", "bytes", "Sent")
    )
    return [*scores, bytes_sent]


def entries(table: ComparisonTable, name: str) -> list[Entry]:
    """The cells of a row, in the order of the columns."""
    rows, reference = table.rows[name], table.reference_protocol
    any_row = next(iter(rows.values()))
    cells = []
    for place, measure in enumerate(table.measures):
        if table.published(measure):
            cells.append(Entry(str(any_row.scores[measure].paper or EMPTY_CELL)))
        cells += [
            _measured(rows.get(protocol), measure, place == 0, protocol == reference)
            for protocol in table.protocols
        ]
    return cells + (_sent(rows) if table.counts else [_cost(rows)])


def notes(table: ComparisonTable) -> list[str]:
    """What is to be said beneath a table."""
    return [
        *filter(None, [table.note]),
        *shortfalls(table),
        *([disagreements(table)] if table.counts else []),
    ]


def shortfalls(table: ComparisonTable) -> list[str]:
    """What is worse than the published mean by more than its standard deviation, by protocol."""
    measures = {
        measure: words for measure, words in table.measures.items() if table.published(measure)
    }
    higher = {
        measure: words
        for measure, words in measures.items()
        if measure not in table.lower_is_better
    }
    lower = {
        measure: words for measure, words in measures.items() if measure in table.lower_is_better
    }
    return [
        *_beyond(table, higher, mark="↓", where=_BELOW),
        *_beyond(table, lower, mark="↑", where=_ABOVE),
    ]


def _beyond(
    table: ComparisonTable, measures: Mapping[str, str], *, mark: str, where: str
) -> list[str]:
    """A sentence for each protocol with figures there, and one for all others."""
    if not measures:
        return []
    sentences, clear = [], []
    for protocol in table.protocols:
        rows = [of[protocol] for of in table.rows.values() if protocol in of]
        if shortfalls := "; ".join(text for row in rows for text in _shortfalls(row, measures)):
            sentences.append(f"{mark} `{protocol}`, {where}: {shortfalls}.")
        else:
            clear.append(f"`{protocol}`")
    if clear:
        on = f" on {', '.join(measures.values())}" if table.lower_is_better else ""
        sentences.append(f"Nothing measured in {', '.join(clear)} is {where}{on}.")
    return sentences


def disagreements(table: ComparisonTable) -> str:
    """Where our count, done the paper's way, is not the one that it prints."""
    rows = [row for of in table.rows.values() for row in of.values() if not row.sent.agrees]
    differing = dict.fromkeys(
        f"{row.name} ({row.sent.ours}, published {row.sent.paper})" for row in rows
    )
    if differing:
        return (
            "≠ By the paper’s count, these rows send another number of parameters than it prints: "
            f"{'; '.join(differing)}."
        )
    return "By the paper’s count, every measured row sends as many parameters as the paper prints."


def split_heads(findings: Findings) -> tuple[str, ...]:
    """The heads of `split_cells`."""
    tests = [f"{words}: {findings.metric.label}" for words in MEASURES.values()]
    return ("Shared", "Parameters shared", "Of the model", *tests)


def split_cells(split: SweepPoint) -> tuple[str, ...]:
    """What a split shares, how much that is, and its two scores."""
    share = f"{PERCENT * split.parameters / split.whole:.1f} %"
    return (
        split.shares,
        f"{split.parameters:,}",
        share,
        *(str(score(split.figures[measure]) or EMPTY_CELL) for measure in MEASURES),
    )


def time_rows(findings: Findings) -> list[tuple[str, str, str]]:
    """Every part with its seeds and its time, then all of them."""
    rows = [
        (f"`{part}`", str(seeds_of(findings, part)), duration(of["seconds"]))
        for part, of in findings.parts.items()
    ]
    return [*rows, ("all", "", duration(_seconds(findings)))]


def commands(findings: Findings) -> list[str]:
    """What was typed."""
    command = findings.about.get("command", [])
    return [command] if isinstance(command, str) else list(command)


def _machine(findings: Findings) -> str:
    machine = findings.about.get("machine")
    return (
        f", on {machine['device']} (PyTorch {machine['torch']}, Python {machine['python']})"
        if machine
        else ""
    )


def _seconds(findings: Findings) -> float:
    return float(sum(part["seconds"] for part in findings.parts.values()))


def _measured(row: Row | None, measure: str, with_choice: bool, compared: bool) -> Entry:
    """One of our scores; with the row's choice, or with its difference to the published one."""
    pair = row.scores[measure] if row else None
    if row is None or pair is None or pair.ours is None:
        return Entry(EMPTY_CELL)
    difference = signed(pair.difference) if compared and pair.difference is not None else ""
    mark = "↑" if pair.lower_is_better else "↓"
    return Entry(
        str(pair.ours), (with_choice and row.choice) or difference, mark if pair.shortfall else ""
    )


def _sent(rows: Mapping[str, Row]) -> list[Entry]:
    """What the first protocol sent; a count that differs from the published one is marked."""
    sent = next((row.sent for row in rows.values() if row.measured), next(iter(rows.values())).sent)
    paper = Entry(sent.paper or EMPTY_CELL)
    if sent.ours is None:
        return [paper, Entry(EMPTY_CELL), Entry(EMPTY_CELL)]
    wire = (
        Entry(mean_power_of_ten([sent.parameters]), size(sent.bytes))
        if sent.parameters
        else Entry("0")
    )
    return [paper, Entry(sent.ours + ("" if sent.agrees else " ≠")), wire]


def _cost(rows: Mapping[str, Row]) -> Entry:
    """What the first protocol sent, in bytes; for a new client, what its joining cost."""
    sent = next((row.sent for row in rows.values() if row.measured), None)
    return Entry(EMPTY_CELL) if sent is None else Entry(size(sent.join_bytes or sent.bytes))


def _shortfalls(row: Row, measures: Mapping[str, str]) -> Iterator[str]:
    for measure, words in measures.items():
        pair = row.scores[measure]
        if pair.shortfall:
            yield (
                f"{row.name} on {words} by {pair.shortfall:.2f} ({pair.ours}, published "
                f"{pair.paper})"
            )
