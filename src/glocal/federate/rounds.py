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
from glocal.core.data import Holdings
from glocal.core.errors import InputError
from glocal.core.sampling import Attendance, Integers, Plan, choose_cohort, choose_present, noise_key, visited_rows
from glocal.core.store import PrivateRows, State, hot_rows
from glocal.core.trees import Params
from glocal.engines.engine import Engine
from glocal.engines.executor import OverDevices
from glocal.engines.tasks import Outcome, Task, rows_of, sent
from glocal.wire import Ledger, admit


class Report(NamedTuple):
    """One round of one federation: who took part, their mean losses (cohort,), and what was sent in it."""

    round_index: int
    cohort: Integers
    losses: Tensor
    traffic: Ledger


class Seat(NamedTuple):
    """One of several federations that are simulated side by side: its own seed, data and state; who attends, if not all do."""

    plan: Plan
    train: Holdings
    state: State
    attendance: Attendance | None = None


def begin(algorithm: Algorithm, params: Params, federations: int = 1) -> State:
    """The state before the first round, of one of several federations: every device starts from the same private tree."""
    shared, private = algorithm.init(params)
    return State(shared, PrivateRows(private, {}, hot_rows(private, federations)))


def simulate(
    algorithm: Algorithm, params: Params, train: Holdings, plan: Plan, *, engine: Engine | str = "auto"
) -> Iterator[tuple[State, Report]]:
    """Train one federation, round by round."""
    over = OverDevices(algorithm.client_update, engine=engine, calls=plan.rounds)
    try:
        for moment in simulate_seeds(algorithm, [Seat(plan, train, begin(algorithm, params))], over):
            yield moment[0]
    finally:
        over.close()


def simulate_seeds(
    algorithm: Algorithm, seats: Sequence[Seat], over: OverDevices[Update], *, done: int = 0
) -> Iterator[list[tuple[State, Report]]]:
    """Train several federations side by side, all their devices in one batch; `done` rounds are behind them already."""
    _require_one_store(seats)
    rounds = _rounds(algorithm, seats, over, done)
    if not seats[0].train.examples.y.is_cuda:
        yield from rounds
        return
    underway: deque[Callable[[], list[tuple[State, Report]]]] = deque()
    for moment in rounds:  # a GPU works on the next round while the caller looks at this one
        underway.append(_landing(moment))
        if len(underway) > 1:
            yield underway.popleft()()
    for landed in underway:
        yield landed()


def _landing(moment: list[tuple[State, Report]]) -> Callable[[], list[tuple[State, Report]]]:
    """Send a round's losses to the host; what is returned waits for them, and for nothing that comes after them."""
    there = [report.losses for _, report in moment]
    here = [torch.empty(losses.shape, dtype=losses.dtype, pin_memory=True).copy_(losses, non_blocking=True) for losses in there]
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()

    def landed() -> list[tuple[State, Report]]:
        arrived.synchronize()
        return [(state, report._replace(losses=losses)) for (state, report), losses in zip(moment, here, strict=True)]

    return landed


def _rounds(
    algorithm: Algorithm, seats: Sequence[Seat], over: OverDevices[Update], done: int
) -> Iterator[list[tuple[State, Report]]]:
    plan = seats[0].plan
    for round_index in range(plan.first_round + done, plan.last_round):
        duties = [assign_work(seat, round_index) for seat in seats]
        moment = _round(algorithm, seats, duties, over, round_index)
        seats = [seat._replace(state=state) for seat, (state, _) in zip(seats, moment, strict=True)]
        yield moment


class Duty(NamedTuple):
    """Who takes part in a round, the rows each device will visit, keys of their randomness, and how many left before its end."""

    cohort: Integers
    orders: list[Integers]
    keys: list[int]
    left: int = 0


def assign_work(seat: Seat, round_index: int) -> Duty:
    """Who does what in a round: the only place where data enters."""
    plan, train = seat.plan, seat.train
    asked = _asked(seat, round_index)
    cohort = asked if seat.attendance is None else np.setdiff1d(asked, seat.attendance.leaving)
    orders = [visited(plan, train, round_index, device) for device in cohort.tolist()]
    keys = [noise_key(plan, round_index, device) for device in cohort.tolist()]
    return Duty(cohort, orders, keys, len(asked) - len(cohort))


def visited(plan: Plan, train: Holdings, round_index: int, device: int, *, number: int | None = None) -> Integers:
    """The rows that a device visits in a round, in their order; its randomness has the address `number`, if not its own."""
    rows = train.rows[device]
    lengths = None if plan.tokens is None else train.words[rows]
    return visited_rows(plan, rows, round_index, device if number is None else number, lengths=lengths)


