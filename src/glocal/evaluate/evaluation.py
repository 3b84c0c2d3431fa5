"""Local Test (each device's own model on its own data) and New Test (data of unknown origin): Liang et al. 2020, section 3.3."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from glocal.algorithms.contract import Algorithm
from glocal.core.data import ClientData, Examples
from glocal.core.modules import Predictor
from glocal.core.sampling import IntArray, to_batches
from glocal.core.store import State
from glocal.core.training import Work, batches
from glocal.core.trees import Params
from glocal.engines import ClientTask, EngineConfig, Executor, ResolvedEngine

Accuracies = npt.NDArray[np.float64]
Metric = Callable[[Tensor, Tensor, Tensor | None], Tensor]
_BATCH_SIZE = 256
_VOTES_FOR_FULL_SCORE = 3  # people


def accuracy(predictions: Tensor, labels: Tensor, group: Tensor | None) -> Tensor:
    """What each guess is worth (rows,): all if it is the label, else nothing."""
    return predictions == labels


def vqa_accuracy(predictions: Tensor, labels: Tensor, group: Tensor | None) -> Tensor:
    """The same by how many people gave that answer, of those in group (rows, people): min(1, people / 3), Antol et al. 2015.

    >>> vqa_accuracy(torch.tensor([7, 8]), torch.tensor([7, 7]), torch.tensor([[7, 7, 8, -1], [7, 7, 8, -1]]))
    tensor([0.6667, 0.3333])
    """
    if group is None:
        raise ValueError("agreement with people needs their answers, as the examples' group")
    return ((group == predictions[..., None]).sum(-1) / _VOTES_FOR_FULL_SCORE).clamp(max=1)


class AccuracySummary(NamedTuple):
    """Accuracy over devices: mean, mean of the worst tenth, and over all examples together; None where nothing was tested."""

    mean: float | None
    worst_tenth: float | None
    pooled: float | None


class NewTest(NamedTuple):
    """Accuracy of the ensemble on everyone's test data: logits averaged, majority vote, weights averaged."""

    logits: float
    votes: float
    weights: float


class Evaluator:
    """Whatever is needed to predict with an algorithm's personal models, on any engine; `metric` says what a guess is worth."""

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
        outputs, scores = resolved("outputs")._asdict(), resolved("right")._asdict()
        self.outputs = Executor(self._outputs, engine=engine, trains=False, **outputs)
        self.scores = Executor(self._scores, engine=engine, trains=False, **scores)

    def _outputs(self, shared: Params, private: Params, work: Work) -> Tensor:
        """One device's outputs on its rows (steps, batch, classes)."""
        params = self.algorithm.personal(shared, private)
        return torch.stack([self.predict(params, batch.x, batch.mask) for batch in batches(work)])

    def _scores(self, shared: Params, private: Params, work: Work) -> Tensor:
        """What one device's guesses of its rows are worth (steps, batch)."""
        params = self.algorithm.personal(shared, private)
        predictions = (
            (self.predict(params, batch.x, batch.mask).argmax(-1), batch) for batch in batches(work)
        )
        return torch.stack(
            [self.metric(guess, batch.y, batch.group) for guess, batch in predictions]
        )

    def close(self) -> None:
        """Let go of workers and graphs."""
        self.outputs.close()
        self.scores.close()


@torch.no_grad()
def local_test(evaluator: Evaluator, state: State, data: ClientData) -> Accuracies:
    """Accuracy of each device's personal model on its own rows (devices,); NaN for a device without any."""
    return local_tests(evaluator, [state], [data])[0]


@torch.no_grad()
def local_tests(
    evaluator: Evaluator, states: Sequence[State], data: Sequence[ClientData]
) -> list[Accuracies]:
    """The same for several federations side by side; those that deal out one data set are asked all at once."""
    if any(held.examples.x is not data[0].examples.x for held in data):
        return [
            local_test(evaluator, state, held) for state, held in zip(states, data, strict=True)
        ]
    asked = [_prediction_tasks(state, held) for state, held in zip(states, data, strict=True)]
    hits = iter(
        _score_tasks(evaluator, [task for tasks in asked for task in tasks], data[0].examples)
    )
    return [
        _accuracy_by_client(held, [next(hits) for _ in tasks])
        for held, tasks in zip(data, asked, strict=True)
    ]


