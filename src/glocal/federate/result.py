"""The result of a run: every client's model and the metrics, for all seeds and groups."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from glocal.algorithms.contract import Algorithm, require_algorithm
from glocal.core import trees
from glocal.core.checks import require_instance, require_path
from glocal.core.errors import InputError, describe_value, suggest_name
from glocal.core.files import (
    FORMAT,
    Json,
    read_json,
    read_tensors,
    require_format,
    write_json,
    write_tensors,
)
from glocal.core.metric import Metric
from glocal.core.sampling import Plan
from glocal.core.spec import describe_spec, first_difference, spec_of
from glocal.core.store import GroupState, PerClient
from glocal.core.trees import Params
from glocal.datasets.federated import FederatedData, require_data
from glocal.evaluate import Evaluator, Figures, NewTest, local_figures, new_test
from glocal.federate.group_result import GroupResult
from glocal.federate.metrics_table import (
    MetricRow,
    MetricsTable,
    describe_undefined,
    describe_value_of,
)
from glocal.federate.outputs import validate_task_data
from glocal.federate.preparation import prepare_data
from glocal.wire import Ledger, split_private

_FILE = "fit.json"


@dataclass(frozen=True, repr=False)
class Result:
    """Every client's model and the metrics, for all seeds and groups of a run.

    `metrics` is a table with a row per seed, client, split and metric.

    >>> import torch, glocal
    >>> dataset = glocal.load_dataset("digits")
    >>> data = glocal.FederatedData.partition(dataset, glocal.iid(10))
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    >>> task = glocal.classification(model)
    >>> algorithm = glocal.FedAvg(task, optimizer=glocal.SGD(lr=0.1))
    >>> result = glocal.fit(algorithm, data, rounds=1, clients_per_round=2, progress=False)
    >>> type(result.model(3)).__name__, result.metrics.names, result.seeds
    ('Sequential', ('accuracy',), (0,))
    """

    groups: tuple[GroupResult, ...]
    metrics: MetricsTable

    @classmethod
    def of(cls, groups: list[GroupResult]) -> "Result":
        """From the result of every seed and group."""
        rows: list[MetricRow] = []
        for each in groups:
            rows += metric_rows(each, "validation", each.validation)
            rows += metric_rows(each, "test", each.test)
            rows += _new_rows(each)
        metrics: dict[str, Metric] = {}
        for each in groups:
            metrics |= {metric.name: metric for metric in each.task.all_metrics}
        return cls(tuple(groups), MetricsTable(tuple(rows), tuple(metrics.values())))

    def __repr__(self) -> str:
        return f"Result({self.algorithm.name}: {'; '.join(self._phrases())})"

    def _repr_html_(self) -> str:
        items = "".join(f"<li>{phrase}</li>" for phrase in self._phrases())
        return f"<p><b>{self.algorithm.name}</b></p><ul>{items}</ul>"

    def _phrases(self) -> list[str]:
        """What the result says, in short phrases."""
        seeds = "1 seed" if len(self.seeds) == 1 else f"{len(self.seeds)} seeds"
        clients = sum(each.num_clients for each in self.groups if each.seed == self.seeds[0])
        phrases = [f"{clients} clients, {seeds}"]
        for metric in self.metrics.metrics:
            phrase = f"{metric.name} {describe_value_of(metric, self.metrics.mean(metric.name))}"
            if self.metrics.where(metric=metric.name, split="new"):
                new = describe_value_of(metric, self.metrics.mean(metric.name, "new"))
                phrase += f", New Test {new}"
            phrases.append(f"{phrase}{self._undefined(metric)}")
        return phrases

    def _undefined(self, metric: Metric) -> str:
        """For how many clients a metric is undefined; nothing where it is defined for all."""
        undefined = self.metrics.undefined(metric.name)
        if not undefined:
            return ""
        tested = len(self.metrics.where(metric=metric.name, split="test"))
        return f" ({describe_undefined(undefined, tested, len(self.seeds))})"

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm; that of the first group."""
        return self.groups[0].algorithm

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds."""
        return tuple(dict.fromkeys(each.seed for each in self.groups))

    @property
    def by_seed(self) -> dict[int, GroupResult]:
        """The first group's result of each seed."""
        return {each.seed: each for each in self.groups if each.group == self._first_name}

    @property
    def by_group(self) -> dict[str, GroupResult]:
        """The first seed's result of each group."""
        return {each.group: each for each in self.groups if each.seed == self.seeds[0]}

    @property
    def by_client(self) -> dict[int | str, float | None]:
        """The first metric on each client's own test data, as the mean over seeds."""
        values: dict[int | str, list[float]] = {}
        names: dict[int | str, None] = {}
        for row in self.metrics.where(split="test", metric=self.metrics.metrics[0].name):
            assert row.client is not None
            names[row.client] = None
            if row.value is not None:
                values.setdefault(row.client, []).append(row.value)
        return {name: float(np.mean(values[name])) if name in values else None for name in names}

    @property
    def local_test(self) -> float | None:
        """Local Test: the first metric, mean over clients and seeds, of each one's own model."""
        return self.metrics.mean(split="test")

    @property
    def new_test(self) -> float | None:
        """New Test: the first metric of all models together on everybody's test data."""
        if not self.metrics.where(split="new"):
            return None
        return self.metrics.mean(split="new")

    @property
    def ledger(self) -> Ledger:
        """The traffic of the first seed; that of others differs by who took part."""
        total = Ledger()
        for each in self.groups:
            if each.seed == self.seeds[0]:
                total = total + each.ledger
        return total

    def group(self, seed: int | None = None, group: str | None = None) -> GroupResult:
        """The result of a seed and a group; by default of the first ones."""
        seed = self.seeds[0] if seed is None else seed
        require_instance("result: seed", seed, int | None, "one of its seeds")
        require_instance("result: group", group, str | None, "the name of a group")
        group = self._first_name if group is None else group
        for each in self.groups:
            if (each.seed, each.group) == (seed, group):
                return each
        if seed not in self.seeds:
            known = ", ".join(map(str, self.seeds))
            raise InputError(f"result: there is no seed {describe_value(seed)}; it has {known}")
        names = [each.group for each in self.groups]
        raise InputError(f"result: there is no group {group!r}; {suggest_name(group, names)}")

    def model(
        self, client: int | str, *, seed: int | None = None, group: str | None = None
    ) -> nn.Module:
        """One client's own model, by number or name: a plain module in evaluation mode."""
        return self.group(seed, group).model(client)

    def state_dict(
        self, client: int | str, *, seed: int | None = None, group: str | None = None
    ) -> Params:
        """One client's model as a plain state dict."""
        return self.group(seed, group).state_dict(client)

    def evaluate(self, data: FederatedData, *, group: str | None = None) -> MetricsTable:
        """The metrics of the same clients' models on other data."""
        require_data("result: data", data)
        first = self.group(group=group)
        prepared = prepare_data(data, first.task)
        if prepared.num_clients != first.num_clients:
            raise InputError(
                f"result: it has {first.num_clients} clients, the data {prepared.num_clients}; "
                "give data of the same clients in the same order"
            )
        validate_task_data(first.task, prepared)
        evaluator, rows = Evaluator(first.algorithm), list[MetricRow]()
        for seed in self.seeds:
            each = self.group(seed, first.group)
            for split, subset in (("validation", prepared.val), ("test", prepared.test)):
                [figures] = local_figures(evaluator, [each.state], [subset])
                rows += metric_rows(each, split, figures)
            new = new_test(evaluator, each.state, prepared.test)
            for name, value in new.figures.items() if new else ():
                rows.append(MetricRow(seed, None, "new", name, value))
        evaluator.close()
        return MetricsTable(tuple(rows), first.task.all_metrics)

    def to_pandas(self) -> Any:
        """The metrics as a pandas table; it needs pandas."""
        return self.metrics.to_pandas()

    def save(self, folder: str | Path) -> Path:
        """Write all models and metrics into a folder, for `glocal.load`; returns the folder."""
        home, entries = require_path("result: folder", folder), list[Json]()
        for place, each in enumerate(self.groups):
            private = each.state.private
            plain = {client: split_private(tree)[0] for client, tree in private.stored.items()}
            tensors = trees.with_prefix("shared:", each.state.shared)
            tensors |= trees.with_prefix("server:", each.state.server)
            tensors |= trees.with_prefix("initial:", split_private(private.initial)[0])
            for client, tree in plain.items():
                tensors |= trees.with_prefix(f"{client}:", tree)
            owned = {name: tensor.detach().clone() for name, tensor in tensors.items()}
            write_tensors(home / f"models-{place}.safetensors", owned, {})
            entries.append(_entry(each))
        table: Json = {
            "format": FORMAT,
            "algorithm": spec_of(self.algorithm, with_code=False),
            "rows": [list(row) for row in self.metrics],
            "groups": entries,
        }
        write_json(home / _FILE, table)
        return home

    @property
    def _first_name(self) -> str:
        return self.groups[0].group


