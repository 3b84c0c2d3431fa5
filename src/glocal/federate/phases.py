"""Phases: who is present, whose models are tested meanwhile, and what new clients are sent."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from glocal.core.data import ClientData
from glocal.core.files import Json
from glocal.core.store import GroupState, TrainingState
from glocal.core.trees import Params
from glocal.datasets.federated import FederatedData
from glocal.evaluate import Evaluator, Floats, local_tests
from glocal.evaluate.forgetting import MetricHistory
from glocal.federate.experiment import Experiment, Phase
from glocal.wire import Ledger


def evaluated_rounds(experiment: Experiment) -> set[int]:
    """The rounds with a test of subgroups: first and last of each phase, and each `every`-th."""
    plan, every = experiment.plan, experiment.evaluation.every
    rounds = {plan.first_round + done - 1 for done in range(every, plan.rounds + 1, every)}
    for _, stretch in experiment.stretches():
        rounds |= {stretch.start, stretch.stop - 1}
    return rounds


def own_clients(clients: set[int], first: int, num_clients: int) -> set[int]:
    """Those of some clients that are in a group, by their numbers in it."""
    return {client - first for client in clients if first <= client < first + num_clients}


def clients_only(data: ClientData, clients: set[int]) -> ClientData:
    """The same data with rows for some clients only."""
    none = np.zeros(0, dtype=np.int64)
    rows = [own if client in clients else none for client, own in enumerate(data.rows)]
    return replace(data, rows=tuple(rows))


def without_absent(data: FederatedData, phase: Phase | None, first: int) -> FederatedData:
    """The data with validation and test data of present clients only."""
    if phase is None:
        return data
    here = own_clients(phase.present(), first, data.num_clients)
    return replace(data, val=clients_only(data.val, here), test=clients_only(data.test, here))


def present_models(state: GroupState, phase: Phase | None, first: int, count: int) -> GroupState:
    """The models of present clients only."""
    if phase is None:
        return state
    here = own_clients(phase.present(), first, count)
    return state._replace(private=state.private.only(here))


def ledger_at_start(experiment: Experiment, place: int, seed_place: int, local: Params) -> Ledger:
    """A group's traffic before the first round: that of a warm start, and its `local` part.

    The local part is sent to clients that do not have it yet: those that were validated before
    have received the whole model.
    """
    group, first_round = experiment.groups[place], experiment.plan.first_round
    ledger, data = group.initial_ledger(seed_place), group.data_of(seed_place)
    if not first_round:
        return ledger
    validated = bool(data.val.sizes.any())
    if not experiment.phases:
        return ledger if validated else ledger.add_warm_start(local, group.num_clients)
    known = experiment.clients_until(first_round - 1) if validated else set[int]()
    now = experiment.phases[experiment.phase_at(first_round)].available()
    first = experiment.first_clients[place]
    new = own_clients(now - known, first, group.num_clients)
    return ledger.add_warm_start(local, len(new))


def late_clients(experiment: Experiment, place: int, round_index: int) -> int:
    """How many clients of a group join in a round after a warm start, and need its local part."""
    if not experiment.phases or not round_index > experiment.plan.first_round > 0:
        return 0
    new = experiment.clients_until(round_index) - experiment.clients_until(round_index - 1)
    group, first = experiment.groups[place], experiment.first_clients[place]
    return len(own_clients(new, first, group.num_clients))


def subgroup_figures(
    experiment: Experiment,
    evaluator: Evaluator,
    states: Sequence[TrainingState],
    place: int,
    round_index: int,
) -> list[Json]:
    """Each seed's Local Test by subgroup, over all clients that were present so far.

    A client that left is tested with its own local part and the current shared one.
    """
    phase_place, group = experiment.phase_at(round_index), experiment.groups[place]
    first = experiment.first_clients[place]
    since = experiment.plan.first_round
    until_now = experiment.clients_until(round_index, since=since)
    present_once = own_clients(until_now, first, group.num_clients)
    here = experiment.phases[phase_place].present()
    data: list[ClientData] = []
    for seed_place in range(len(states)):
        now = experiment.data_at(phase_place, place, seed_place)
        data.append(clients_only(now.test, present_once))
    models = [state.group(place) for state in states]
    by_seed: list[Json] = []
    for values in local_tests(evaluator, models, data):
        table: Json = {}
        for name, members in experiment.subgroups.items():
            own = own_clients({*members}, first, group.num_clients)
            if own:
                present = len(here.intersection(members))
                table[name] = {"value": _mean(values, own), "present": present}
        by_seed.append(table)
    return by_seed


def subgroup_history(
    rows: Sequence[Json], name: str, seed: int, *, group: str = ""
) -> MetricHistory:
    """The metric of a subgroup's clients in a group over the rounds of a run, from its rows."""
    history = MetricHistory([], [], [])
    for row in rows:
        if (row["seed"], row.get("group", "")) != (seed, group):
            continue
        entry = (row.get("subgroups") or {}).get(name)
        if entry and entry["value"] is not None:
            history.rounds.append(row["round"] + 1)
            history.values.append(entry["value"])
            history.present.append(entry["present"])
    return history


def summarize_subgroups(
    rows: Sequence[Json], experiment: Experiment, place: int, seed: int
) -> Json:
    """A summary of the metric of each subgroup's clients in a group, for JSON."""
    group = experiment.groups[place]
    table: Json = {}
    higher_is_better = group.algorithm.task.metric.higher_is_better
    for name in experiment.subgroups:
        history = subgroup_history(rows, name, seed, group=group.name)
        summary = history.summary(higher_is_better=higher_is_better)
        table[name] = summary and summary._asdict()
    return table


def _mean(values: Floats, clients: set[int]) -> float | None:
    own = values[sorted(clients)]
    defined = own[~np.isnan(own)]
    return float(defined.mean()) if len(defined) else None