def _prediction_tasks(state: State, data: ClientData) -> list[ClientTask]:
    """What is to be predicted: by each device's model its own rows; everything at once where all have one model."""
    tested = np.flatnonzero(data.sizes).tolist()
    if not state.private.initial:
        return (
            [ClientTask(state.shared, {}, to_batches(data.all_rows(), _BATCH_SIZE))]
            if tested
            else []
        )
    return [
        ClientTask(state.shared, state.private.of(d), to_batches(data.rows[d], _BATCH_SIZE))
        for d in tested
    ]


Scores = npt.NDArray[np.bool_] | npt.NDArray[np.float32]


def _accuracy_by_client(data: ClientData, answers: Sequence[Scores]) -> Accuracies:
    """The share of right answers, which come device by device, of each device (devices,)."""
    right = np.concatenate([*answers, np.zeros(0, dtype=np.bool_)])
    ends = np.cumsum(data.sizes)
    return np.array(
        [
            right[end - size : end].mean() if size else np.nan
            for end, size in zip(ends, data.sizes, strict=True)
        ]
    )


def _score_tasks(
    evaluator: Evaluator, tasks: Sequence[ClientTask], examples: Examples
) -> list[Scores]:
    """For each task, what its guesses are worth, row by row."""
    return _run_tasks(evaluator.scores, tasks, examples)


def _run_tasks(
    executor: Executor[Tensor], tasks: Sequence[ClientTask], examples: Examples
) -> list[npt.NDArray[Any]]:
    """For each task, what is said of its rows (rows, ...); tasks of one shape at a time."""
    found: dict[int, npt.NDArray[Any]] = {}
    for shape in sorted({task.order.shape for task in tasks}):
        alike = [place for place, task in enumerate(tasks) if task.order.shape == shape]
        said = executor([tasks[place] for place in alike], examples).stacked().cpu().numpy()
        found |= {
            place: each[tasks[place].order >= 0] for place, each in zip(alike, said, strict=True)
        }
    return [found[place] for place in range(len(tasks))]


@torch.no_grad()
def predict_classes(evaluator: Evaluator, state: State, data: ClientData) -> list[IntArray]:
    """The class that each device's personal model tells of each of its own rows, device by device."""
    said = _run_tasks(evaluator.outputs, _prediction_tasks(state, data), data.examples)
    classes = np.concatenate(
        [*(outputs.argmax(-1) for outputs in said), np.zeros(0, dtype=np.int64)]
    )
    return np.split(classes, np.cumsum(data.sizes)[:-1])


@torch.no_grad()
def new_test(evaluator: Evaluator, state: State, data: ClientData) -> NewTest | None:
    """Predict everyone's rows as if they came from a new device, by the ensemble of all devices that have trained."""
    all_rows = data.all_rows()
    if not len(all_rows):
        return None
    members = [state.private.of(client) for client in sorted(state.private.trained)] or [
        state.private.initial
    ]
    if not state.private.initial:
        members = members[:1]
    averaged, most_voted = _ensemble(
        evaluator, [(state.shared, member) for member in members], data, all_rows
    )
    one = _average_model(evaluator.algorithm, state.shared, members)
    whole = evaluator.algorithm._replace(personal=lambda shared, _: shared)
    alone = Evaluator(whole, evaluator.predict, engine="looped", metric=evaluator.metric)
    by_weights = _score_tasks(
        alone, [ClientTask(one, {}, to_batches(all_rows, _BATCH_SIZE))], data.examples
    )[0]
    by_logits, by_votes = (
        _mean_score(evaluator, predictions, data) for predictions in (averaged, most_voted)
    )
    return NewTest(by_logits, by_votes, float(by_weights.mean()))


Ensemble = Sequence[tuple[Params, Params]]


