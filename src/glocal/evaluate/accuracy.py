"""Local Test (each device's own model on its own data) and New Test (data of unknown origin): Liang et al. 2020, section 3.3."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from glocal.algorithms.contract import Algorithm
from glocal.core.data import Examples, Holdings
from glocal.core.modules import Predict
from glocal.core.sampling import Integers, in_batches
from glocal.core.store import State
from glocal.core.training import Work, batches
from glocal.core.trees import Params
from glocal.engines import Engine, OverDevices, Settled, Task

Accuracies = npt.NDArray[np.float64]
Credit = Callable[[Tensor, Tensor, Tensor | None], Tensor]
_BATCH = 256
_AGREE = 3  # people


def matching(guesses: Tensor, labels: Tensor, group: Tensor | None) -> Tensor:
    """What each guess is worth (rows,): all if it is the label, else nothing."""
    return guesses == labels


def agreeing(guesses: Tensor, labels: Tensor, group: Tensor | None) -> Tensor:
    """The same by how many people gave that answer, of those in group (rows, people): min(1, people / 3), Antol et al. 2015.

    >>> agreeing(torch.tensor([7, 8]), torch.tensor([7, 7]), torch.tensor([[7, 7, 8, -1], [7, 7, 8, -1]]))
    tensor([0.6667, 0.3333])
    """
    if group is None:
        raise ValueError("agreement with people needs their answers, as the examples' group")
    return ((group == guesses[..., None]).sum(-1) / _AGREE).clamp(max=1)


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
    """Whatever is needed to predict with an algorithm's personal models, on any engine; `credit` says what a guess is worth."""

    def __init__(
        self,
        algorithm: Algorithm,
        predict: Predict,
        *,
        engine: Engine | str = "auto",
        credit: Credit = matching,
        settled: Callable[[str], Settled] = lambda part: Settled(),
    ) -> None:
        self.algorithm, self.predict, self.credit = algorithm, predict, credit
        outputs, right = settled("outputs")._asdict(), settled("right")._asdict()
        self.outputs = OverDevices(self._outputs, engine=engine, descends=False, **outputs)
        self.right = OverDevices(self._right, engine=engine, descends=False, **right)

    def _outputs(self, shared: Params, private: Params, work: Work) -> Tensor:
        """One device's outputs on its rows (steps, batch, classes)."""
        params = self.algorithm.personal(shared, private)
        return torch.stack([self.predict(params, batch.x, batch.mask) for batch in batches(work)])

    def _right(self, shared: Params, private: Params, work: Work) -> Tensor:
        """What one device's guesses of its rows are worth (steps, batch)."""
        params = self.algorithm.personal(shared, private)
        guesses = ((self.predict(params, batch.x, batch.mask).argmax(-1), batch) for batch in batches(work))
        return torch.stack([self.credit(guess, batch.y, batch.group) for guess, batch in guesses])

    def close(self) -> None:
        """Let go of workers and graphs."""
        self.outputs.close()
        self.right.close()


@torch.no_grad()
def local_test(evaluation: Evaluation, state: State, holdings: Holdings) -> Accuracies:
    """Accuracy of each device's personal model on its own rows (devices,); NaN for a device without any."""
    return local_tests(evaluation, [state], [holdings])[0]


@torch.no_grad()
def local_tests(evaluation: Evaluation, states: Sequence[State], holdings: Sequence[Holdings]) -> list[Accuracies]:
    """The same for several federations side by side; those that deal out one data set are asked all at once."""
    if any(held.examples.x is not holdings[0].examples.x for held in holdings):
        return [local_test(evaluation, state, held) for state, held in zip(states, holdings, strict=True)]
    asked = [_questions(state, held) for state, held in zip(states, holdings, strict=True)]
    hits = iter(_hits(evaluation, [task for tasks in asked for task in tasks], holdings[0].examples))
    return [_accuracies(held, [next(hits) for _ in tasks]) for held, tasks in zip(holdings, asked, strict=True)]


def _questions(state: State, holdings: Holdings) -> list[Task]:
    """What is to be predicted: by each device's model its own rows; everything at once where all have one model."""
    tested = np.flatnonzero(holdings.sizes).tolist()
    if not state.private.initial:
        return [Task(state.shared, {}, in_batches(holdings.pooled(), _BATCH))] if tested else []
    return [Task(state.shared, state.private.of(d), in_batches(holdings.rows[d], _BATCH)) for d in tested]


Worth = npt.NDArray[np.bool_] | npt.NDArray[np.float32]


