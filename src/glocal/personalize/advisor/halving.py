"""Successive halving of candidate splits: each trains a few rounds, and the better half goes on.

All candidates start from one model and train as LG-FedAvg does, on the same clients. A client
always trains its whole model, whichever part is shared. So the clients of all candidates run side
by side in one batch; assignment and collection are each candidate's own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from glocal.algorithms import LGFedAvg, LocalOnly
from glocal.algorithms.contract import Algorithm, change
from glocal.core import trees
from glocal.core.data import ClientData
from glocal.core.sampling import Availability, IntArray, Plan
from glocal.core.store import TrainingState
from glocal.core.trees import Params
from glocal.engines import ClientTask, Executor
from glocal.evaluate import Floats
from glocal.federate.rounds import (
    GroupClients,
    GroupReplies,
    GroupSetup,
    Replica,
    Reply,
    assign,
    client_step,
    collect,
    group_replies,
    start_state,
    start_wires,
)
from glocal.personalize.advisor.candidates import Candidate
from glocal.wire import Ledger


@dataclass(frozen=True)
class CandidateState:
    """A candidate in training: LG-FedAvg with its split, on the participating clients."""

    candidate: Candidate
    replica: Replica
    state: TrainingState
    participants: tuple[int, ...]

    @property
    def shared(self) -> Params:
        """The shared part."""
        return self.state.shared

    @property
    def models(self) -> dict[int, Params]:
        """Every participating client's whole model."""
        private = self.state.private[0]
        return {client: {**private.of(client), **self.shared} for client in self.participants}

    def bytes_for(self, rounds: int) -> int:
        """The bytes that some rounds and a validation after them send."""
        return (2 * rounds + 1) * len(self.participants) * trees.nbytes(self.shared)


class HalvingSetup(NamedTuple):
    """The same for all candidates: algorithm, plan, training data and participating clients."""

    algorithm: Algorithm
    plan: Plan
    train: ClientData
    participants: IntArray


class Stage(NamedTuple):
    """Scores after a stage, on two halves of each client's held-out data; higher is better.

    `halves` (halves, candidates, participants) has the task's first metric, negated where lower is
    better, and NaN where it is undefined. `sizes` (halves, participants) are the numbers of
    examples behind them. Tolerances are shares of `unit`.
    """

    rounds: int
    names: tuple[str, ...]
    halves: Floats
    sizes: Floats
    unit: float = 1.0

    @property
    def scores(self) -> Floats:
        """Scores on both halves together (candidates, participants)."""
        weights = np.where(np.isnan(self.halves), 0.0, self.sizes[:, None])
        with np.errstate(invalid="ignore"):  # NaN where both halves are undefined
            return np.asarray(np.nansum(self.halves * weights, 0) / weights.sum(0))

    def scores_of(self, name: str) -> Floats:
        """Scores of one candidate (participants,)."""
        return np.asarray(self.scores[self.names.index(name)])

    def ranking(self) -> list[str]:
        """Names of the candidates, highest mean first."""
        means = np.nanmean(self.scores, 1)
        return [self.names[place] for place in np.argsort(-means, kind="stable").tolist()]


HalvingRound = tuple[list[CandidateState], Ledger]


def build_whole_executor(setup: HalvingSetup, **settings: object) -> Executor[Reply]:
    """The executor of all candidates' clients: each trains a whole model, of which none is sent."""
    whole = LocalOnly(setup.algorithm.task, optimizer=setup.algorithm.optimizer)
    [wire] = start_wires([GroupSetup(whole, whole.task.initial_params())])
    return Executor(client_step(whole, wire), **settings)  # type: ignore[arg-type]


def start_halving(
    setup: HalvingSetup, candidates: Sequence[Candidate], model: Params
) -> list[CandidateState]:
    """All candidates with the same model on each client."""
    started: list[CandidateState] = []
    clients = tuple(setup.participants.tolist())
    for candidate in candidates:
        algorithm = LGFedAvg(
            setup.algorithm.task,
            optimizer=setup.algorithm.optimizer,
            aggregation=setup.algorithm.aggregation,
            local=sorted(candidate.split.local),
            shared=sorted(candidate.split.shared),
        )
        setups = [GroupSetup(algorithm, model)]
        wires = start_wires(setups)
        groups = (GroupClients(algorithm, setup.train, wires[0]),)
        always = Availability.of((), always=clients)
        replica = Replica(groups, setup.plan, always)
        started.append(CandidateState(candidate, replica, start_state(setups, wires), clients))
    return started


def run_rounds(
    executor: Executor[Reply], states: Sequence[CandidateState], rounds: range
) -> Iterator[HalvingRound]:
    """Rounds of all candidates, one after the other, with the traffic of each."""
    for round_index in rounds:
        assigned = [_assign(each, round_index) for each in states]
        tasks = [task for own in assigned for task in own]
        examples = states[0].replica.groups[0].train.examples
        results = executor([_whole_task(task) for task in tasks], examples, round_index)
        after, ledger, start = list[CandidateState](), Ledger(), 0
        for each, own in zip(states, assigned, strict=True):
            stop = start + len(own)
            sizes = each.replica.groups[0].train.sizes[list(each.participants)]
            clients = list(each.participants)
            trained = group_replies(results, range(start, stop), own, clients, sizes)
            replies = _split_replies(trained)
            state, report = collect(each.replica, each.state, [replies], round_index)
            after.append(replace(each, state=state))
            ledger = ledger + report.traffic[0]
            start = stop
        states = after
        yield after, ledger


def keep_better_half(states: Sequence[CandidateState], stage: Stage) -> list[CandidateState]:
    """The better half, rounded up; their order does not change."""
    better = {*stage.ranking()[: -(-len(states) // 2)]}
    return [each for each in states if each.candidate.name in better]


def _assign(each: CandidateState, round_index: int) -> list[ClientTask]:
    return assign(each.replica, each.state, 0, each.participants, round_index)


def _whole_task(task: ClientTask) -> ClientTask:
    """The same work on the whole model, as a private one; names in one order for all candidates."""
    whole = {**task.private, **task.shared}
    return task._replace(shared={}, private={name: whole[name] for name in sorted(whole)})


def _split_replies(trained: GroupReplies) -> GroupReplies:
    """Trained whole models as what LG-FedAvg's clients send and keep."""
    private: list[Params] = []
    payloads: list[Params] = []
    for model, message in zip(trained.private, trained.sent, strict=True):
        payloads.append(change(model, message))
        private.append(trees.drop(model, message))
    return trained._replace(payloads=trees.stack(payloads), private=private)
