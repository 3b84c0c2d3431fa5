"""Local Test: the figures of each client's personalised model on its own data.

Liang et al. 2020, section 3.3. `Evaluator` computes outputs and scores for it and for New Test.
"""

from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from glocal.algorithms.contract import Algorithm
from glocal.core.data import ClientData, Examples, Rows
from glocal.core.metric import Metric
from glocal.core.sampling import IntArray, to_batches
from glocal.core.store import GroupState
from glocal.core.training import Work, batches
from glocal.core.trees import Params
from glocal.core.values import map_tensors, take_rows
from glocal.engines import ClientTask, EngineConfig, Executor, ResolvedEngine
from glocal.wire import split_private

Floats = npt.NDArray[np.float64]
BATCH_SIZE = 256


class Summary(NamedTuple):
    """A metric over clients: mean, mean of the worst tenth, and over all examples together.

    None without any client for which it is defined; `undefined` counts the others with examples.
    """

    mean: float | None
    worst_tenth: float | None
    pooled: float | None
    undefined: int = 0


class Figures(NamedTuple):
    """One metric of all clients.

    `by_client` is NaN for a client without examples, or for which the metric is undefined. `pooled`
    is the figure of all examples together.
    """

    metric: Metric
    by_client: Floats
    pooled: float
    sizes: Rows

    def summary(self) -> Summary:
        """The figures over clients."""
        return summarize(
            self.by_client,
            self.sizes,
            pooled=self.pooled,
            higher_is_better=self.metric.higher_is_better,
        )


class Evaluator:
    """The outputs of an algorithm's personalised models, and their scores, on any engine."""

    def __init__(
        self,
        algorithm: Algorithm,
        *,
        engine: EngineConfig | str = "auto",
        resolved: Callable[[str], ResolvedEngine] = lambda part: ResolvedEngine(),
    ) -> None:
        self.algorithm, self.task = algorithm, algorithm.task
        self.summed = [metric for metric in self.task.all_metrics if metric.per_example]
        outputs, scores = resolved("outputs")._asdict(), resolved("scores")._asdict()
        self.outputs = Executor(self._outputs, engine=engine, trains=False, **outputs)
        self.scores = Executor(self._scores, engine=engine, trains=False, **scores)

    def _outputs(self, shared: Params, private: Params, work: Work) -> Tensor:
        """One client's outputs on its rows (steps, batch, ...)."""
        params, predict = self.personal(shared, private), self.algorithm.predict
        return torch.stack([predict(params, batch.x, batch.mask) for batch in batches(work)])

    def _scores(self, shared: Params, private: Params, work: Work) -> Tensor:
        """The sums and weights of one client's rows (steps, batch, metrics, 2)."""
        params = self.personal(shared, private)
        scores: list[Tensor] = []
        for batch in batches(work):
            outputs = self.algorithm.predict(params, batch.x, batch.mask)
            pairs = [metric.sums(outputs, batch) for metric in self.summed]
            scores.append(torch.stack([_as_columns(*pair) for pair in pairs], 1))
        return torch.stack(scores)

    def personal(self, shared: Params, private: Params) -> Params:
        """The params that a client predicts with."""
        own, _ = split_private(private)
        return self.algorithm.personal(shared, own)

    def close(self) -> None:
        """Release workers and graphs."""
        self.outputs.close()
        self.scores.close()


def _as_columns(sums: Tensor, weights: Tensor) -> Tensor:
    """Sums and weights (rows, 2), at least in float32."""
    dtype = torch.promote_types(sums.dtype, torch.float32)
    return torch.stack([sums.to(dtype), weights.to(dtype)], -1)


@torch.no_grad()
def local_test(evaluator: Evaluator, state: GroupState, data: ClientData) -> Floats:
    """The task's first metric of each client's model on its own rows (clients,).

    It is NaN for a client without rows, and where the metric is undefined.
    """
    return local_tests(evaluator, [state], [data])[0]


