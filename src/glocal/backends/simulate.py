"""The simulator: a generator of rounds. The caller's for-loop is the callback."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from glocal import trees
from glocal.algorithm import Algorithm, Update
from glocal.backends.over_devices import OverDevices, Task
from glocal.errors import InputError
from glocal.federation import Holdings
from glocal.sampling import Integers, Plan, choose_cohort, noise_key, visiting_order
from glocal.store import PrivateRows, State
from glocal.trees import Params
from glocal.wire import Ledger, admit


class Report(NamedTuple):
    """One round of one federation: who took part, their mean losses (cohort,), and what was sent in it."""

    round_index: int
    cohort: Integers
    losses: Tensor
    traffic: Ledger


class Seat(NamedTuple):
    """One of several federations that are simulated side by side: its own seed, data and state."""

    plan: Plan
    train: Holdings
    state: State


def begin(algorithm: Algorithm, params: Params) -> State:
    """The state before the first round: every device starts from the same private tree."""
    shared, private = algorithm.init(params)
    return State(shared, PrivateRows(private, {}))


def simulate(
    algorithm: Algorithm, params: Params, train: Holdings, plan: Plan, *, engine: str = "auto", chunk: int | None = None
) -> Iterator[tuple[State, Report]]:
    """Train one federation, round by round."""
    over = OverDevices(algorithm.client_update, engine=engine, chunk=chunk)
    for moment in simulate_seeds(algorithm, [Seat(plan, train, begin(algorithm, params))], over):
        yield moment[0]


def simulate_seeds(
    algorithm: Algorithm, seats: Sequence[Seat], over: OverDevices[Update], *, done: int = 0
) -> Iterator[list[tuple[State, Report]]]:
    """Train several federations side by side, all their devices in one batch; `done` rounds are behind them already."""
    _require_one_store(seats)
    plan = seats[0].plan
    for round_index in range(plan.first_round + done, plan.last_round):
        moment = _round(algorithm, seats, over, round_index)
        seats = [seat._replace(state=state) for seat, (state, _) in zip(seats, moment, strict=True)]
        yield moment


def _round(algorithm: Algorithm, seats: Sequence[Seat], over: OverDevices[Update], round_index: int) -> list[tuple[State, Report]]:
    cohorts = [choose_cohort(seat.plan, seat.train.devices, round_index) for seat in seats]
    tasks = [task for seat, cohort in zip(seats, cohorts, strict=True) for task in assign_work(seat, cohort, round_index)]
    update = over(tasks, seats[0].train.examples, round_index)
    moment, start = [], 0
    for seat, cohort in zip(seats, cohorts, strict=True):
        own = _rows(update, start, start + len(cohort))
        moment.append(_collect(algorithm, seat, cohort, own, round_index))
        start += len(cohort)
    return moment


def assign_work(seat: Seat, cohort: Integers, round_index: int) -> list[Task]:
    """Each device's trees and the rows it will visit: the only place where data enters."""
    plan, train, state = seat
    tasks = []
    for device in cohort.tolist():
        own = train.rows[device]
        order = visiting_order(plan, len(own), round_index, device)
        rows = np.where(order >= 0, own[order.clip(min=0)], -1)
        tasks.append(Task(state.shared, state.private.of(device), rows, noise_key(plan, round_index, device)))
    return tasks


def _collect(algorithm: Algorithm, seat: Seat, cohort: Integers, update: Update, round_index: int) -> tuple[State, Report]:
    """Count what crosses, average it, put the private rows back."""
    state = seat.state
    uploads = admit(update.upload, state.shared)
    traffic = Ledger().after_round(state.shared, uploads, cohort=len(cohort), devices=seat.train.devices)
    weights = torch.from_numpy(seat.train.sizes[cohort]).to(update.loss.device)
    shared = algorithm.aggregate(state.shared, uploads, weights)
    private = state.private.put(cohort.tolist(), trees.unstack(update.private, len(cohort)))
    return State(shared, private), Report(round_index, cohort, update.loss, traffic)


def _rows(update: Update, start: int, stop: int) -> Update:
    upload, private = ({name: tensor[start:stop] for name, tensor in tree.items()} for tree in (update.upload, update.private))
    return Update(upload, private, update.loss[start:stop])


def _require_one_store(seats: Sequence[Seat]) -> None:
    first = seats[0]
    for seat in seats[1:]:
        if seat.train.examples.x is not first.train.examples.x:
            raise InputError(
                "simulate: federations side by side must deal out one data set; load it once and partition it per seed"
            )
        if replace(seat.plan, seed=0) != replace(first.plan, seed=0):
            raise InputError(f"simulate: federations side by side need one plan but for the seed; got {seat.plan} and {first.plan}")
