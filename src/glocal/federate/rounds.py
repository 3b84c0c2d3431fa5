"""The simulator: a generator of rounds. The caller's for-loop is the callback."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from glocal.algorithms.contract import Algorithm, Update
from glocal.core import trees
from glocal.core.data import ClientData
from glocal.core.errors import InputError
from glocal.core.sampling import (
    Availability,
    IntArray,
    Plan,
    client_batches,
    client_key,
    sample_available,
    sample_clients,
)
from glocal.core.store import PrivateStates, State, fitting_gpu_rows
from glocal.core.trees import Params
from glocal.engines.config import EngineConfig
from glocal.engines.executor import Executor
from glocal.engines.protocol import ClientResults, ClientTask, to_device, unstack_rows
from glocal.wire import Ledger, admit


class RoundReport(NamedTuple):
    """One round of one federation: who took part, their mean losses (cohort,), and what was sent in it."""

    round_index: int
    clients_per_round: IntArray
    losses: Tensor
    traffic: Ledger


class Seat(NamedTuple):
    """One of several federations that are simulated side by side: its own seed, data and state; who attends, if not all do."""

    plan: Plan
    train: ClientData
    state: State
    attendance: Availability | None = None


def initial_state(algorithm: Algorithm, params: Params, federations: int = 1) -> State:
    """The state before the first round, of one of several federations: every device starts from the same private tree."""
    shared, private = algorithm.init(params)
    return State(shared, PrivateStates(private, {}, fitting_gpu_rows(private, federations)))


def simulate(
    algorithm: Algorithm,
    params: Params,
    train: ClientData,
    plan: Plan,
    *,
    engine: EngineConfig | str = "auto",
) -> Iterator[tuple[State, RoundReport]]:
    """Train one federation, round by round."""
    executor = Executor(algorithm.client_update, engine=engine, num_calls=plan.rounds)
    try:
        for moment in simulate_seeds(
            algorithm, [Seat(plan, train, initial_state(algorithm, params))], executor
        ):
            yield moment[0]
    finally:
        executor.close()


def simulate_seeds(
    algorithm: Algorithm, seats: Sequence[Seat], executor: Executor[Update], *, done: int = 0
) -> Iterator[list[tuple[State, RoundReport]]]:
    """Train several federations side by side, all their devices in one batch; `done` rounds are behind them already."""
    _require_shared_examples(seats)
    rounds = _rounds(algorithm, seats, executor, done)
    if not seats[0].train.examples.y.is_cuda:
        yield from rounds
        return
    underway: deque[Callable[[], list[tuple[State, RoundReport]]]] = deque()
    for moment in rounds:  # a GPU works on the next round while the caller looks at this one
        underway.append(_copy_losses_to_host(moment))
        if len(underway) > 1:
            yield underway.popleft()()
    for landed in underway:
        yield landed()


def _copy_losses_to_host(
    moment: list[tuple[State, RoundReport]],
) -> Callable[[], list[tuple[State, RoundReport]]]:
    """Send a round's losses to the host; what is returned waits for them, and for nothing that comes after them."""
    there = [report.losses for _, report in moment]
    here = [
        torch.empty(losses.shape, dtype=losses.dtype, pin_memory=True).copy_(
            losses, non_blocking=True
        )
        for losses in there
    ]
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()

    def landed() -> list[tuple[State, RoundReport]]:
        arrived.synchronize()
        return [
            (state, report._replace(losses=losses))
            for (state, report), losses in zip(moment, here, strict=True)
        ]

    return landed


def _rounds(
    algorithm: Algorithm, seats: Sequence[Seat], executor: Executor[Update], done: int
) -> Iterator[list[tuple[State, RoundReport]]]:
    plan = seats[0].plan
    for round_index in range(plan.first_round + done, plan.total_rounds):
        duties = [assign_work(seat, round_index) for seat in seats]
        moment = _round(algorithm, seats, duties, executor, round_index)
        seats = [seat._replace(state=state) for seat, (state, _) in zip(seats, moment, strict=True)]
        yield moment


class Duty(NamedTuple):
    """Who takes part in a round, the rows each device will visit, keys of their randomness, and how many left before its end."""

    clients_per_round: IntArray
    orders: list[IntArray]
    keys: list[int]
    left: int = 0


def assign_work(seat: Seat, round_index: int) -> Duty:
    """Who does what in a round: the only place where data enters."""
    plan, train = seat.plan, seat.train
    asked = _sample_clients(seat, round_index)
    cohort = asked if seat.attendance is None else np.setdiff1d(asked, seat.attendance.dropouts)
    orders = [rows_for_round(plan, train, round_index, device) for device in cohort.tolist()]
    keys = [client_key(plan, round_index, device) for device in cohort.tolist()]
    return Duty(cohort, orders, keys, len(asked) - len(cohort))


