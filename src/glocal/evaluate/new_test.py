"""New Test: accuracy on data of unknown origin, such as a new client's.

Liang et al. 2020, section 3.3.

All clients that have trained form an ensemble: their logits are averaged, they vote, or their
weights are averaged.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from glocal.algorithms.contract import Algorithm
from glocal.core.data import ClientData, Examples, Rows
from glocal.core.sampling import to_batches
from glocal.core.store import State
from glocal.core.trees import Params
from glocal.engines import ClientTask
from glocal.evaluate.local_test import BATCH_SIZE, Evaluator, score_tasks

Ensemble = Sequence[tuple[Params, Params]]
_SLICE = 4 * BATCH_SIZE  # rows of which the whole ensemble predicts at once


class NewTest(NamedTuple):
    """The ensemble's accuracy by averaged logits, by majority vote, and by averaged weights."""

    logits: float
    votes: float
    weights: float


@torch.no_grad()
def new_test(evaluator: Evaluator, state: State, data: ClientData) -> NewTest | None:
    """Accuracy on all clients' rows, as if they came from a new client; None without rows."""
    rows = data.all_rows()
    if not len(rows):
        return None
    members = _members(state)
    models = [(state.shared, private) for private in members]
    by_logits, by_votes = _ensemble_predictions(evaluator, models, data.examples, rows)
    average = _average_model(evaluator.algorithm, state.shared, members)
    return NewTest(
        _mean_score(evaluator, by_logits, data),
        _mean_score(evaluator, by_votes, data),
        _score_model(evaluator, average, data),
    )


@torch.no_grad()
def ensemble_classes(evaluator: Evaluator, models: Ensemble, data: ClientData) -> Tensor:
    """The class of every row (rows,) by the averaged logits of models (shared and private tree)."""
    return _ensemble_predictions(evaluator, models, data.examples, data.all_rows())[0]


def ensemble_accuracy(evaluator: Evaluator, models: Ensemble, data: ClientData) -> float:
    """The mean score of the ensemble's predictions."""
    return _mean_score(evaluator, ensemble_classes(evaluator, models, data), data)


def _members(state: State) -> list[Params]:
    """The private trees of all clients that have trained; one tree if all have the same model."""
    clients = sorted(state.private.trained)
    if not clients:
        return [state.private.initial]
    if not state.private.initial:
        clients = clients[:1]
    return [state.private.of(client) for client in clients]


def _mean_score(evaluator: Evaluator, predictions: Tensor, data: ClientData) -> float:
    """The mean score of predictions for all clients' rows (rows,)."""
    _, y, group = data.examples
    rows = torch.from_numpy(data.all_rows()).to(predictions.device)
    scores = evaluator.metric(predictions, y[rows], None if group is None else group[rows])
    return float(scores.double().mean())


def _score_model(evaluator: Evaluator, params: Params, data: ClientData) -> float:
    """The mean score of one model on all clients' rows."""
    task = ClientTask(params, {}, to_batches(data.all_rows(), BATCH_SIZE))
    scores = score_tasks(_for_whole_models(evaluator), [task], data.examples)[0]
    return float(scores.mean())


def _for_whole_models(evaluator: Evaluator) -> Evaluator:
    """An evaluator whose shared tree is the whole model."""
    algorithm = evaluator.algorithm._replace(personal=lambda shared, _: shared)
    return Evaluator(algorithm, evaluator.predict, engine="looped", metric=evaluator.metric)


def _ensemble_predictions(
    evaluator: Evaluator, models: Ensemble, examples: Examples, rows: Rows
) -> tuple[Tensor, Tensor]:
    """Classes by averaged logits, and by majority vote (the lower class on a tie), each (rows,)."""
    by_logits: list[Tensor] = []
    by_votes: list[Tensor] = []
    for start in range(0, len(rows), _SLICE):
        part = rows[start : start + _SLICE]
        logits, votes = _sum_logits_and_votes(evaluator, _tasks(models, part), examples)
        by_logits.append(logits.argmax(-1)[: len(part)])
        by_votes.append(votes.argmax(-1)[: len(part)])
    return torch.cat(by_logits), torch.cat(by_votes)


def _tasks(models: Ensemble, rows: Rows) -> list[ClientTask]:
    """The same rows for every model."""
    order = to_batches(rows, BATCH_SIZE)
    return [ClientTask(shared, private, order) for shared, private in models]


def _sum_logits_and_votes(
    evaluator: Evaluator, tasks: Sequence[ClientTask], examples: Examples
) -> tuple[Tensor, Tensor]:
    """The sum of logits and the number of votes over models, each (rows, classes)."""
    logits: list[Tensor] = []
    votes: list[Tensor] = []
    for start in range(0, len(tasks), BATCH_SIZE):
        outputs = _outputs(evaluator, tasks[start : start + BATCH_SIZE], examples)
        logits.append(outputs.double().sum(0))
        votes.append(_count_votes(outputs))
    return torch.stack(logits).sum(0), torch.stack(votes).sum(0)


def _outputs(evaluator: Evaluator, tasks: Sequence[ClientTask], examples: Examples) -> Tensor:
    """The outputs of some models (models, rows, classes), those of padding included."""
    return evaluator.outputs(tasks, examples).stacked().flatten(1, 2)


def _count_votes(outputs: Tensor) -> Tensor:
    """The number of models that predict each class (rows, classes)."""
    _, rows, classes = outputs.shape
    predictions = outputs.argmax(-1).T
    votes = torch.zeros(rows, classes, dtype=torch.double, device=outputs.device)
    return votes.scatter_add_(1, predictions, torch.ones_like(predictions, dtype=torch.double))


def _average_model(algorithm: Algorithm, shared: Params, members: Sequence[Params]) -> Params:
    """The mean of all models, added up one by one: a stack of them may not fit in memory."""
    total: Params = {}
    for private in members:
        total = _add(total, algorithm.personal(shared, private))
    first = algorithm.personal(shared, members[0])
    average: Params = {}
    for name, tensor in total.items():
        average[name] = _as_type(tensor / len(members), first[name].dtype)
    return average


def _add(total: Params, model: Params) -> Params:
    """The sum in float64; an empty tree is 0."""
    return {name: total.get(name, 0) + tensor.double() for name, tensor in model.items()}


def _as_type(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if dtype.is_floating_point else tensor.round().to(dtype)
