"""What the representations of each experiment reveal, as a table."""

from collections.abc import Sequence
from html import escape

from glocal.core.files import Json
from glocal.report.run_data import ExperimentRecord, RunData
from glocal.report.tables import boxed_table, grouped_head
from glocal.studies.metric_format import AUC

AUDITS_NOTE = (
    "All values are areas under the ROC curve (AUC); 50 is guessing. Prediction: each client’s own "
    "model on its own test data. For each protected attribute: the AUC of the adversary of the "
    "training, and of the best of three fresh attackers (logistic regression, gradient boosting, a "
    "network). Fresh attackers are trained afterwards on frozen, noise-free representations. Own: "
    "they know the attribute of the people in a client’s training data. Pooled: they know it for "
    "everybody. Strong: they have one client’s encoder and apply it to everybody else’s data."
)
_VIEWS = ("along", "own", "pooled", "strong")


def audits_table(run: RunData, attributes: Sequence[str]) -> str:
    """One row for every experiment that was audited; nothing where none was."""
    records = [record for record in run.records if record.finished and "audit" in record.results[0]]
    if not records:
        return ""
    names = [
        *attributes,
        *(f"attribute {place}" for place in range(len(attributes), _count(records[0]))),
    ][: _count(records[0])]
    heads = [("Prediction", "AUC"), *((escape(name), view) for name in names for view in _VIEWS)]
    return boxed_table(grouped_head(("Experiment",), heads), map(_row, records), "Audit")


def _count(record: ExperimentRecord) -> int:
    return len(record.results[0]["audit"]["attributes"])


def _row(record: ExperimentRecord) -> str:
    cells = "".join(f"<td>{cell}</td>" for cell in _cells(record.results))
    return f'<tr><th scope="row" class="name">{escape(record.name)}</th>{cells}</tr>'


def _cells(results: Sequence[Json]) -> list[str]:
    audits = [result["audit"] for result in results]
    columns = [[audit["auc"] for audit in audits]]
    for place in range(len(audits[0]["attributes"])):
        leaks = [audit["attributes"][place] for audit in audits]
        columns += [[each[view] for each in leaks] for view in ("joint", "own", "pooled", "strong")]
    known = [[value for value in column if value is not None] for column in columns]
    return [AUC.mean_std(column) for column in known]
