"""Tables in the terminal."""

from collections.abc import Iterable, Sequence
from math import isfinite
from statistics import fmean

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from glocal.core.files import Json
from glocal.studies.findings import OF_THE_METRIC, Findings
from glocal.studies.metric_format import AUC, MetricFormat, new_test_of, undefined_metrics
from glocal.studies.study import PublishedRow, Score, Study

_MIN_WIDTH = 500


def print_table(results: dict[str, list[Json]]) -> None:
    """One row per experiment: means over seeds, with standard deviations if there are several."""
    metric = _metric_of(results)
    table = _make_table(
        "experiment",
        right=(
            f"Local Test\n{metric.label}",
            "worst\ntenth",
            "New\nTest",
            "sent",
            "paper's\ncount",
            "never\nsampled",
        ),
    )
    for name, seeds in results.items():
        local = [result["local_test"]["mean"] for result in seeds]
        worst = [result["local_test"]["worst_tenth"] for result in seeds]
        new = [new_test_of(result) for result in seeds]
        sent = sum(result["ledger"]["total"]["bytes"] for result in seeds) / len(seeds)
        paper = sum(result["ledger"]["paper"]["parameters"] for result in seeds) / len(seeds)
        never = max(result["never_sampled"] for result in seeds)
        counted = f"{paper:.1e}".replace("e+", "e") if paper else "0"
        figures = [format_mean_std(column, metric) for column in (local, worst, new)]
        table.add_row(escape(name), *figures, format_bytes(sent), counted, str(never))
    _print_unwrapped(table)
    for name, seeds in results.items():
        for phrase in undefined_metrics(seeds):
            print(f"{name}: {phrase}, left out of the mean")


def print_groups(results: dict[str, list[Json]]) -> None:
    """Each group's metric by experiment: after its first round, best and last; and forgetting."""
    experiments = {name: seeds for name, seeds in results.items() if seeds[0].get("subgroups")}
    if not experiments:
        return
    metric = _metric_of(experiments)
    points = "\nin points" if metric.is_fraction else ""
    first = f"{metric.label}\nafter its first round"
    table = _make_table("experiment", "group", right=(first, "best", "last", f"forgetting{points}"))
    for experiment, seeds in experiments.items():
        for group in seeds[0]["subgroups"]:
            rows = [result["subgroups"][group] for result in seeds if result["subgroups"][group]]
            cells = []
            for column in ("first", "best", "last", "forgetting"):
                cells.append(format_mean_std([row[column] for row in rows], metric))
            table.add_row(escape(experiment), escape(group), *cells)
    print()
    _print_unwrapped(table)


def print_new_clients(results: dict[str, list[Json]]) -> None:
    """One row per experiment that a new client joined; nothing without one."""
    if not any("new_client" in seeds[0] for seeds in results.values()):
        return
    metric = _metric_of(results)
    heads = (f"normal: {metric.label}\nbefore", "\nafter", "new\nbefore", "\nafter", "sent")
    table = _make_table("experiment", right=heads)
    for name, seeds in results.items():
        if "new_client" not in seeds[0]:
            continue
        trials = [result["new_client"] for result in seeds]
        columns = [
            [new_test_of(result) for result in seeds],
            [trial["normal"] for trial in trials],
            [trial["rotated_before"] for trial in trials],
            [trial["rotated"] for trial in trials],
        ]
        sent = fmean(trial["ledger"]["total"]["bytes"] for trial in trials)
        figures = [format_mean_std(column, metric) for column in columns]
        table.add_row(escape(name), *figures, format_bytes(sent))
    Console().print(table)


def _metric_of(results: dict[str, list[Json]]) -> MetricFormat:
    """The metric of all experiments."""
    for seeds in results.values():
        return MetricFormat.of_result(seeds[0])
    return MetricFormat("metric")


def format_mean_std(values: Sequence[float | None], metric: MetricFormat, digits: int = 1) -> str:
    """Mean and standard deviation over seeds; one seed with two decimals."""
    known = [value for value in values if value is not None]
    return metric.mean_std(known, digits if len(known) > 1 else 2) if known else "-"