@torch.no_grad()
def local_tests(
    evaluator: Evaluator, states: Sequence[GroupState], data: Sequence[ClientData]
) -> list[Floats]:
    """The same for several federations; those that share one store are evaluated together."""
    name = evaluator.task.metric.name
    return [figures[name].by_client for figures in local_figures(evaluator, states, data)]


@torch.no_grad()
def local_figures(
    evaluator: Evaluator, states: Sequence[GroupState], data: Sequence[ClientData]
) -> list[dict[str, Figures]]:
    """All metrics of several federations, by name; those with one store are evaluated together."""
    if any(part.examples.x is not data[0].examples.x for part in data):
        single = [local_figures(evaluator, [s], [d]) for s, d in zip(states, data, strict=True)]
        return [*chain.from_iterable(single)]
    tasks = [*map(_prediction_tasks, states, data)]
    scores = _by_federation(evaluator.summed, evaluator.scores, tasks, data)
    whole = [metric for metric in evaluator.task.all_metrics if metric.of_client]
    outputs = _by_federation(whole, evaluator.outputs, tasks, data)
    every: list[dict[str, Figures]] = []
    for part, own_scores, own_outputs in zip(data, scores, outputs, strict=True):
        summed = _summed_figures(evaluator.summed, part, own_scores)
        rest = _whole_figures(whole, part, own_outputs)
        every.append({m.name: {**summed, **rest}[m.name] for m in evaluator.task.all_metrics})
    return every


def _by_federation(
    metrics: Sequence[Metric],
    executor: Executor[Tensor],
    tasks: Sequence[Sequence[ClientTask]],
    data: Sequence[ClientData],
) -> list[npt.NDArray[Any] | None]:
    """The results of every federation's rows, client by client; None where no metric needs them."""
    if not metrics:
        return [None] * len(data)
    results = iter(_run_tasks(executor, [*chain.from_iterable(tasks)], data[0].examples))
    joined: list[npt.NDArray[Any] | None] = []
    for own_tasks in tasks:
        own = [*islice(results, len(own_tasks))]
        joined.append(np.concatenate(own) if own else None)
    return joined


def _summed_figures(
    metrics: Sequence[Metric], data: ClientData, scores: npt.NDArray[Any] | None
) -> dict[str, Figures]:
    """The figures of sums and weights (rows, metrics, 2)."""
    if scores is None:
        return {metric.name: _no_figures(metric, data) for metric in metrics}
    totals = np.stack([part.sum(0, dtype=np.float64) for part in _split_rows(scores, data)])
    figures = {}
    for column, metric in enumerate(metrics):
        by_client = [metric.figure(*pair) for pair in totals[:, column].tolist()]
        pooled = metric.figure(*totals[:, column].sum(0).tolist())
        figures[metric.name] = Figures(metric, np.array(by_client), pooled, data.sizes)
    return figures


def _whole_figures(
    metrics: Sequence[Metric], data: ClientData, outputs: npt.NDArray[Any] | None
) -> dict[str, Figures]:
    """The figures of metrics that need all outputs of a client at once."""
    if outputs is None:
        return {metric.name: _no_figures(metric, data) for metric in metrics}
    parts = [torch.from_numpy(part) for part in _split_rows(outputs, data)]
    figures = {}
    for metric in metrics:
        by_client: list[float] = []
        for rows, part in zip(data.rows, parts, strict=True):
            by_client.append(figure_of(metric, part, data.examples, rows))
        pooled = figure_of(metric, torch.from_numpy(outputs), data.examples, data.all_rows())
        figures[metric.name] = Figures(metric, np.array(by_client), pooled, data.sizes)
    return figures


def figure_of(metric: Metric, outputs: Tensor, examples: Examples, rows: Rows) -> float:
    """A client's figure of a metric that needs all outputs (rows, ...) of the client at once."""
    assert metric.of_client is not None
    index = torch.from_numpy(rows).to(examples.device)
    targets = map_tensors(lambda tensor: tensor.cpu(), take_rows(examples.y, index))
    value = metric.of_client(outputs.cpu(), targets) if len(rows) else None
    return np.nan if value is None else float(value)


