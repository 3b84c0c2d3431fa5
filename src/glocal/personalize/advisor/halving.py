"""A race of splits: from one warm model, each a few rounds of LG-FedAvg on the same devices; the better half goes on.

Whatever is shared, a device does the same in a round: it descends on its whole model. So all splits run side by side, as rows of
one batch, on the same examples in the same order; they differ only in what crosses the wire and is averaged.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from glocal.algorithms.contract import Update, average
from glocal.core import trees
from glocal.core.data import Holdings
from glocal.core.sampling import Integers, Plan, noise_key
from glocal.core.trees import Params
from glocal.engines import OverDevices, Task
from glocal.evaluate import Accuracies
from glocal.federate.rounds import visited
from glocal.personalize.advisor.candidates import Candidate
from glocal.wire import Ledger, admit


@dataclass(frozen=True)
class Lane:
    """One split in the race: its devices' whole models, the shared tensors of which are one and the same."""

    candidate: Candidate
    models: tuple[Params, ...]

    @property
    def shared(self) -> Params:
        """What all its devices have in common."""
        return self.candidate.split.take_shared(self.models[0])

    def bytes_of(self, rounds: int) -> int:
        """What so many rounds and a validation afterwards will send."""
        return (2 * rounds + 1) * len(self.models) * trees.nbytes(self.shared)


class Course(NamedTuple):
    """What is raced on: the plan, who holds what, the devices that race, and the engine."""

    plan: Plan
    train: Holdings
    racers: Integers
    over: OverDevices[Update]


class Rung(NamedTuple):
    """Where lanes stand after so many rounds: accuracies on two halves of devices' validation data (halves, lanes, racers)."""

    rounds: int
    names: tuple[str, ...]
    halves: Accuracies
    sizes: Accuracies  # examples behind them (halves, racers)

    @property
    def accuracies(self) -> Accuracies:
        """On both halves together (lanes, racers)."""
        weights = self.sizes / self.sizes.sum(0)
        return np.asarray(np.nansum(self.halves * weights[:, None], 0))

    def of(self, name: str) -> Accuracies:
        """One lane's (racers,)."""
        return np.asarray(self.accuracies[self.names.index(name)])

    def ranking(self) -> list[str]:
        """Names, the best mean over devices first."""
        means = self.accuracies.mean(1)
        return [self.names[place] for place in np.argsort(-means, kind="stable").tolist()]


Rounds = tuple[list[Lane], Ledger]


def start(candidates: Sequence[Candidate], model: Params, racers: int) -> list[Lane]:
    """All splits at the same warm model."""
    return [Lane(candidate, (model,) * racers) for candidate in candidates]


def run(course: Course, lanes: Sequence[Lane], rounds: range) -> Iterator[Rounds]:
    """Some rounds of all lanes, one after the other, with what crossed the wire in each."""
    for round_index in rounds:
        tasks = [task for lane in lanes for task in _tasks(course, lane, round_index)]
        trained = course.over(tasks, course.train.examples, round_index).stacked().upload
        lanes, ledger = list(lanes), Ledger()
        for place, lane in enumerate(lanes):
            rows = slice(place * len(lane.models), (place + 1) * len(lane.models))
            lanes[place], traffic = _met(course, lane, {name: tensor[rows].clone() for name, tensor in trained.items()})
            ledger = ledger + traffic
        yield lanes, ledger


def _tasks(course: Course, lane: Lane, round_index: int) -> list[Task]:
    """What a lane's devices do: the same examples in the same order, whichever lane it is."""
    tasks = []
    for device, model in zip(course.racers.tolist(), lane.models, strict=True):
        order = visited(course.plan, course.train, round_index, device)
        tasks.append(Task(model, {}, order, noise_key(course.plan, round_index, device)))
    return tasks


def _met(course: Course, lane: Lane, trained: Params) -> tuple[Lane, Ledger]:
    """A lane after its devices' models (racers, ...) were trained: the shared part crosses and is averaged, the rest stays."""
    split, before = lane.candidate.split, lane.shared
    uploads = admit(split.take_shared(trained), before)
    traffic = Ledger().after_round(before, uploads, cohort=len(lane.models), devices=course.train.devices)
    weights = torch.from_numpy(course.train.sizes[course.racers])
    after = average(before, uploads, weights.to(next(iter(trained.values())).device)) if before else {}
    local = split.take_local(trained)
    models = tuple({**{name: tensor[row] for name, tensor in local.items()}, **after} for row in range(len(lane.models)))
    return replace(lane, models=tuple({name: model[name] for name in trained} for model in models)), traffic


def halved(lanes: Sequence[Lane], rung: Rung) -> list[Lane]:
    """The better half, rounded up, in the order of the race."""
    kept = {*rung.ranking()[: -(-len(lanes) // 2)]}
    return [lane for lane in lanes if lane.candidate.name in kept]
