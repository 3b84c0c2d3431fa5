"""The figures of the existing clients and of the new client after it joined, by experiment."""

from collections.abc import Sequence
from html import escape
from statistics import fmean

from glocal.core.files import Json
from glocal.report.formatting import size
from glocal.report.run_data import ExperimentRecord, RunData
from glocal.report.tables import boxed_table
from glocal.studies.metric_format import MetricFormat, new_test_of

NEW_CLIENTS_NOTE = (
    "After the rounds of an experiment, a new client joined. Normal: the ensemble of the existing "
    "clients on all their test data, before and after. New: the new client on its own test data, "
    "before it was trained (with the ensemble of the existing clients), and after. Sent: all bytes "
    "since it joined."
)


def new_clients_table(run: RunData) -> str:
    """One row per experiment that a new client joined; nothing without one."""
    rows = [
        _row(record, run.metric)
        for record in run.records
        if record.finished and "new_client" in record.results[0]
    ]
    heads = "".join(
        f'<th scope="col">{head}</th>'
        for head in (
            f"Normal, before: {run.metric.label}",
            "after",
            f"New, before: {run.metric.label}",
            "after",
            "Sent",
        )
    )
    return (
        boxed_table(
            f'<tr><th scope="col" class="name">Experiment</th>{heads}</tr>', rows, "New clients"
        )
        if rows
        else ""
    )


def _row(record: ExperimentRecord, metric: MetricFormat) -> str:
    cells = "".join(f"<td>{cell}</td>" for cell in _cells(record.results, metric))
    return f'<tr><th scope="row" class="name">{escape(record.name)}</th>{cells}</tr>'


def _cells(results: Sequence[Json], metric: MetricFormat) -> list[str]:
    """Normal before and after, new before and after, over seeds; and what was sent on average."""
    trials = [result["new_client"] for result in results]
    columns = [[new_test_of(result) for result in results]]
    for key in ("normal", "rotated_before", "rotated"):
        columns.append([row[key] for row in trials])
    known = [[value for value in column if value is not None] for column in columns]
    sent = size(fmean(row["ledger"]["total"]["bytes"] for row in trials))
    return [*map(metric.mean_std, known), sent]
