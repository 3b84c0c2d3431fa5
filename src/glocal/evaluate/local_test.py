"""Local Test: the accuracy of each client's personalised model on its own data.

Liang et al. 2020, section 3.3. `Evaluator` computes predictions for it and for New Test.
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
from glocal.core.modules import Predictor
from glocal.core.sampling import IntArray, to_batches
from glocal.core.store import State
from glocal.core.training import Work, batches
from glocal.core.trees import Params
from glocal.engines import ClientTask, EngineConfig, Executor, ResolvedEngine
from glocal.evaluate.metrics import Metric, accuracy

Accuracies = npt.NDArray[np.float64]
Scores = npt.NDArray[np.bool_] | npt.NDArray[np.float32]
BATCH_SIZE = 256


class AccuracySummary(NamedTuple):
    """Accuracy over clients: mean, mean of the worst tenth, and over all examples together.

    None without any tested example.
    """

    mean: float | None
    worst_tenth: float | None
    pooled: float | None


class Evaluator:
    """Predictions of an algorithm's personalised models on any engine; `metric` scores them."""

    def __init__(
        self,
        algorithm: Algorithm,
        predict: Predictor,
        *,
        engine: EngineConfig | str = "auto",
        metric: Metric = accuracy,
        resolved: Callable[[str], ResolvedEngine] = lambda part: ResolvedEngine(),
    ) -> None:
        self.algorithm, self.predict, self.metric = algorithm, predict, metric
        outputs, scores = resolved("outputs")._asdict(), resolved("scores")._asdict()
        self.outputs = Executor(self._outputs, engine=engine, trains=False, **outputs)
        self.scores = Executor(self._scores, engine=engine, trains=False, **scores)

    def _outputs(self, shared: Params, private: Params, work: Work) -> Tensor:
        """One client's outputs on its rows (steps, batch, classes)."""
        params = self.algorithm.personal(shared, private)
        return torch.stack([self.predict(params, batch.x, batch.mask) for batch in batches(work)])

    def _scores(self, shared: Params, private: Params, work: Work) -> Tensor:
        """The scores of one client's predictions on its rows (steps, batch)."""
        params = self.algorithm.personal(shared, private)
        scores: list[Tensor] = []
        for batch in batches(work):
            predictions = self.predict(params, batch.x, batch.mask).argmax(-1)
            scores.append(self.metric(predictions, batch.y, batch.group))
        return torch.stack(scores)

    def close(self) -> None:
        """Release workers and graphs."""
        self.outputs.close()
        self.scores.close()


@torch.no_grad()
def local_test(evaluator: Evaluator, state: State, data: ClientData) -> Accuracies:
    """Accuracy of each client's model on its own rows (clients,); NaN for a client without rows."""
    return local_tests(evaluator, [state], [data])[0]


@torch.no_grad()
def local_tests(
    evaluator: Evaluator, states: Sequence[State], data: Sequence[ClientData]
) -> list[Accuracies]:
    """The same for several federations; those that share one store are evaluated together."""
    if any(part.examples.x is not data[0].examples.x for part in data):
        return [local_test(evaluator, *pair) for pair in zip(states, data, strict=True)]
    tasks = [*map(_prediction_tasks, states, data)]
    all_tasks = [*chain.from_iterable(tasks)]
    scores = iter(score_tasks(evaluator, all_tasks, data[0].examples))
    accuracies: list[Accuracies] = []
    for part, own_tasks in zip(data, tasks, strict=True):
        own_scores = [*islice(scores, len(own_tasks))]
        accuracies.append(_accuracy_by_client(part, own_scores))
    return accuracies


@torch.no_grad()
def predict_classes(evaluator: Evaluator, state: State, data: ClientData) -> list[IntArray]:
    """The classes that each client's model predicts for its own rows, client by client."""
    outputs = _run_tasks(evaluator.outputs, _prediction_tasks(state, data), data.examples)
    none = np.zeros(0, dtype=np.int64)
    classes = np.concatenate([none, *(logits.argmax(-1) for logits in outputs)])
    return np.split(classes, np.cumsum(data.sizes)[:-1])


def score_tasks(
    evaluator: Evaluator, tasks: Sequence[ClientTask], examples: Examples
) -> list[Scores]:
    """The scores of each task's predictions (rows,)."""
    return _run_tasks(evaluator.scores, tasks, examples)


def summarize(accuracies: Accuracies, sizes: npt.NDArray[np.int64]) -> AccuracySummary:
    """Summarise accuracies (clients,) of clients with these numbers of examples.

    >>> summarize(np.array([1.0, 0.5, np.nan]), np.array([1, 3, 0]))
    AccuracySummary(mean=0.75, worst_tenth=0.5, pooled=0.625)
    """
    tested = np.flatnonzero(sizes)
    if not len(tested):
        return AccuracySummary(None, None, None)
    values = accuracies[tested]
    pooled = float(np.average(values, weights=sizes[tested]))
    return AccuracySummary(float(values.mean()), _worst_tenth(values), pooled)


def _worst_tenth(values: Accuracies) -> float:
    """The mean of the lowest tenth, of at least one value."""
    return float(np.sort(values)[: max(1, round(len(values) / 10))].mean())


def _prediction_tasks(state: State, data: ClientData) -> list[ClientTask]:
    """One task per client with rows; one task for all rows if all clients have the same model."""
    clients = np.flatnonzero(data.sizes).tolist()
    if not clients:
        return []
    if not state.private.initial:
        return [_task(state.shared, {}, data.all_rows())]
    tasks: list[ClientTask] = []
    for client in clients:
        tasks.append(_task(state.shared, state.private.of(client), data.rows[client]))
    return tasks


def _task(shared: Params, private: Params, rows: Rows) -> ClientTask:
    return ClientTask(shared, private, to_batches(rows, BATCH_SIZE))


def _accuracy_by_client(data: ClientData, scores: Sequence[Scores]) -> Accuracies:
    """The mean score of each client (clients,), from scores in the order of clients."""
    values = np.concatenate([*scores, np.zeros(0, dtype=np.bool_)])
    means: list[float] = []
    for end, size in zip(np.cumsum(data.sizes), data.sizes, strict=True):
        means.append(values[end - size : end].mean() if size else np.nan)
    return np.array(means)


def _run_tasks(
    executor: Executor[Tensor], tasks: Sequence[ClientTask], examples: Examples
) -> list[npt.NDArray[Any]]:
    """The results of each task's rows (rows, ...); tasks of one shape run together."""
    results: dict[int, npt.NDArray[Any]] = {}
    for places in _places_by_shape(tasks):
        same_shape = [tasks[place] for place in places]
        stacked = executor(same_shape, examples).stacked().cpu().numpy()
        for place, result in zip(places, stacked, strict=True):
            results[place] = result[tasks[place].order >= 0]
    return [results[place] for place in range(len(tasks))]


def _places_by_shape(tasks: Sequence[ClientTask]) -> list[list[int]]:
    """The places of tasks with the same number of steps, in ascending order of shapes."""
    places: dict[tuple[int, ...], list[int]] = {}
    for place, task in enumerate(tasks):
        places.setdefault(task.order.shape, []).append(place)
    return [places[shape] for shape in sorted(places)]
