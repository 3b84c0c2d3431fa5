"""Successive halving of candidate splits: each trains a few rounds, and the better half goes on.

All candidates start from one model and train as LG-FedAvg does, on the same clients. A client
always trains its whole model, whichever part is shared. So all candidates run side by side in one
batch, on the same examples in the same order. They differ only in what is sent and averaged.
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
from glocal.evaluate import Floats
from glocal.federate.rounds import rows_for_round
from glocal.personalize.advisor.candidates import Candidate
from glocal.wire import Ledger, admit


@dataclass(frozen=True)
class CandidateState:
    """A candidate in training: the clients' whole models, with the same shared tensors in each."""

    candidate: Candidate
    models: tuple[Params, ...]

    @property
    def shared(self) -> Params:
        """The shared part."""
        return self.candidate.split.take_shared(self.models[0])

    def bytes_for(self, rounds: int) -> int:
        """The bytes that some rounds and a validation after them send."""
        return (2 * rounds + 1) * len(self.models) * trees.nbytes(self.shared)


class HalvingSetup(NamedTuple):
    """The same for all candidates: plan, training data, participating clients and executor."""

    plan: Plan
    train: ClientData
    participants: IntArray
    executor: Executor[Update]


class Stage(NamedTuple):
    """Floats after a stage, on two halves of each client's validation data.

    `halves` has the shape (halves, candidates, participants). `sizes` (halves, participants) are
    the numbers of examples behind them.
    """

    rounds: int
    names: tuple[str, ...]
    halves: Floats
    sizes: Floats

    @property
    def accuracies(self) -> Floats:
        """Floats on both halves together (candidates, participants)."""
        weights = self.sizes / self.sizes.sum(0)
        return np.asarray(np.nansum(self.halves * weights[:, None], 0))

    def accuracies_of(self, name: str) -> Floats:
        """Floats of one candidate (participants,)."""
        return np.asarray(self.accuracies[self.names.index(name)])

    def ranking(self) -> list[str]:
        """Names of the candidates, highest mean accuracy first."""
        means = self.accuracies.mean(1)
        return [self.names[place] for place in np.argsort(-means, kind="stable").tolist()]


HalvingRound = tuple[list[CandidateState], Ledger]


def start_halving(
    candidates: Sequence[Candidate], model: Params, num_clients: int
) -> list[CandidateState]:
    """All candidates with the same model on each client."""
    return [CandidateState(candidate, (model,) * num_clients) for candidate in candidates]


def run_rounds(
    setup: HalvingSetup, candidate_states: Sequence[CandidateState], rounds: range
) -> Iterator[HalvingRound]:
    """Rounds of all candidates, one after the other, with the traffic of each."""
    for round_index in rounds:
        tasks = list[ClientTask]()
        for candidate_state in candidate_states:
            tasks += _tasks(setup, candidate_state, round_index)
        trained = setup.executor(tasks, setup.train.examples, round_index).stacked().upload
        averaged, ledger, start = list[CandidateState](), Ledger(), 0
        for candidate_state in candidate_states:
            rows = slice(start, start + len(candidate_state.models))
            own = {name: tensor[rows].clone() for name, tensor in trained.items()}
            after, traffic = _average_shared(setup, candidate_state, own)
            averaged.append(after)
            ledger = ledger + traffic
            start = rows.stop
        candidate_states = averaged
        yield averaged, ledger


def _tasks(
    setup: HalvingSetup, candidate_state: CandidateState, round_index: int
) -> list[ClientTask]:
    """One task per client; examples and their order are the same for every candidate."""
    tasks = []
    for client, model in zip(setup.participants.tolist(), candidate_state.models, strict=True):
        order = rows_for_round(setup.plan, setup.train, round_index, client)
        tasks.append(ClientTask(model, {}, order, client_key(setup.plan, round_index, client)))
    return tasks


def _average_shared(
    setup: HalvingSetup, candidate_state: CandidateState, trained: Params
) -> tuple[CandidateState, Ledger]:
    """A candidate after training: its shared part is uploaded and averaged.

    `trained` are the clients' models (participants, ...).
    """
    split, before = candidate_state.candidate.split, candidate_state.shared
    uploads = admit(split.take_shared(trained), before)
    traffic = Ledger().add_round(
        before,
        uploads,
        num_sampled=len(candidate_state.models),
        num_clients=setup.train.num_clients,
    )
    after = Params()
    if before:
        weights = torch.from_numpy(setup.train.sizes[setup.participants])
        after = average(before, uploads, weights.to(next(iter(trained.values())).device))
    models = []
    for row in range(len(candidate_state.models)):
        model = {
            name: after[name] if name in after else tensor[row] for name, tensor in trained.items()
        }
        models.append(model)
    return replace(candidate_state, models=tuple(models)), traffic


def keep_better_half(
    candidate_states: Sequence[CandidateState], stage: Stage
) -> list[CandidateState]:
    """The better half, rounded up; their order does not change."""
    better = {*stage.ranking()[: -(-len(candidate_states) // 2)]}
    return [each for each in candidate_states if each.candidate.name in better]