def _asked(seat: Seat, round_index: int) -> Integers:
    """Who is asked to take part."""
    if seat.attendance is None:
        return choose_cohort(seat.plan, seat.train.devices, round_index)
    asked = choose_present(seat.plan, seat.attendance, round_index)
    if len(asked) and asked[-1] >= seat.train.devices:
        raise InputError(f"attendance: there is no device {asked[-1]}; devices are 0..{seat.train.devices - 1}")
    empty = asked[seat.train.sizes[asked] == 0]
    if len(empty):
        raise InputError(
            f"attendance: device {empty[0]} is present and has no training examples; let it be absent, or give it some"
        )
    return asked


def _round(
    algorithm: Algorithm, seats: Sequence[Seat], duties: Sequence[Duty], over: OverDevices[Update], round_index: int
) -> list[tuple[State, Report]]:
    tasks = [task for seat, duty in zip(seats, duties, strict=True) for task in _tasks(seat.state, duty)]
    outcome = over(tasks, seats[0].train.examples, round_index) if tasks else Outcome[Update](rows=[])
    moment, start = [], 0
    for seat, duty in zip(seats, duties, strict=True):
        stop = start + len(duty.cohort)
        moment.append(
            _collect(algorithm, seat, duty, _part(outcome, start, stop), round_index)
            if len(duty.cohort)
            else _nothing_came(seat, duty, round_index)
        )
        start = stop
    return moment


def _nothing_came(seat: Seat, duty: Duty, round_index: int) -> tuple[State, Report]:
    """A round that nobody finished: whoever was asked has received the shared tree, and nothing else happens."""
    traffic = Ledger().after_round(seat.state.shared, {}, cohort=duty.left, devices=seat.train.devices)
    return seat.state, Report(round_index, duty.cohort, seat.train.examples.x.new_zeros(0, dtype=torch.float32), traffic)


def _tasks(state: State, duty: Duty) -> list[Task]:
    rows = [state.private.of(device) for device in duty.cohort.tolist()]
    return [Task(state.shared, *task) for task in zip(rows, duty.orders, duty.keys, strict=True)]


class Part(NamedTuple):
    """What came back from one federation's cohort: uploads (cohort, ...), a private tree per device, losses (cohort,)."""

    uploads: Params
    private: list[Params]
    losses: Tensor


def _part(outcome: Outcome[Update], start: int, stop: int) -> Part:
    if outcome.rows is not None:
        updates = outcome.rows[start:stop]
        uploads = trees.stack([update.upload for update in updates])
        return Part(uploads, [update.private for update in updates], torch.stack([update.loss for update in updates]))
    update = outcome.stacked()
    uploads, private = ({name: tensor[start:stop] for name, tensor in tree.items()} for tree in (update.upload, update.private))
    return Part(uploads, rows_of(private, stop - start), update.loss[start:stop].clone())


def _collect(algorithm: Algorithm, seat: Seat, duty: Duty, part: Part, round_index: int) -> tuple[State, Report]:
    """Count what crosses, average it, put the private rows back."""
    state, cohort = seat.state, duty.cohort
    uploads = admit(part.uploads, state.shared)
    traffic = Ledger().after_round(state.shared, uploads, cohort=len(cohort) + duty.left, devices=seat.train.devices)
    weights = sent(seat.train.sizes[cohort], part.losses.device)
    shared = _of_its_own(algorithm.aggregate(state.shared, uploads, weights), uploads)
    private = state.private.put(cohort.tolist(), part.private)
    return State(shared, private), Report(round_index, cohort, part.losses, traffic)


def _of_its_own(tree: Params, uploads: Params) -> Params:
    """The tree without anything that is part of an upload: the next round may write over those."""
    lent = {tensor.untyped_storage().data_ptr() for tensor in uploads.values()}
    return {name: tensor.clone() if tensor.untyped_storage().data_ptr() in lent else tensor for name, tensor in tree.items()}


def _require_one_store(seats: Sequence[Seat]) -> None:
    first = seats[0]
    for seat in seats[1:]:
        if seat.train.examples.x is not first.train.examples.x:
            raise InputError(
                "simulate: federations side by side must deal out one data set; load it once and partition it per seed"
            )
        if replace(seat.plan, seed=0) != replace(first.plan, seed=0):
            raise InputError(f"simulate: federations side by side need one plan but for the seed; got {seat.plan} and {first.plan}")
