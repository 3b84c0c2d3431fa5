"""What a report reads: the settings of a run, and how far each experiment has come."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from glocal.core.files import Json, read_json, read_rows
from glocal.core.sampling import IntArray, Plan
from glocal.report.styles import LineStyle, nth_line_style
from glocal.studies.metric_format import MetricFormat
from glocal.studies.run import experiment_folder, plans_of, read_results, read_settings
from glocal.studies.settings import ExperimentSettings, Settings


@dataclass(frozen=True)
class ExperimentRecord:
    """An experiment from its folder: its rows so far, and its results, one per seed."""

    name: str
    experiment: ExperimentSettings
    line_style: LineStyle
    rows: list[Json]
    results: list[Json]

    @property
    def rounds_completed(self) -> int:
        """How many rounds are done, a warm start's included."""
        return max((row["round"] + 1 for row in self.rows), default=0)

    @property
    def finished(self) -> bool:
        """Whether the results are those of the last round."""
        return bool(self.results) and self.results[0]["rounds"] >= self.rounds_completed

    def measured(self, *address: str) -> list[float]:
        """One number of each seed's result, such as ("local_test", "mean"), if it was measured."""
        return [
            float(value)
            for result in self.results
            if (value := _inside(result, address)) is not None
        ]


@dataclass(frozen=True)
class RunData:
    """All data of a report.

    `counts` are the first seed's training examples (clients, classes), where there are classes.
    The first of `metrics` is the one that figures are about.
    """

    settings: Settings
    records: list[ExperimentRecord]
    counts: IntArray | None
    metrics: tuple[MetricFormat, ...]

    @property
    def metric(self) -> MetricFormat:
        """The first metric."""
        return self.metrics[0]

    @property
    def criterion(self) -> MetricFormat:
        """The metric that rounds are selected by, of which rows have the validation figure."""
        _, _, name = self.settings.run.select.partition(" ")
        return next((each for each in self.metrics if each.name == name), self.metric)

    @property
    def clients(self) -> int:
        """How many clients there are; data of the user's own may differ from the settings."""
        if self.counts is not None:
            return len(self.counts)
        return next(
            (len(record.results[0]["clients"]) for record in self.records if record.results),
            self.settings.data.clients,
        )

    def plan(self, record: ExperimentRecord) -> Plan:
        """Which rounds an experiment runs; those of its warm start come before."""
        return plans_of(self.settings)[record.name]

    def progress(self, record: ExperimentRecord) -> str:
        """The progress of an experiment as text."""
        return (
            f"round {record.rounds_completed} of {self.plan(record).total_rounds}"
            if record.rows
            else "not started"
        )


def read_run(folder: Path) -> RunData:
    """The settings and results of a run so far."""
    settings, results = read_settings(folder), read_results(folder)
    records: list[ExperimentRecord] = []
    for place, (name, experiment) in enumerate(settings.experiments.items()):
        rows = read_rows(experiment_folder(folder, name) / "rows.jsonl")
        style, own = nth_line_style(place), results.get(name, [])
        records.append(ExperimentRecord(name, experiment, style, rows, own))
    path = folder / "federation.json"
    about: Json = read_json(path, dict) if path.exists() else {}
    counts = np.array(about["train"], dtype=np.int64) if "train" in about else None
    return RunData(settings, records, counts, _read_metrics(about, records))


def _read_metrics(about: Json, records: Sequence[ExperimentRecord]) -> tuple[MetricFormat, ...]:
    """The metrics of a run that has begun, or of its results."""
    for record in records:
        for result in record.results:
            names = dict.fromkeys([result["metric"], *result["metrics"]])
            return tuple(MetricFormat.of_result(result, name) for name in names)
    known = tuple(MetricFormat(**metric) for metric in about.get("metrics", ()))
    return known or (MetricFormat("metric"),)


def _inside(data: Json, address: Sequence[str]) -> Any:
    """The value at a path of keys in nested data; None if a value on the path is None."""
    rows: Any = data
    for key in address:
        rows = None if rows is None else rows[key]
    return rows
