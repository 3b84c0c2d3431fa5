"""The tables: all results by experiment, and each experiment's clients."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from itertools import groupby
from statistics import fmean
from typing import NamedTuple

from glocal.core.files import Json
from glocal.report.formatting import mean_count, mean_power_of_ten, mean_size
from glocal.report.run_data import ExperimentRecord, RunData
from glocal.report.styles import line_sample
from glocal.studies.metric_format import MetricFormat, undefined_metrics


class Column(NamedTuple):
    """A column of the results: its heads, its address in a result, its format, and its best."""

    group: str
    head: str
    address: tuple[str, ...]
    write: Callable[[Sequence[float]], str]
    best: Callable[[Sequence[float]], float]


_LOCAL_TEST = {"mean": "mean", "worst tenth": "worst_tenth"}
_NEW_TEST = {"outputs": "logits", "votes": "votes", "weights": "weights"}


def _columns(metric: MetricFormat) -> tuple[Column, ...]:
    """The columns of the results; the best figure of a metric is by its direction."""
    columns: list[Column] = []
    for group, keys in (("local_test", _LOCAL_TEST), ("new_test", _NEW_TEST)):
        title = f"{group.replace('_', ' ').title()}: {metric.label}"
        for head, key in keys.items():
            columns.append(Column(title, head, (group, key), metric.mean_std, metric.best))
    return (
        *columns,
        Column("Sent", "bytes", ("ledger", "total", "bytes"), mean_size, min),
        Column("Sent", "paper’s count", ("ledger", "paper", "parameters"), mean_power_of_ten, min),
        Column("Clients", "never sampled", ("never_sampled",), mean_count, min),
    )


def results_table(run: RunData) -> str:
    """One row per experiment; the best value of a column is bold."""
    columns = _columns(run.metric)
    best = {column: _best(run, column) for column in columns}
    rows = (_result_row(run, record, best) for record in run.records)
    heads = [(column.group, column.head) for column in columns]
    return boxed_table(grouped_head(("Experiment", "Algorithm"), heads), rows, "Results")


def results_note(run: RunData) -> str:
    """What the columns of the results mean."""
    seeds, select = run.settings.plan.seeds, run.settings.run.select
    when = "after its last round"
    if select != "last":
        when = f"at the round that was best on validation data, by {run.criterion.name}"
    spread = f"± is the standard deviation over {seeds} seeds. " if seeds > 1 else ""
    those = " The tests cover the clients present at the end." if run.settings.groups else ""
    return (
        f"Each experiment was tested {when}; the best value of a column is bold. Local Test: each "
        "client’s own model on its own test "
        "data: the mean over all clients, and over the worst tenth of them. New Test: the "
        "ensemble of all trained clients "
        "on everyone’s test data, by averaged outputs, majority vote or averaged weights. "
        f"{spread}Sent: bytes on the "
        "wire, evaluation and a warm start included; the paper’s count is in parameters, as if "
        "every client received in every "
        "round (Liang et al. 2020). Never sampled: clients that took part in no round of the "
        "experiment."
        f"{those}{_undefined_note(run)}"
    )


def _undefined_note(run: RunData) -> str:
    """Which metrics are undefined for some clients, by experiment; nothing where none is."""
    phrases: list[str] = []
    for record in run.records:
        phrases += [f"{escape(record.name)}: {each}" for each in undefined_metrics(record.results)]
    if not phrases:
        return ""
    return f" Left out of the mean: {'; '.join(phrases)}."


def client_table(record: ExperimentRecord, metric: MetricFormat) -> str:
    """The clients of an experiment's first seed, folded away."""
    result = record.results[0]
    heads = ("Client", "Train", "Val", "Test", "Sampled", f"Local Test: {metric.label}")
    head = "".join(f'<th scope="col">{words}</th>' for words in heads)
    rows = (_client_row(client, metric) for client in result["clients"])
    table = boxed_table(f"<tr>{head}</tr>", rows, f"Clients of {record.name}")
    summary = (
        f'{line_sample(record.line_style)}{escape(record.name)} <span class="note">seed '
        f"{result['seed']}</span>"
    )
    return f"<details><summary>{summary}</summary>\n{table}</details>"


def scrolling(inner: str, label: str) -> str:
    """A box that scrolls by itself, also by keyboard."""
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(label)}">{inner}</div>'
    )


def boxed_table(head: str, rows: Iterable[str], label: str) -> str:
    """A table that scrolls by itself, of rows in HTML."""
    body = "\n".join(rows)
    return scrolling(f"<table><thead>{head}</thead>\n<tbody>\n{body}\n</tbody></table>", label)


def grouped_head(names: Iterable[str], columns: Sequence[tuple[str, str]]) -> str:
    """Two rows of heads: names and groups of columns above, the columns' own heads below."""
    groups = [(group, len(list(same))) for group, same in groupby(group for group, _ in columns)]
    words = "".join(f'<th rowspan="2" scope="col" class="name">{name}</th>' for name in names)
    upper = "".join(
        f'<th colspan="{width}" scope="colgroup">{group}</th>' for group, width in groups
    )
    lower = "".join(f'<th scope="col">{head}</th>' for _, head in columns)
    return f"<tr>{words}{upper}</tr>\n<tr>{lower}</tr>"


def _best(run: RunData, column: Column) -> str | None:
    """The best value as it is written; None where there is nothing to compare."""
    means = [
        fmean(values) for record in run.records if (values := record.measured(*column.address))
    ]
    written = {column.write([mean]) for mean in means}
    return column.write([column.best(means)]) if len(written) > 1 else None


def _result_row(run: RunData, record: ExperimentRecord, best: Mapping[Column, str | None]) -> str:
    experiment, name = record.experiment, escape(record.name)
    start_from = (
        f'<span class="small">after {escape(experiment.start_from)}, round '
        f"{run.plan(record).first_round}</span>"
        if experiment.start_from
        else ""
    )
    progress = (
        "" if record.finished else f'<span class="small">unfinished, {run.progress(record)}</span>'
    )
    head = (
        f'{line_sample(record.line_style)}<span class="long" '
        f'title="{name}">{name}</span>{start_from}{progress}'
    )
    cells = "".join(_cell(record, column, top) for column, top in best.items())
    return (
        f'<tr><th scope="row" class="name">{head}</th><td '
        f'class="name">{escape(experiment.algorithm)}</td>{cells}</tr>'
    )


def _cell(record: ExperimentRecord, column: Column, best: str | None) -> str:
    values = record.measured(*column.address)
    if not values:
        return "<td>–</td>"
    written = column.write(values)
    return (
        f"<td><strong>{written}</strong></td>"
        if column.write([fmean(values)]) == best
        else f"<td>{written}</td>"
    )


def _client_row(client: Json, metric: MetricFormat) -> str:
    figure = metric.number(client["local_test"])
    cells = "".join(
        f"<td>{client[column]}</td>" for column in ("train", "val", "test", "times_sampled")
    )
    return f'<tr><th scope="row">{client["client"]}</th>{cells}<td>{figure}</td></tr>'
