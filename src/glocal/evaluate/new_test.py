"""New Test: the figure on data of unknown origin, such as a new client's.

Liang et al. 2020, section 3.3.

All clients that have trained form an ensemble: their outputs are averaged, they vote, or their
weights are averaged.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from glocal.algorithms.contract import Algorithm
from glocal.core.data import ClientData, Examples, Rows
from glocal.core.errors import InputError
from glocal.core.metric import Metric
from glocal.core.sampling import make_rng, to_batches
from glocal.core.store import GroupState
from glocal.core.training import Batch
from glocal.core.trees import Params
from glocal.core.values import Values
from glocal.engines import ClientTask, EngineConfig
from glocal.evaluate.local_test import BATCH_SIZE, Evaluator, figure_of
from glocal.wire import split_private

Models = Sequence[tuple[Params, Params]]
_SLICE = 4 * BATCH_SIZE  # rows of which the whole ensemble predicts at once


class NewTest(NamedTuple):
    """The ensemble's figure by averaged outputs, by majority vote, and by averaged weights.

    That is the task's first metric. None where it is undefined, or where there is nothing to vote
    on. `figures` has all metrics, of the outputs that the task names. The ensemble has `members`
    models, drawn from `of` clients that have trained.
    """

    logits: float | None
    votes: float | None
    weights: float | None
    figures: dict[str, float | None]
    members: int = 0
    of: int = 0


class Ensemble(NamedTuple):
    """What an ensemble gives for some rows: mean outputs (rows, ...), votes (rows, classes)."""

    mean: Tensor
    votes: Tensor | None


@torch.no_grad()
def new_test(
    evaluator: Evaluator,
    state: GroupState,
    data: ClientData,
    *,
    max_members: int | None = None,
    seed: int = 0,
) -> NewTest | None:
    """The figures on all clients' rows, as if they came from a new client; None without rows.

    Of more than `max_members` models, so many are drawn from the seed.
    """
    if not len(data.all_rows()):
        return None
    task, trained = evaluator.task, _trained(state)
    chosen = _draw(trained, max_members, seed)
    members = [state.private.of(client) for client in chosen] or [state.private.initial]
    ensemble = ensemble_outputs(evaluator, [(state.shared, own) for own in members], data)
    average = _average_model(evaluator, state.shared, members)
    whole = evaluator_of_whole_models(evaluator.algorithm)
    of_average = ensemble_outputs(whole, [(average, {})], data)
    votes = None if ensemble.votes is None else _figure(task.metric, ensemble.votes, data)
    outputs = _chosen(evaluator, ensemble)
    return NewTest(
        _figure(task.metric, ensemble.mean, data),
        votes,
        _figure(task.metric, of_average.mean, data),
        {metric.name: _figure(metric, outputs, data) for metric in task.all_metrics},
        members=len(members),
        of=max(1, len(trained)),
    )


@torch.no_grad()
def ensemble_figure(evaluator: Evaluator, models: Models, data: ClientData) -> float | None:
    """The first metric of the outputs of models (shared and private tree) together."""
    outputs = _chosen(evaluator, ensemble_outputs(evaluator, models, data))
    return _figure(evaluator.task.metric, outputs, data)


@torch.no_grad()
def ensemble_classes(evaluator: Evaluator, models: Models, data: ClientData) -> Tensor:
    """The class of every row (rows,) by the averaged outputs of models."""
    return ensemble_outputs(evaluator, models, data).mean.argmax(-1)


@torch.no_grad()
def ensemble_outputs(evaluator: Evaluator, models: Models, data: ClientData) -> Ensemble:
    """The mean outputs and the votes for all clients' rows, in slices of limited memory."""
    rows, means, votes = data.all_rows(), list[Tensor](), list[Tensor]()
    for start in range(0, len(rows), _SLICE):
        part = rows[start : start + _SLICE]
        mean, counts = _mean_and_votes(evaluator, _tasks(models, part), data.examples)
        means.append(mean[: len(part)])
        if counts is not None:
            votes.append(counts[: len(part)])
    return Ensemble(torch.cat(means), torch.cat(votes) if votes else None)


def _chosen(evaluator: Evaluator, ensemble: Ensemble) -> Tensor:
    """The ensemble's outputs as the task wants them."""
    if evaluator.task.ensemble != "votes":
        return ensemble.mean
    if ensemble.votes is None:
        raise InputError(
            f"task: ensemble is 'votes', and there are no classes to vote on: the outputs are "
            f"{tuple(ensemble.mean.shape)}; use 'mean'"
        )
    return ensemble.votes