def load(folder: str | Path, algorithm: Algorithm | Mapping[str, Algorithm]) -> Result:
    """A result that was saved; with several groups, `algorithm` is a table of them by name.

    >>> import torch, glocal
    >>> dataset = glocal.load_dataset("digits")
    >>> data = glocal.FederatedData.partition(dataset, glocal.iid(10))
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    >>> task = glocal.classification(model)
    >>> algorithm = glocal.FedAvg(task, optimizer=glocal.SGD(lr=0.1))
    >>> result = glocal.fit(algorithm, data, rounds=1, clients_per_round=2, progress=False)
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     again = glocal.load(result.save(folder), algorithm)
    >>> again.local_test == result.local_test
    True
    """
    home = require_path("load: folder", folder)
    saved = require_format(read_json(home / _FILE, dict), home / _FILE)
    results: list[GroupResult] = []
    for place, entry in enumerate(saved["groups"]):
        own = _as_trained(_of_group(algorithm, entry["group"]), entry)
        if place == 0:
            _require_same(saved["algorithm"], own, home)
        tensors, _ = read_tensors(home / f"models-{place}.safetensors")
        results.append(_from_entry(entry, own, tensors))
    rows = tuple(MetricRow(*row) for row in saved["rows"])
    metrics: dict[str, Metric] = {}
    for each in results:
        metrics |= {metric.name: metric for metric in each.task.all_metrics}
    return Result(tuple(results), MetricsTable(rows, tuple(metrics.values())))