@torch.no_grad()
def ensemble_classes(evaluator: Evaluator, models: Ensemble, data: ClientData) -> Tensor:
    """The class of every row (rows,) by the averaged logits of some models, each a shared and a private tree."""
    return _ensemble(evaluator, models, data, data.all_rows())[0]


def ensemble_accuracy(evaluator: Evaluator, models: Ensemble, data: ClientData) -> float:
    """The share of rows that they get right."""
    return _mean_score(evaluator, ensemble_classes(evaluator, models, data), data)


def _mean_score(evaluator: Evaluator, predictions: Tensor, data: ClientData) -> float:
    """What guesses of everyone's rows (rows,) are worth, on average."""
    _, y, group = data.examples
    rows = torch.from_numpy(data.all_rows()).to(predictions.device)
    return float(
        evaluator.metric(predictions, y[rows], None if group is None else group[rows])
        .double()
        .mean()
    )


def _ensemble(
    evaluator: Evaluator,
    members: Sequence[tuple[Params, Params]],
    data: ClientData,
    pooled: npt.NDArray[np.int64],
) -> tuple[Tensor, Tensor]:
    """The class by averaged logits and by majority vote (the lower class on a tie), a slice of rows at a time."""
    averaged, voted = [], []
    for start in range(0, len(pooled), 4 * _BATCH_SIZE):
        order = to_batches(pooled[start : start + 4 * _BATCH_SIZE], _BATCH_SIZE)
        logits, votes = _sum_logits_and_votes(
            evaluator,
            [ClientTask(shared, private, order) for shared, private in members],
            data.examples,
        )
        kept = min(4 * _BATCH_SIZE, len(pooled) - start)
        averaged.append(logits.argmax(-1)[:kept])
        voted.append(votes.argmax(-1)[:kept])
    return torch.cat(averaged), torch.cat(voted)


def _sum_logits_and_votes(
    evaluator: Evaluator, tasks: Sequence[ClientTask], examples: Examples
) -> tuple[Tensor, Tensor]:
    """Sum of logits and count of votes over members (rows, classes)."""
    sums: list[Tensor] = []
    votes: list[Tensor] = []
    for start in range(0, len(tasks), _BATCH_SIZE):
        outputs = (
            evaluator.outputs(tasks[start : start + _BATCH_SIZE], examples).stacked().flatten(1, 2)
        )
        sums.append(outputs.double().sum(0))
        predictions = outputs.argmax(-1).T
        votes.append(
            torch.zeros_like(sums[0]).scatter_add_(
                1, predictions, torch.ones_like(predictions, dtype=torch.double)
            )
        )
    return torch.stack(sums).sum(0), torch.stack(votes).sum(0)


def _average_model(algorithm: Algorithm, shared: Params, members: Sequence[Params]) -> Params:
    """The mean of the members' personal models, summed one by one: a stack of all would not fit."""
    total: Params = {}
    for member in members:
        personal = algorithm.personal(shared, member)
        total = {name: total.get(name, 0) + tensor.double() for name, tensor in personal.items()}
    like = algorithm.personal(shared, members[0])
    return {
        name: _as_type(tensor / len(members), like[name].dtype) for name, tensor in total.items()
    }


def _as_type(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if dtype.is_floating_point else tensor.round().to(dtype)


def summarize(accuracies: Accuracies, sizes: npt.NDArray[np.int64]) -> AccuracySummary:
    """Sum up accuracies (devices,) of devices with that many examples.

    >>> summarize(np.array([1.0, 0.5, np.nan]), np.array([1, 3, 0]))
    Spread(mean=0.75, worst_tenth=0.5, pooled=0.625)
    """
    tested = np.flatnonzero(sizes)
    if not len(tested):
        return AccuracySummary(None, None, None)
    values = accuracies[tested]
    worst = np.sort(values)[: max(1, round(len(values) / 10))]
    return AccuracySummary(
        float(values.mean()), float(worst.mean()), float(np.average(values, weights=sizes[tested]))
    )