def format_bytes(size: float) -> str:
    """A number of bytes in a readable unit.

    >>> format_bytes(1_234_567)
    '1.2 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def print_class_counts(counts: list[list[int]]) -> None:
    """Clients down, classes across; the fuller the block, the more examples."""
    most = max(max(row) for row in counts) or 1
    shades = " ░▒▓█"
    table = Table(
        "client",
        *(str(label) for label in range(len(counts[0]))),
        "examples",
        box=None,
        pad_edge=False,
    )
    for client, row in enumerate(counts):
        blocks = [shades[-(-count * (len(shades) - 1) // most)] * 2 for count in row]
        table.add_row(str(client), *blocks, str(sum(row)))
    Console().print(table)


def show_study(study: Study) -> None:
    """The claims, the parts, and the paper's numbers."""
    print(f"{study.name}: {study.title}\n{study.source}\n\n{study.statement}\n")
    known = {
        (name, experiment): part.published_for(experiment)
        for name, part in study.parts.items()
        for experiment in part.settings.experiments
    }
    published = _published_measures(study, known.values())
    heads = [study.measures[measure].removesuffix(" Test") for measure in published]
    if any(row.parameters_text for row in known.values() if row):
        heads.append("sent")
    table = _make_table(
        "part",
        "experiment",
        right=("rounds", *(f"paper: {head}" for head in heads[:1]), *heads[1:]),
    )
    for (name, experiment), row in known.items():
        settings, scores = (
            study.parts[name].settings.experiments[experiment],
            row.by_measure(study.measures) if row else {},
        )
        rounds = (
            f"{settings.start_round or ''}{' + ' if settings.start_from else ''}{settings.rounds}"
        )
        cells = [
            *(str(scores.get(measure, "")) for measure in published),
            row.parameters_text if row else "",
        ]
        table.add_row(name, escape(experiment), rounds, *cells[: len(heads)])
    _print_unwrapped(table)
    print("\nClaims, tested over paired seeds:")
    for claim in study.claims:
        margin = f" (at most {claim.margin:g} points below)" if claim.margin else ""
        print(f"- {claim.statement}{margin}")


def print_findings(findings: Findings) -> None:
    """Every row beside the paper's numbers, with the difference, then the claims."""
    study = findings.study
    experiments = {
        (name, experiment): figures
        for name, part in findings.parts.items()
        for experiment, figures in part["experiments"].items()
    }
    known = {
        (name, experiment): study.parts[name].published_for(experiment)
        for name, experiment in experiments
    }
    published = _published_measures(study, known.values())
    formats = {
        measure: findings.metric if measure in OF_THE_METRIC else AUC for measure in study.measures
    }
    heads = []
    for measure, words in study.measures.items():
        unit = " %" if formats[measure].is_fraction else ""
        heads.append(f"{words.removesuffix(' Test')}{unit}")
        heads += ("paper", "difference") if measure in published else ()
    table = _make_table("part", "experiment", right=heads)
    for (name, experiment), figures in experiments.items():
        row, cells = known[name, experiment], []
        scores = row.by_measure(study.measures) if row else {}
        for measure in study.measures:
            ours, form = figures.get(measure, []), formats[measure]
            cells.append(format_mean_std(ours, form, 2))
            if measure in published:
                cells += _compare_with_published(ours, scores.get(measure), form)
        table.add_row(name, escape(experiment), *cells)
    _print_unwrapped(table)
    for claim, lead, word in findings.verdicts():
        reach = f"[{lead.low:+.2f}, {lead.high:+.2f}]" if isfinite(lead.low) else "(one seed)"
        print(f"{word:5}  {claim.statement}: {lead.mean:+.2f} {reach}")


def _make_table(*left: str, right: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in left:
        table.add_column(heading, no_wrap=True)
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _print_unwrapped(table: Table) -> None:
    """A table without wrapped lines, even if it is wider than the terminal."""
    Console(width=max(Console().width, _MIN_WIDTH)).print(table)


def _published_measures(study: Study, rows: Iterable[PublishedRow | None]) -> list[str]:
    """The measures that the paper publishes for any of these rows."""
    most = max((len(row.scores) for row in rows if row), default=0)
    return [*study.measures][:most]


def _compare_with_published(
    values: Sequence[float | None], published: Score | None, metric: MetricFormat
) -> tuple[str, str]:
    """The published score, and the difference of our mean from it; in points for fractions."""
    if published is None:
        return "", ""
    known = [value for value in values if value is not None]
    if not known:
        return str(published), ""
    return str(published), f"{metric.scale * fmean(known) - published.mean:+.2f}"
