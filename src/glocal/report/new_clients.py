"""The accuracy of the existing clients and of the new client after it joined, by experiment."""

from collections.abc import Sequence
from html import escape
from statistics import fmean

from glocal.core.files import Json
from glocal.report.formatting import mean_std_percent, size
from glocal.report.run_data import ExperimentRecord, RunData
from glocal.report.tables import boxed_table

NEW_CLIENTS_NOTE = (
    "After the rounds of an experiment, a new client joined. Normal: the ensemble of the existing "
    "clients on all their test data, before and after. New: the new client on its own test data, "
    "before it was trained (with the ensemble of the existing clients), and after. Sent: all bytes "
    "since it joined."
)


def new_clients_table(run: RunData) -> str:
    """One row per experiment that a new client joined; nothing without one."""
    rows = [
        _row(record)
        for record in run.records
        if record.finished and "new_client" in record.results[0]
    ]
    heads = "".join(
        f'<th scope="col">{head}</th>'
        for head in ("Normal, before", "after", "New, before", "after", "Sent")
    )
    return (
        boxed_table(
            f'<tr><th scope="col" class="name">Experiment</th>{heads}</tr>', rows, "New clients"
        )
        if rows
        else ""
    )


def _row(record: ExperimentRecord) -> str:
    cells = "".join(f"<td>{cell}</td>" for cell in _cells(record.results))
    return f'<tr><th scope="row" class="name">{escape(record.name)}</th>{cells}</tr>'


def _cells(results: Sequence[Json]) -> list[str]:
    """Normal before and after, new before and after, over seeds; and what was sent on average."""
    trials = [result["new_client"] for result in results]
    before = [result["new_test"]["logits"] for result in results if result["new_test"]]
    columns = [
        before,
        *(
            [row[key] for row in trials if row[key] is not None]
            for key in ("normal", "rotated_before", "rotated")
        ),
    ]
    return [
        *(mean_std_percent(column) if column else "–" for column in columns),
        size(fmean(row["ledger"]["total"]["bytes"] for row in trials)),
    ]
