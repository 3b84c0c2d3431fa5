"""The simulator: a generator of rounds, which the caller reads in a for-loop."""

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
    """One round of one federation: its sampled clients, their losses (clients,), its traffic."""

    round_index: int
    sampled: IntArray
    losses: Tensor
    traffic: Ledger


class Seat(NamedTuple):
    """One of several federations side by side, with its own seed, data and state.

    All clients are available if there is no `availability`.
    """

    plan: Plan
    train: ClientData
    state: State
    availability: Availability | None = None


def initial_state(algorithm: Algorithm, params: Params, federations: int = 1) -> State:
    """The state before the first round: each client starts with the same private tree."""
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
    """Train one federation and yield its state and a report after every round."""
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
    """Train several federations side by side, all clients in one batch, after `done` rounds."""
    _require_shared_examples(seats)
    rounds = _rounds(algorithm, seats, executor, done)
    if not seats[0].train.examples.device.type == "cuda":
        yield from rounds
        return
    # A round is yielded only after the next one was started: the GPU computes the next round while
    # the caller handles this one. So losses are copied without blocking, and waited for later.
    pending: deque[Callable[[], list[tuple[State, RoundReport]]]] = deque()
    for moment in rounds:
        pending.append(_copy_losses_to_cpu(moment))
        if len(pending) > 1:
            yield pending.popleft()()
    for wait in pending:
        yield wait()


def _copy_losses_to_cpu(
    moment: list[tuple[State, RoundReport]],
) -> Callable[[], list[tuple[State, RoundReport]]]:
    """Start copying a round's losses to the CPU.

    The returned function waits for the copy, but for no later work of the GPU, and gives the round.
    """
    copies = []
    for _, report in moment:
        losses = report.losses
        pinned = torch.empty(losses.shape, dtype=losses.dtype, pin_memory=True)
        copies.append(pinned.copy_(losses, non_blocking=True))
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()

    def wait() -> list[tuple[State, RoundReport]]:
        copied.synchronize()
        return [
            (state, report._replace(losses=losses))
            for (state, report), losses in zip(moment, copies, strict=True)
        ]

    return wait


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
    """The clients of a round, each one's rows in order, and the keys of their randomness.

    `left` is how many sampled clients left before the end of the round.
    """

    sampled: IntArray
    orders: list[IntArray]
    keys: list[int]
    left: int = 0


def assign_work(seat: Seat, round_index: int) -> Duty:
    """The clients of a round and their rows: data enter a round only here."""
    plan, train = seat.plan, seat.train
    sampled = _sample_clients(seat, round_index)
    clients = sampled
    if seat.availability is not None:
        clients = np.setdiff1d(sampled, seat.availability.dropouts)
    orders = [rows_for_round(plan, train, round_index, client) for client in clients.tolist()]
    keys = [client_key(plan, round_index, client) for client in clients.tolist()]
    return Duty(clients, orders, keys, len(sampled) - len(clients))


def rows_for_round(
    plan: Plan, train: ClientData, round_index: int, client: int, *, number: int | None = None
) -> IntArray:
    """A client's rows in a round, in their order.

    `number` is the address of the client's randomness, if it is not `client` itself.
    """
    rows = train.rows[client]
    lengths = None if plan.max_tokens is None else train.text_lengths[rows]
    address = client if number is None else number
    return client_batches(plan, rows, round_index, address, lengths=lengths)


def _sample_clients(seat: Seat, round_index: int) -> IntArray:
    """The sampled clients of a round."""
    num_clients = seat.train.num_clients
    if seat.availability is None:
        return sample_clients(seat.plan, num_clients, round_index)
    sampled = sample_available(seat.plan, seat.availability, round_index)
    if len(sampled) and sampled[-1] >= num_clients:
        raise InputError(
            f"availability: there is no client {sampled[-1]}; clients are 0..{num_clients - 1}"
        )
    empty = sampled[seat.train.sizes[sampled] == 0]
    if len(empty):
        raise InputError(
            f"availability: client {empty[0]} is available and has no training examples; "
            "let it be absent, or give it some"
        )
    return sampled


