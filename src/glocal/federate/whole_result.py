"""The result of `fit`: every client's model and the metrics, for all seeds."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from glocal.algorithms.contract import Algorithm
from glocal.algorithms.task_algorithm import TaskAlgorithm
from glocal.core.data import client_label, find_client
from glocal.core.errors import InputError, describe_value
from glocal.core.files import Json, read_json, read_tensors, require_format, write_json
from glocal.core.files import FORMAT, write_tensors
from glocal.core.modules import state_dict
from glocal.core.sampling import Plan
from glocal.core.store import State
from glocal.core.trees import Params
from glocal.datasets.federated import FederatedData
from glocal.evaluate import Evaluator, Figures, local_figures, new_test
from glocal.federate.checkpoint import flatten_state, unflatten_state, unshare
from glocal.federate.metrics_table import MetricRow, MetricsTable, describe_value_of
from glocal.federate.outputs import validate_task_data
from glocal.federate.preparation import prepare_data
from glocal.federate.result import SeedResult
from glocal.wire import Ledger

_FILE = "fit.json"


class SeedRun(NamedTuple):
    """One seed: its plan, the state of the tested round, its traffic, and who took part."""

    plan: Plan
    state: State
    ledger: Ledger
    selected_round: int
    times_sampled: list[int]


@dataclass(frozen=True, repr=False)
class Result:
    """Every client's model and the metrics, for all seeds of a `fit`.

    `algorithm` is None for a result that was loaded without one: it has figures and no models.
    """

    algorithm: TaskAlgorithm | None
    metrics: MetricsTable
    runs: Mapping[int, SeedRun]
    names: tuple[str, ...]
    seed_results: tuple[SeedResult, ...] = ()
    label: str = ""

    @classmethod
    def of(cls, algorithm: TaskAlgorithm, results: list[SeedResult]) -> "Result":
        """The result of all seeds."""
        runs: dict[int, SeedRun] = {}
        rows: list[MetricRow] = []
        for one in results:
            seed = one.plan.seed
            runs[seed] = SeedRun(
                one.plan, one.state, one.ledger, one.selected_round, one.times_sampled
            )
            rows += _rows_of(one)
        table = MetricsTable(tuple(rows), results[0].task.all_metrics)
        return cls(algorithm, table, runs, results[0].names, tuple(results), algorithm.name)

    def __repr__(self) -> str:
        return f"Result({self.label}: {'; '.join(self._figures())})"

    def _repr_html_(self) -> str:
        items = "".join(f"<li>{figure}</li>" for figure in self._figures())
        return f"<p><b>{self.label}</b></p><ul>{items}</ul>"

    def _figures(self) -> list[str]:
        """What the result is about, in short phrases."""
        seeds = "1 seed" if len(self.runs) == 1 else f"{len(self.runs)} seeds"
        phrases = [f"{self.num_clients} clients, {seeds}"]
        for metric in self.metrics.metrics:
            local = describe_value_of(metric, self.metrics.mean(metric.name))
            phrase = f"{metric.name} {local}"
            if self.metrics.where(metric=metric.name, split="new"):
                new = describe_value_of(metric, self.metrics.mean(metric.name, "new"))
                phrase += f", new clients {new}"
            undefined = self.metrics.undefined(metric.name)
            tested = len(self.metrics.where(metric=metric.name, split="test"))
            phrases.append(f"{phrase} ({undefined} of {tested} undefined)" if undefined else phrase)
        return phrases

    @property
    def num_clients(self) -> int:
        """The number of clients."""
        return len(next(iter(self.runs.values())).times_sampled)

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds."""
        return tuple(self.runs)

    @property
    def local_test(self) -> float | None:
        """Local Test: the first metric, mean over clients and seeds, of each one's own model."""
        return self.metrics.mean(split="test")

    @property
    def new_test(self) -> float | None:
        """New Test: the first metric of all models together on everybody's test data."""
        return self.metrics.mean(split="new")

    @property
    def ledger(self) -> Ledger:
        """The traffic of the first seed; that of others differs by who took part."""
        return self._run(None).ledger

    def model(self, client: int | str, seed: int | None = None) -> nn.Module:
        """One client's own model, by number or name: a plain module in evaluation mode.

        Of several seeds, the first one's.
        """
        import copy

        model = copy.deepcopy(self._task_algorithm().task.model)
        model.load_state_dict(self.state_dict(client, seed))
        return model.eval()

    def state_dict(self, client: int | str, seed: int | None = None) -> Params:
        """One client's model as a plain state dict."""
        algorithm, run = self._task_algorithm(), self._run(seed)
        number = find_client(client, self.names, self.num_clients)
        params = self.functions().personal(run.state.shared, run.state.private.of(number))
        return state_dict(algorithm.task.model, params)

    def functions(self) -> Algorithm:
        """The functions of the algorithm, for the same number of clients."""
        algorithm = self._task_algorithm()
        return algorithm.functions(algorithm.task.objective(), self.num_clients)

    def evaluate(self, data: FederatedData) -> MetricsTable:
        """The metrics of the same clients' models on other data."""
        task = self._task_algorithm().task
        data = prepare_data(data, task)
        if data.num_clients != self.num_clients:
            raise InputError(
                f"result: it has {self.num_clients} clients, the data {data.num_clients}; "
                "give data of the same clients in the same order"
            )
        validate_task_data(task, data)
        evaluator = Evaluator(self.functions(), task)
        rows: list[MetricRow] = []
        for seed, run in self.runs.items():
            [validation] = local_figures(evaluator, [run.state], [data.val])
            [test] = local_figures(evaluator, [run.state], [data.test])
            new = new_test(evaluator, run.state, data.test)
            rows += metric_rows(seed, self.names, validation, "validation")
            rows += metric_rows(seed, self.names, test, "test")
            rows += _new_rows(seed, new.figures if new else {})
        evaluator.close()
        return MetricsTable(tuple(rows), task.all_metrics)

    def save(self, folder: str | Path) -> Path:
        """Write all seeds into a folder, for `glocal.load`; returns the folder."""
        home = Path(folder)
        runs: Json = {}
        for seed, run in self.runs.items():
            tensors = unshare(flatten_state("state", run.state))
            write_tensors(home / f"fit-seed-{seed}.safetensors", tensors, {})
            runs[str(seed)] = {
                "plan": asdict(run.plan),
                "names": {
                    "shared": list(run.state.shared),
                    "private": list(run.state.private.initial),
                },
                "ledger": run.ledger.as_dict(),
                "selected_round": run.selected_round,
                "times_sampled": run.times_sampled,
            }
        table: Json = {
            "format": FORMAT,
            "label": self.label,
            "names": list(self.names),
            "metrics": [_metric_json(metric) for metric in self.metrics.metrics],
            "rows": [list(row) for row in self.metrics],
            "runs": runs,
        }
        write_json(home / _FILE, table)
        return home

    def _task_algorithm(self) -> TaskAlgorithm:
        if self.algorithm is None:
            raise InputError(
                "result: it was loaded without its algorithm, so it has no models; "
                "use glocal.load(folder, algorithm)"
            )
        return self.algorithm

    def _run(self, seed: int | None) -> SeedRun:
        if seed is None:
            return next(iter(self.runs.values()))
        if seed not in self.runs:
            known = ", ".join(map(str, self.runs))
            raise InputError(f"result: there is no seed {describe_value(seed)}; it has {known}")
        return self.runs[seed]