def _trained(state: GroupState) -> list[int]:
    """All clients that have trained; one of them if all have the same model."""
    clients = sorted(state.private.stored)
    own, _ = split_private(state.private.initial)
    return clients if own else clients[:1]


def _draw(clients: list[int], count: int | None, seed: int) -> list[int]:
    """The clients, or so many of them."""
    if count is None or len(clients) <= count:
        return clients
    drawn: list[int] = make_rng(seed, "ensemble").choice(clients, count, replace=False).tolist()
    return sorted(drawn)


def _figure(metric: Metric, outputs: Tensor, data: ClientData) -> float | None:
    """The figure of outputs for all clients' rows (rows, ...); None where it is undefined."""
    rows = data.all_rows()
    if metric.per_example is None:
        figure = figure_of(metric, outputs, data.examples, rows)
    else:
        x, y, group = data.examples.take(rows)
        mask = torch.ones(len(rows), dtype=torch.bool, device=outputs.device)
        sums, weights = metric.sums(outputs, Batch(x, y, group, mask, mask))
        figure = metric.figure(float(sums.double().sum()), float(weights.double().sum()))
    return None if math.isnan(figure) else figure


class WholeModels(Algorithm):
    """Models that are given whole, as the shared tree, and predict as another algorithm's."""

    of: Algorithm

    def predict(self, params: Params, x: Values, mask: Tensor) -> Tensor:
        """As the other algorithm predicts."""
        return self.of.predict(params, x, mask)


def evaluator_of_whole_models(
    algorithm: Algorithm, *, engine: EngineConfig | str = "looped"
) -> Evaluator:
    """An evaluator for which a model is the shared tree alone."""
    whole = WholeModels(algorithm.task, optimizer=algorithm.optimizer, of=algorithm)
    return Evaluator(whole, engine=engine)


def _tasks(models: Models, rows: Rows) -> list[ClientTask]:
    """The same rows for every model."""
    order = to_batches(rows, BATCH_SIZE)[None]
    return [ClientTask(shared, private, order) for shared, private in models]


def _mean_and_votes(
    evaluator: Evaluator, tasks: Sequence[ClientTask], examples: Examples
) -> tuple[Tensor, Tensor | None]:
    """The mean of outputs over models, and the number of votes for each class (rows, classes)."""
    sums: list[Tensor] = []
    votes: list[Tensor] = []
    by_class = _are_classes(examples)
    for start in range(0, len(tasks), BATCH_SIZE):
        outputs = _outputs(evaluator, tasks[start : start + BATCH_SIZE], examples)
        values = outputs.double()
        if evaluator.task.ensemble == "probabilities":
            values = values.softmax(2) if values.dim() > 2 else values.sigmoid()
        sums.append(values.sum(0))
        if by_class and outputs.dim() == 3:
            votes.append(_count_votes(outputs))
    mean = torch.stack(sums).sum(0) / len(tasks)
    return mean, torch.stack(votes).sum(0) if votes else None


def _are_classes(examples: Examples) -> bool:
    """Whether every example has one whole number as its target."""
    y = examples.y
    return isinstance(y, Tensor) and y.dim() == 1 and not y.is_floating_point()


def _outputs(evaluator: Evaluator, tasks: Sequence[ClientTask], examples: Examples) -> Tensor:
    """The outputs of some models (models, rows, ...), those of padding included."""
    return evaluator.outputs(tasks, examples).stacked().flatten(1, 2)


def _count_votes(outputs: Tensor) -> Tensor:
    """The number of models that predict each class (rows, classes)."""
    _, rows, classes = outputs.shape
    predictions = outputs.argmax(-1).T
    votes = torch.zeros(rows, classes, dtype=torch.double, device=outputs.device)
    return votes.scatter_add_(1, predictions, torch.ones_like(predictions, dtype=torch.double))


def _average_model(evaluator: Evaluator, shared: Params, members: Sequence[Params]) -> Params:
    """The mean of all models, added up one by one: a stack of them may not fit in memory."""
    total: Params = {}
    for private in members:
        total = _add(total, evaluator.personal(shared, private))
    first = evaluator.personal(shared, members[0])
    average: Params = {}
    for name, tensor in total.items():
        average[name] = _as_type(tensor / len(members), first[name].dtype)
    return average


def _add(total: Params, model: Params) -> Params:
    """The sum in float64; an empty tree is 0."""
    return {name: total.get(name, 0) + tensor.double() for name, tensor in model.items()}


def _as_type(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if dtype.is_floating_point else tensor.round().to(dtype)