def _as_trained(algorithm: Algorithm, entry: Json) -> Algorithm:
    """The algorithm with what training found out: targets that do not count, and the criterion.

    Of the metrics that rounds are selected by, the loss need not be among the task's own.
    """
    task = algorithm.task
    names = [metric.name for metric in task.all_metrics]
    if "loss" in entry["metrics"] and "loss" not in names:
        task = replace(task, metrics=[*task.all_metrics, task.find_metric("loss")])
    if entry["has_ignored"] and not task.has_ignored:
        task = replace(task, has_ignored=True)
    return algorithm if task is algorithm.task else replace(algorithm, task=task)


def _of_group(algorithm: Algorithm | Mapping[str, Algorithm], group: str) -> Algorithm:
    """The algorithm of a group."""
    if not isinstance(algorithm, Mapping):
        require_algorithm("load: algorithm", algorithm)
        return algorithm
    if group not in algorithm:
        raise InputError(
            f"load: the algorithms are of {describe_value(list(algorithm))}, and the result has "
            f"the group '{group}'; give the algorithm of each group by its name"
        )
    require_algorithm(f"load: the algorithm of '{group}'", algorithm[group])
    return algorithm[group]


def metric_rows(result: GroupResult, split: str, figures: Mapping[str, Figures]) -> list[MetricRow]:
    """The rows of every client with examples of a split."""
    rows: list[MetricRow] = []
    for name, each in figures.items():
        for client in np.flatnonzero(each.sizes).tolist():
            value = float(each.by_client[client])
            label = result.names[client] if result.names else client
            defined = None if np.isnan(value) else value
            rows.append(MetricRow(result.seed, label, split, name, defined, result.group))
    return rows