def _round(
    algorithm: Algorithm,
    seats: Sequence[Seat],
    duties: Sequence[Duty],
    executor: Executor[Update],
    round_index: int,
) -> list[tuple[State, RoundReport]]:
    tasks = list[ClientTask]()
    for seat, duty in zip(seats, duties, strict=True):
        tasks += _tasks(seat.state, duty)
    results = ClientResults[Update](rows=[])
    if tasks:
        results = executor(tasks, seats[0].train.examples, round_index)
    moment, start = [], 0
    for seat, duty in zip(seats, duties, strict=True):
        stop = start + len(duty.sampled)
        if stop > start:
            part = _part(results, start, stop)
            moment.append(_collect(algorithm, seat, duty, part, round_index))
        else:
            moment.append(_empty_round(seat, duty, round_index))
        start = stop
    return moment


def _empty_round(seat: Seat, duty: Duty, round_index: int) -> tuple[State, RoundReport]:
    """A round that no client finished: sampled clients have downloaded the shared tree."""
    traffic = Ledger().add_round(
        seat.state.shared, {}, num_sampled=duty.left, num_clients=seat.train.num_clients
    )
    losses = seat.train.examples.x.new_zeros(0, dtype=torch.float32)
    return seat.state, RoundReport(round_index, duty.sampled, losses, traffic)


def _tasks(state: State, duty: Duty) -> list[ClientTask]:
    clients = duty.sampled.tolist()
    tasks = []
    for client, order, key in zip(clients, duty.orders, duty.keys, strict=True):
        tasks.append(ClientTask(state.shared, state.private.of(client), order, key))
    return tasks


class Part(NamedTuple):
    """The results of one federation's clients.

    These are uploads (clients, ...), one private tree per client, and losses (clients,).
    """

    uploads: Params
    private: list[Params]
    losses: Tensor


def _part(results: ClientResults[Update], start: int, stop: int) -> Part:
    if results.rows is not None:
        updates = results.rows[start:stop]
        return Part(
            trees.stack([update.upload for update in updates]),
            [update.private for update in updates],
            torch.stack([update.loss for update in updates]),
        )
    update = results.stacked()
    uploads = {name: tensor[start:stop] for name, tensor in update.upload.items()}
    private = {name: tensor[start:stop] for name, tensor in update.private.items()}
    return Part(uploads, unstack_rows(private, stop - start), update.loss[start:stop].clone())


def _collect(
    algorithm: Algorithm, seat: Seat, duty: Duty, part: Part, round_index: int
) -> tuple[State, RoundReport]:
    """Count the traffic, average the uploads, and store the private trees."""
    state, sampled = seat.state, duty.sampled
    uploads = admit(part.uploads, state.shared)
    traffic = Ledger().add_round(
        state.shared,
        uploads,
        num_sampled=len(sampled) + duty.left,
        num_clients=seat.train.num_clients,
    )
    weights = to_device(seat.train.sizes[sampled], part.losses.device)
    shared = _without_aliases(algorithm.aggregate(state.shared, uploads, weights), uploads)
    private = state.private.put(sampled.tolist(), part.private)
    return State(shared, private), RoundReport(round_index, sampled, part.losses, traffic)


def _without_aliases(tree: Params, uploads: Params) -> Params:
    """The tree with a copy of each tensor that is part of an upload.

    The next round may overwrite the memory of uploads.
    """
    of_uploads = {tensor.untyped_storage().data_ptr() for tensor in uploads.values()}
    return {
        name: tensor.clone() if tensor.untyped_storage().data_ptr() in of_uploads else tensor
        for name, tensor in tree.items()
    }


def _require_shared_examples(seats: Sequence[Seat]) -> None:
    first = seats[0]
    for seat in seats[1:]:
        if seat.train.examples.x is not first.train.examples.x:
            raise InputError(
                "simulate: federations side by side must share one data set; "
                "load it once and partition it per seed"
            )
        if replace(seat.plan, seed=0) != replace(first.plan, seed=0):
            raise InputError(
                "simulate: federations side by side need the same plan, except for the seed; "
                f"got {seat.plan} and {first.plan}"
            )