def _accuracies(holdings: Holdings, answers: Sequence[Worth]) -> Accuracies:
    """The share of right answers, which come device by device, of each device (devices,)."""
    right = np.concatenate([*answers, np.zeros(0, dtype=np.bool_)])
    ends = np.cumsum(holdings.sizes)
    return np.array([right[end - size : end].mean() if size else np.nan for end, size in zip(ends, holdings.sizes, strict=True)])


def _hits(evaluation: Evaluation, tasks: Sequence[Task], examples: Examples) -> list[Worth]:
    """For each task, what its guesses are worth, row by row."""
    return _answers(evaluation.right, tasks, examples)


def _answers(over: OverDevices[Tensor], tasks: Sequence[Task], examples: Examples) -> list[npt.NDArray[Any]]:
    """For each task, what is said of its rows (rows, ...); tasks of one shape at a time."""
    found: dict[int, npt.NDArray[Any]] = {}
    for shape in sorted({task.order.shape for task in tasks}):
        alike = [place for place, task in enumerate(tasks) if task.order.shape == shape]
        said = over([tasks[place] for place in alike], examples).stacked().cpu().numpy()
        found |= {place: each[tasks[place].order >= 0] for place, each in zip(alike, said, strict=True)}
    return [found[place] for place in range(len(tasks))]


@torch.no_grad()
def guesses(evaluation: Evaluation, state: State, holdings: Holdings) -> list[Integers]:
    """The class that each device's personal model tells of each of its own rows, device by device."""
    said = _answers(evaluation.outputs, _questions(state, holdings), holdings.examples)
    classes = np.concatenate([*(outputs.argmax(-1) for outputs in said), np.zeros(0, dtype=np.int64)])
    return np.split(classes, np.cumsum(holdings.sizes)[:-1])


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
    whole = evaluation.algorithm._replace(personal=lambda shared, _: shared)
    alone = Evaluation(whole, evaluation.predict, engine="looped", credit=evaluation.credit)
    by_weights = _hits(alone, [Task(one, {}, in_batches(pooled, _BATCH))], holdings.examples)[0]
    by_logits, by_votes = (_worth(evaluation, guesses, holdings) for guesses in (averaged, most_voted))
    return NewTest(by_logits, by_votes, float(by_weights.mean()))


Models = Sequence[tuple[Params, Params]]


@torch.no_grad()
def ensemble_classes(evaluation: Evaluation, models: Models, holdings: Holdings) -> Tensor:
    """The class of every row (rows,) by the averaged logits of some models, each a shared and a private tree."""
    return _ensemble(evaluation, models, holdings, holdings.pooled())[0]


def ensemble_accuracy(evaluation: Evaluation, models: Models, holdings: Holdings) -> float:
    """The share of rows that they get right."""
    return _worth(evaluation, ensemble_classes(evaluation, models, holdings), holdings)


def _worth(evaluation: Evaluation, guesses: Tensor, holdings: Holdings) -> float:
    """What guesses of everyone's rows (rows,) are worth, on average."""
    _, y, group = holdings.examples
    rows = torch.from_numpy(holdings.pooled()).to(guesses.device)
    return float(evaluation.credit(guesses, y[rows], None if group is None else group[rows]).double().mean())


def _ensemble(
    evaluation: Evaluation, members: Sequence[tuple[Params, Params]], holdings: Holdings, pooled: npt.NDArray[np.int64]
) -> tuple[Tensor, Tensor]:
    """The class by averaged logits and by majority vote (the lower class on a tie), a slice of rows at a time."""
    averaged, voted = [], []
    for start in range(0, len(pooled), 4 * _BATCH):
        order = in_batches(pooled[start : start + 4 * _BATCH], _BATCH)
        logits, votes = _polled(evaluation, [Task(shared, private, order) for shared, private in members], holdings.examples)
        kept = min(4 * _BATCH, len(pooled) - start)
        averaged.append(logits.argmax(-1)[:kept])
        voted.append(votes.argmax(-1)[:kept])
    return torch.cat(averaged), torch.cat(voted)


def _polled(evaluation: Evaluation, tasks: Sequence[Task], examples: Examples) -> tuple[Tensor, Tensor]:
    """Sum of logits and count of votes over members (rows, classes)."""
    sums: list[Tensor] = []
    votes: list[Tensor] = []
    for start in range(0, len(tasks), _BATCH):
        outputs = evaluation.outputs(tasks[start : start + _BATCH], examples).stacked().flatten(1, 2)
        sums.append(outputs.double().sum(0))
        guesses = outputs.argmax(-1).T
        votes.append(torch.zeros_like(sums[0]).scatter_add_(1, guesses, torch.ones_like(guesses, dtype=torch.double)))
    return torch.stack(sums).sum(0), torch.stack(votes).sum(0)


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
