"""Local Test (each device's own model on its own data) and New Test (data of unknown origin): Liang et al. 2020, section 3.3."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from glocal.algorithm import Algorithm
from glocal.backends import OverDevices, Task
from glocal.federation import Examples, Holdings
from glocal.modules import Predict
from glocal.sampling import in_turn
from glocal.store import State
from glocal.training import Work, batch_at
from glocal.trees import Params

Accuracies = npt.NDArray[np.float64]
_BATCH = 256


class Spread(NamedTuple):
    """Accuracy over devices: mean, mean of the worst tenth, and over all examples together; None where nothing was tested."""

    mean: float | None
    worst_tenth: float | None
    pooled: float | None


class NewTest(NamedTuple):
    """Accuracy of the ensemble on everyone's test data: logits averaged, majority vote, weights averaged."""

    logits: float
    votes: float
    weights: float


class Evaluation:
    """Whatever is needed to predict with an algorithm's personal models, on any engine."""

    def __init__(self, algorithm: Algorithm, predict: Predict, *, engine: str = "auto", chunk: int | None = None) -> None:
        self.algorithm, self.predict = algorithm, predict
        self.over = OverDevices(self._outputs, engine=engine, chunk=chunk)

    def _outputs(self, shared: Params, private: Params, work: Work) -> Tensor:
        """One device's outputs on its rows (steps, batch, classes)."""
        params = self.algorithm.personal(shared, private)
        batches = (batch_at(work, step) for step in range(work.order.shape[0]))
        return torch.stack([self.predict(params, batch.x, batch.mask) for batch in batches])


@torch.no_grad()
def local_test(evaluation: Evaluation, state: State, holdings: Holdings) -> Accuracies:
    """Accuracy of each device's personal model on its own rows (devices,); NaN for a device without any."""
    if not state.private.initial:
        return _shared_model_on_each(evaluation, state, holdings)
    accuracies = np.full(holdings.devices, np.nan)
    tested = np.flatnonzero(holdings.sizes)
    if not len(tested):
        return accuracies
    batch = int(min(_BATCH, holdings.sizes.max()))
    orders = [_rows_in_turn(holdings.rows[device], batch) for device in tested]
    tasks = [Task(state.shared, state.private.of(device), order) for device, order in zip(tested.tolist(), orders, strict=True)]
    for device, hits in zip(tested, _hits(evaluation, tasks, holdings.examples), strict=True):
        accuracies[device] = hits.mean()
    return accuracies


def _shared_model_on_each(evaluation: Evaluation, state: State, holdings: Holdings) -> Accuracies:
    """All devices have one model: predict everything once, then ask each device's rows."""
    right = np.full(len(holdings.examples.y), np.nan)
    pooled = holdings.pooled()
    if len(pooled):
        task = Task(state.shared, {}, _rows_in_turn(pooled, _BATCH))
        right[pooled] = next(_hits(evaluation, [task], holdings.examples))
    return np.array([right[rows].mean() if len(rows) else np.nan for rows in holdings.rows])


def _hits(evaluation: Evaluation, tasks: Sequence[Task], examples: Examples) -> Iterator[npt.NDArray[np.bool_]]:
    """For each task, which of its rows are predicted right; a bounded number of devices' outputs is held at a time."""
    for group in _groups(tasks):
        outputs = evaluation.over(group, examples)
        for task, output in zip(group, outputs, strict=True):
            rows = task.order.reshape(-1)
            guesses = output[: len(task.order)].argmax(-1).reshape(-1)
            labels = examples.y[torch.from_numpy(rows.clip(min=0)).to(examples.y.device)]
            yield (guesses == labels).cpu().numpy()[rows >= 0]


def _groups(tasks: Sequence[Task]) -> Iterator[Sequence[Task]]:
    for start in range(0, len(tasks), _BATCH):
        yield tasks[start : start + _BATCH]