def _no_figures(metric: Metric, data: ClientData) -> Figures:
    return Figures(metric, np.full(data.num_clients, np.nan), np.nan, data.sizes)


def _split_rows(values: npt.NDArray[Any], data: ClientData) -> list[npt.NDArray[Any]]:
    """The values of every client's rows."""
    return np.split(values, np.cumsum(data.sizes)[:-1])


@torch.no_grad()
def predict_classes(evaluator: Evaluator, state: GroupState, data: ClientData) -> list[IntArray]:
    """The classes that each client's model predicts for its own rows, client by client."""
    outputs = _run_tasks(evaluator.outputs, _prediction_tasks(state, data), data.examples)
    none = np.zeros(0, dtype=np.int64)
    classes = np.concatenate([none, *(logits.argmax(-1) for logits in outputs)])
    return _split_rows(classes, data)


def summarize(
    by_client: Floats,
    sizes: Rows,
    *,
    pooled: float | None = None,
    higher_is_better: bool = True,
) -> Summary:
    """Summarise figures (clients,) of clients with these numbers of examples.

    Without `pooled`, that is the mean weighted by examples.

    >>> summarize(np.array([1.0, 0.5, np.nan]), np.array([1, 3, 0]))
    Summary(mean=0.75, worst_tenth=0.5, pooled=0.625, undefined=0)
    """
    defined = np.flatnonzero((sizes > 0) & ~np.isnan(by_client))
    undefined = int(np.count_nonzero(sizes)) - len(defined)
    if not len(defined):
        return Summary(None, None, None, undefined)
    values = by_client[defined]
    if pooled is None:
        pooled = float(np.average(values, weights=sizes[defined]))
    worst = _worst_tenth(values if higher_is_better else -values)
    worst_tenth = worst if higher_is_better else -worst
    overall = None if np.isnan(pooled) else pooled
    return Summary(float(values.mean()), worst_tenth, overall, undefined)


def _worst_tenth(values: Floats) -> float:
    """The mean of the lowest tenth, of at least one value."""
    return float(np.sort(values)[: max(1, round(len(values) / 10))].mean())


def _prediction_tasks(state: GroupState, data: ClientData) -> list[ClientTask]:
    """One task per client with rows; one task for all rows if all clients have the same model."""
    clients = np.flatnonzero(data.sizes).tolist()
    if not clients:
        return []
    own, _ = split_private(state.private.initial)
    if not own:
        return [_task(state.shared, {}, data.all_rows())]
    tasks: list[ClientTask] = []
    for client in clients:
        tasks.append(_task(state.shared, state.private.of(client), data.rows[client]))
    return tasks


def _task(shared: Params, private: Params, rows: Rows) -> ClientTask:
    return ClientTask(shared, private, to_batches(rows, BATCH_SIZE)[None])


def _run_tasks(
    executor: Executor[Tensor], tasks: Sequence[ClientTask], examples: Examples
) -> list[npt.NDArray[Any]]:
    """The results of each task's rows (rows, ...); tasks of one shape run together."""
    results: dict[int, npt.NDArray[Any]] = {}
    for places in _places_by_shape(tasks):
        same_shape = [tasks[place] for place in places]
        stacked = executor(same_shape, examples).stacked().cpu().numpy()
        for place, result in zip(places, stacked, strict=True):
            results[place] = result[tasks[place].order[0] >= 0]
    return [results[place] for place in range(len(tasks))]


def _places_by_shape(tasks: Sequence[ClientTask]) -> list[list[int]]:
    """The places of tasks with the same number of steps, in ascending order of shapes."""
    places: dict[tuple[int, ...], list[int]] = {}
    for place, task in enumerate(tasks):
        places.setdefault(task.order.shape, []).append(place)
    return [places[shape] for shape in sorted(places)]
