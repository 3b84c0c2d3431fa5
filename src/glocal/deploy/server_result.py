"""The result of a run on the server: each client's figures, where its owner shares them."""

from collections.abc import Mapping

import numpy as np

from glocal.core.files import Json
from glocal.core.metric import Metric
from glocal.core.task import Task
from glocal.deploy.registry import RegistryEntry
from glocal.deploy.server_files import ServerState
from glocal.evaluate import Summary, summarize

PARTS = ("validation", "test")
_SIZES = ("train_size", "validation_size", "test_size")


def read_figures(task: Task, metrics: Json) -> Json:
    """A client's figures by part and metric; none at all where one of them cannot be.

    Known are the task's metrics, a fraction from 0 to 1, and whole numbers of examples.
    """
    figures: Json = {part: metrics.get(part, {}) for part in PARTS}
    for by_name in figures.values():
        if not isinstance(by_name, dict) or not _are_possible(task, by_name):
            return {}
    sizes = {name: metrics.get(name) for name in _SIZES}
    if any(size is not None and not _is_count(size) for size in sizes.values()):
        return {}
    return {**figures, **sizes}


def _are_possible(task: Task, by_name: Mapping[str, float]) -> bool:
    known = {metric.name: metric for metric in task.all_metrics}
    for name, value in by_name.items():
        if name not in known or (known[name].is_fraction and not 0 <= value <= 1):
            return False
    return True


def _is_count(size: object) -> bool:
    return isinstance(size, int) and size >= 0


def build_result(
    task: Task,
    state: ServerState,
    registry: Mapping[int, RegistryEntry],
    figures: Mapping[int, Json],
) -> Json:
    """The metrics over clients and the table of clients; `figures` are by client.

    A revoked client is in the table if one of its uploads counts.
    """
    rows: list[Json] = []
    for number, entry in registry.items():
        if not entry.revoked or number in state.rounds_included:
            rows.append(_client_row(task, state, entry, figures.get(number, {})))
    table = {metric.name: _metric_row(metric, rows) for metric in task.all_metrics}
    return {
        "rounds": state.rounds_done,
        "metric": task.metric.name,
        "local_test": table[task.metric.name]["local_test"],
        "metrics": table,
        "clients": rows,
        "ledger": state.ledger.as_dict(),
    }


def _client_row(task: Task, state: ServerState, entry: RegistryEntry, figures: Json) -> Json:
    """One client: `test` and `validation` are the first metric, `metrics` has all of them."""
    parts = {part: figures.get(part, {}) for part in PARTS}
    first = {part: parts[part].get(task.metric.name) for part in PARTS}
    return {
        "client": entry.number,
        "name": entry.name,
        "rounds": state.rounds_included.get(entry.number, 0),
        "last_round": state.last_included.get(entry.number),
        **first,
        **{name: figures.get(name) for name in _SIZES},
        "metrics": parts,
        "new_client": entry.number not in state.initial_clients,
    }


def _metric_row(metric: Metric, rows: list[Json]) -> Json:
    """A metric on the test data of all clients that share it."""
    values = [row["metrics"]["test"].get(metric.name, np.nan) for row in rows]
    sizes = np.array([row["test_size"] or 0 for row in rows], dtype=np.int64)
    summary = summarize(np.array(values), sizes, higher_is_better=metric.higher_is_better)
    return {
        "higher_is_better": metric.higher_is_better,
        "is_fraction": metric.is_fraction,
        "local_test": summary._asdict() if _is_known(summary) else None,
    }


def _is_known(summary: Summary) -> bool:
    return summary.mean is not None