@torch.no_grad()
def new_test(evaluation: Evaluation, state: State, holdings: Holdings) -> NewTest | None:
    """Predict everyone's rows as if they came from a new device, by the ensemble of all devices that have trained."""
    pooled = holdings.pooled()
    if not len(pooled):
        return None
    members = [state.private.of(device) for device in sorted(state.private.trained)] or [state.private.initial]
    if not state.private.initial:
        members = members[:1]
    averaged, most_voted = _ensemble(evaluation, [(state.shared, member) for member in members], holdings, pooled)
    one = _average_model(evaluation.algorithm, state.shared, members)
    by_weights = OverDevices(lambda shared, _, work: _plain(evaluation.predict, shared, work))
    output = by_weights([Task(one, {}, _rows_in_turn(pooled, _BATCH))], holdings.examples)[0]
    weights = output.argmax(-1).reshape(-1)[: len(pooled)]
    labels = holdings.examples.y[torch.from_numpy(pooled).to(weights.device)]
    return NewTest(*(float((guesses == labels).double().mean()) for guesses in (averaged, most_voted, weights)))


def _ensemble(
    evaluation: Evaluation, members: Sequence[tuple[Params, Params]], holdings: Holdings, pooled: npt.NDArray[np.int64]
) -> tuple[Tensor, Tensor]:
    """The class by averaged logits and by majority vote (the lower class on a tie), a slice of rows at a time."""
    averaged, voted = [], []
    for start in range(0, len(pooled), 4 * _BATCH):
        order = _rows_in_turn(pooled[start : start + 4 * _BATCH], _BATCH)
        logits, votes = _polled(evaluation, [Task(shared, private, order) for shared, private in members], holdings.examples)
        kept = min(4 * _BATCH, len(pooled) - start)
        averaged.append(logits.argmax(-1)[:kept])
        voted.append(votes.argmax(-1)[:kept])
    return torch.cat(averaged), torch.cat(voted)


def _polled(evaluation: Evaluation, tasks: Sequence[Task], examples: Examples) -> tuple[Tensor, Tensor]:
    """Sum of logits and count of votes over members (rows, classes)."""
    logits: Tensor | int = 0
    votes: Tensor | int = 0
    for group in _groups(tasks):
        outputs = evaluation.over(group, examples).flatten(1, 2)
        logits = logits + outputs.double().sum(0)
        votes = votes + torch.nn.functional.one_hot(outputs.argmax(-1), outputs.shape[-1]).sum(0)
    return torch.as_tensor(logits), torch.as_tensor(votes)


def _plain(predict: Predict, params: Params, work: Work) -> Tensor:
    batches = (batch_at(work, step) for step in range(work.order.shape[0]))
    return torch.stack([predict(params, batch.x, batch.mask) for batch in batches])


def _average_model(algorithm: Algorithm, shared: Params, members: Sequence[Params]) -> Params:
    """The mean of the members' personal models, summed one by one: a stack of all would not fit."""
    total: Params = {}
    for member in members:
        personal = algorithm.personal(shared, member)
        total = {name: total.get(name, 0) + tensor.double() for name, tensor in personal.items()}
    like = algorithm.personal(shared, members[0])
    return {name: _as_type(tensor / len(members), like[name].dtype) for name, tensor in total.items()}


def _as_type(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if dtype.is_floating_point else tensor.round().to(dtype)


def _rows_in_turn(rows: npt.NDArray[np.int64], batch: int) -> npt.NDArray[np.int64]:
    order = in_turn(len(rows), batch)
    return np.where(order >= 0, rows[order.clip(min=0)], -1)


def spread(accuracies: Accuracies, sizes: npt.NDArray[np.int64]) -> Spread:
    """Sum up accuracies (devices,) of devices with that many examples.

    >>> spread(np.array([1.0, 0.5, np.nan]), np.array([1, 3, 0]))
    Spread(mean=0.75, worst_tenth=0.5, pooled=0.625)
    """
    tested = np.flatnonzero(sizes)
    if not len(tested):
        return Spread(None, None, None)
    values = accuracies[tested]
    worst = np.sort(values)[: max(1, round(len(values) / 10))]
    return Spread(float(values.mean()), float(worst.mean()), float(np.average(values, weights=sizes[tested])))