def _new_rows(result: GroupResult) -> list[MetricRow]:
    """The figures of New Test."""
    rows: list[MetricRow] = []
    for name, value in result.new.figures.items() if result.new else ():
        rows.append(MetricRow(result.seed, None, "new", name, value, result.group))
    return rows


def _entry(result: GroupResult) -> Json:
    """All but tensors and figures."""
    return {
        "group": result.group,
        "metrics": [metric.name for metric in result.task.all_metrics],
        "has_ignored": result.task.has_ignored,
        "plan": asdict(result.plan),
        "stored": sorted(result.state.private.stored),
        "selected_round": result.selected_round,
        "ledger": result.ledger.as_dict(),
        "sizes": result.sizes,
        "times_sampled": result.times_sampled,
        "times_dropped": result.times_dropped,
        "names": list(result.names),
        "stopped": result.stopped,
        "figures": {
            "test": _all_figures_json(result.test),
            "validation": _all_figures_json(result.validation),
        },
        "new": result.new._asdict() if result.new else None,
    }


def _all_figures_json(figures: Mapping[str, Figures]) -> Json:
    return {name: _figures_json(each) for name, each in figures.items()}


def _figures_json(figures: Figures) -> Json:
    return {
        "by_client": [None if np.isnan(value) else value for value in figures.by_client.tolist()],
        "pooled": None if np.isnan(figures.pooled) else figures.pooled,
        "sizes": figures.sizes.tolist(),
    }


def _figures_from(saved: Json, metric: Metric) -> Figures:
    by_client = np.array([np.nan if value is None else value for value in saved["by_client"]])
    pooled = np.nan if saved["pooled"] is None else saved["pooled"]
    return Figures(metric, by_client.astype(np.float64), pooled, np.array(saved["sizes"]))


def _from_entry(entry: Json, algorithm: Algorithm, tensors: Params) -> GroupResult:
    """A group's result from its entry and tensors."""

    def tree(part: str) -> Params:
        return trees.under_prefix(f"{part}:", tensors)

    by_split: dict[str, dict[str, Figures]] = {}
    for split, figures in entry["figures"].items():
        known = {metric.name: metric for metric in algorithm.task.all_metrics}
        by_split[split] = {name: _figures_from(each, known[name]) for name, each in figures.items()}
    private = PerClient(tree("initial"), {client: tree(str(client)) for client in entry["stored"]})
    plain = ("group", "selected_round", "sizes", "times_sampled", "times_dropped", "stopped")
    return GroupResult(
        **{name: entry[name] for name in plain},
        algorithm=algorithm,
        plan=Plan(**entry["plan"]),
        state=GroupState(tree("shared"), private, tree("server")),
        test=by_split["test"],
        validation=by_split["validation"],
        new=NewTest(**entry["new"]) if entry["new"] else None,
        ledger=Ledger.from_dict(entry["ledger"]),
        names=tuple(entry["names"]),
    )


def _require_same(saved: Json, algorithm: Algorithm, home: Path) -> None:
    difference = first_difference(saved, spec_of(algorithm, with_code=False))
    if difference is not None:
        path, before, given = difference
        raise InputError(
            f"load: {home} was saved with another {path} ({describe_spec(before)}) than the one "
            f"given ({describe_spec(given)}); give the algorithm that it was trained with"
        )