def rows_for_round(
    plan: Plan, train: ClientData, round_index: int, device: int, *, number: int | None = None
) -> IntArray:
    """The rows that a device visits in a round, in their order; its randomness has the address `number`, if not its own."""
    rows = train.rows[device]
    lengths = None if plan.max_tokens is None else train.text_lengths[rows]
    return client_batches(
        plan, rows, round_index, device if number is None else number, lengths=lengths
    )


def _sample_clients(seat: Seat, round_index: int) -> IntArray:
    """Who is asked to take part."""
    if seat.attendance is None:
        return sample_clients(seat.plan, seat.train.num_clients, round_index)
    asked = sample_available(seat.plan, seat.attendance, round_index)
    if len(asked) and asked[-1] >= seat.train.num_clients:
        raise InputError(
            f"attendance: there is no device {asked[-1]}; devices are 0..{seat.train.num_clients - 1}"
        )
    empty = asked[seat.train.sizes[asked] == 0]
    if len(empty):
        raise InputError(
            f"attendance: device {empty[0]} is present and has no training examples; let it be absent, or give it some"
        )
    return asked


def _round(
    algorithm: Algorithm,
    seats: Sequence[Seat],
    duties: Sequence[Duty],
    executor: Executor[Update],
    round_index: int,
) -> list[tuple[State, RoundReport]]:
    tasks = [
        task for seat, duty in zip(seats, duties, strict=True) for task in _tasks(seat.state, duty)
    ]
    outcome = (
        executor(tasks, seats[0].train.examples, round_index)
        if tasks
        else ClientResults[Update](rows=[])
    )
    moment, start = [], 0
    for seat, duty in zip(seats, duties, strict=True):
        stop = start + len(duty.clients_per_round)
        moment.append(
            _collect(algorithm, seat, duty, _part(outcome, start, stop), round_index)
            if len(duty.clients_per_round)
            else _empty_round(seat, duty, round_index)
        )
        start = stop
    return moment


def _empty_round(seat: Seat, duty: Duty, round_index: int) -> tuple[State, RoundReport]:
    """A round that nobody finished: whoever was asked has received the shared tree, and nothing else happens."""
    traffic = Ledger().add_round(
        seat.state.shared, {}, num_sampled=duty.left, num_clients=seat.train.num_clients
    )
    return seat.state, RoundReport(
        round_index,
        duty.clients_per_round,
        seat.train.examples.x.new_zeros(0, dtype=torch.float32),
        traffic,
    )


def _tasks(state: State, duty: Duty) -> list[ClientTask]:
    rows = [state.private.of(device) for device in duty.clients_per_round.tolist()]
    return [
        ClientTask(state.shared, *task) for task in zip(rows, duty.orders, duty.keys, strict=True)
    ]


class Part(NamedTuple):
    """What came back from one federation's cohort: uploads (cohort, ...), a private tree per device, losses (cohort,)."""

    uploads: Params
    private: list[Params]
    losses: Tensor


def _part(outcome: ClientResults[Update], start: int, stop: int) -> Part:
    if outcome.rows is not None:
        updates = outcome.rows[start:stop]
        uploads = trees.stack([update.upload for update in updates])
        return Part(
            uploads,
            [update.private for update in updates],
            torch.stack([update.loss for update in updates]),
        )
    update = outcome.stacked()
    uploads, private = (
        {name: tensor[start:stop] for name, tensor in tree.items()}
        for tree in (update.upload, update.private)
    )
    return Part(uploads, unstack_rows(private, stop - start), update.loss[start:stop].clone())


def _collect(
    algorithm: Algorithm, seat: Seat, duty: Duty, part: Part, round_index: int
) -> tuple[State, RoundReport]:
    """Count what crosses, average it, put the private rows back."""
    state, clients_per_round = seat.state, duty.clients_per_round
    uploads = admit(part.uploads, state.shared)
    traffic = Ledger().add_round(
        state.shared,
        uploads,
        num_sampled=len(clients_per_round) + duty.left,
        num_clients=seat.train.num_clients,
    )
    weights = to_device(seat.train.sizes[clients_per_round], part.losses.device)
    shared = _without_aliases(algorithm.aggregate(state.shared, uploads, weights), uploads)
    private = state.private.put(clients_per_round.tolist(), part.private)
    return State(shared, private), RoundReport(round_index, clients_per_round, part.losses, traffic)


def _without_aliases(tree: Params, uploads: Params) -> Params:
    """The tree without anything that is part of an upload: the next round may write over those."""
    lent = {tensor.untyped_storage().data_ptr() for tensor in uploads.values()}
    return {
        name: tensor.clone() if tensor.untyped_storage().data_ptr() in lent else tensor
        for name, tensor in tree.items()
    }


def _require_shared_examples(seats: Sequence[Seat]) -> None:
    first = seats[0]
    for seat in seats[1:]:
        if seat.train.examples.x is not first.train.examples.x:
            raise InputError(
                "simulate: federations side by side must deal out one data set; load it once and partition it per seed"
            )
        if replace(seat.plan, seed=0) != replace(first.plan, seed=0):
            raise InputError(
                f"simulate: federations side by side need one plan but for the seed; got {seat.plan} and {first.plan}"
            )
