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
from glocal.core.data import ClientData
from glocal.core.sampling import IntArray, Plan, client_key
from glocal.core.trees import Params
from glocal.engines import ClientTask, Executor
from glocal.evaluate import Accuracies
from glocal.federate.rounds import rows_for_round
from glocal.personalize.advisor.candidates import Candidate
from glocal.wire import Ledger, admit


@dataclass(frozen=True)
class CandidateState:
    """One split in the race: its devices' whole models, the shared tensors of which are one and the same."""

    candidate: Candidate
    models: tuple[Params, ...]

    @property
    def shared(self) -> Params:
        """What all its devices have in common."""
        return self.candidate.split.take_shared(self.models[0])

    def bytes_for(self, rounds: int) -> int:
        """What so many rounds and a validation afterwards will send."""
        return (2 * rounds + 1) * len(self.models) * trees.nbytes(self.shared)


class HalvingSetup(NamedTuple):
    """What is raced on: the plan, who holds what, the devices that race, and the engine."""

    plan: Plan
    train: ClientData
    participants: IntArray
    executor: Executor[Update]


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

    def accuracies_of(self, name: str) -> Accuracies:
        """One lane's (racers,)."""
        return np.asarray(self.accuracies[self.names.index(name)])

    def ranking(self) -> list[str]:
        """Names, the best mean over devices first."""
        means = self.accuracies.mean(1)
        return [self.names[place] for place in np.argsort(-means, kind="stable").tolist()]


HalvingRound = tuple[list[CandidateState], Ledger]


def start_halving(
    candidates: Sequence[Candidate], model: Params, num_clients: int
) -> list[CandidateState]:
    """All splits at the same warm model."""
    return [CandidateState(candidate, (model,) * num_clients) for candidate in candidates]


def run_rounds(
    setup: HalvingSetup, candidate_states: Sequence[CandidateState], rounds: range
) -> Iterator[HalvingRound]:
    """Some rounds of all lanes, one after the other, with what crossed the wire in each."""
    for round_index in rounds:
        tasks = [
            task
            for candidate_state in candidate_states
            for task in _tasks(setup, candidate_state, round_index)
        ]
        trained = setup.executor(tasks, setup.train.examples, round_index).stacked().upload
        candidate_states, ledger = list(candidate_states), Ledger()
        for place, candidate_state in enumerate(candidate_states):
            rows = slice(
                place * len(candidate_state.models), (place + 1) * len(candidate_state.models)
            )
            candidate_states[place], traffic = _average_shared(
                setup,
                candidate_state,
                {name: tensor[rows].clone() for name, tensor in trained.items()},
            )
            ledger = ledger + traffic
        yield candidate_states, ledger


def _tasks(
    setup: HalvingSetup, candidate_state: CandidateState, round_index: int
) -> list[ClientTask]:
    """What a lane's devices do: the same examples in the same order, whichever lane it is."""
    tasks = []
    for client, model in zip(setup.participants.tolist(), candidate_state.models, strict=True):
        order = rows_for_round(setup.plan, setup.train, round_index, client)
        tasks.append(ClientTask(model, {}, order, client_key(setup.plan, round_index, client)))
    return tasks


def _average_shared(
    setup: HalvingSetup, candidate_state: CandidateState, trained: Params
) -> tuple[CandidateState, Ledger]:
    """A lane after its devices' models (racers, ...) were trained: the shared part crosses and is averaged, the rest stays."""
    split, before = candidate_state.candidate.split, candidate_state.shared
    uploads = admit(split.take_shared(trained), before)
    traffic = Ledger().add_round(
        before,
        uploads,
        num_sampled=len(candidate_state.models),
        num_clients=setup.train.num_clients,
    )
    weights = torch.from_numpy(setup.train.sizes[setup.participants])
    after = (
        average(before, uploads, weights.to(next(iter(trained.values())).device)) if before else {}
    )
    local = split.take_local(trained)
    models = tuple(
        {**{name: tensor[row] for name, tensor in local.items()}, **after}
        for row in range(len(candidate_state.models))
    )
    return replace(
        candidate_state, models=tuple({name: model[name] for name in trained} for model in models)
    ), traffic


def keep_better_half(
    candidate_states: Sequence[CandidateState], rung: Rung
) -> list[CandidateState]:
    """The better half, rounded up, in the order of the race."""
    kept = {*rung.ranking()[: -(-len(candidate_states) // 2)]}
    return [
        candidate_state
        for candidate_state in candidate_states
        if candidate_state.candidate.name in kept
    ]
