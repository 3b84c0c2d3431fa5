"""New clients of a trained federation.

A new client uses an ensemble of existing models, trains its local part alone, or joins the rounds.
Every function returns a new state. The old one does not change by a bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from glocal.algorithms.adapt_only import AdaptOnly
from glocal.algorithms.contract import Algorithm, require_algorithm
from glocal.core import trees
from glocal.core.bounds import (
    MAX_CLIENTS,
    MAX_EPOCHS,
    MAX_ROUNDS,
    count_field,
    require_count,
    require_counts,
)
from glocal.core.checks import require_choice, require_instance
from glocal.core.data import ClientData, Examples, Rows, read_examples
from glocal.core.errors import InputError, suggest_name
from glocal.core.modules import state_dict
from glocal.core.one_line import one_line
from glocal.core.sampling import Availability, Plan, make_rng, to_batches
from glocal.core.store import GroupState, PerClient
from glocal.core.task import Task
from glocal.core.trees import Params
from glocal.core.values import concatenate_rows
from glocal.engines import ClientTask, EngineConfig
from glocal.evaluate import Evaluator, ensemble_figure
from glocal.evaluate.new_test import ensemble_outputs
from glocal.federate.group_result import GroupResult
from glocal.federate.outputs import example_output, ignored_target
from glocal.federate.result import Result
from glocal.federate.rounds import (
    GroupClients,
    GroupSetup,
    Replica,
    build_executors,
    require_counted,
    simulate,
    start_state,
    start_wires,
)
from glocal.wire import Codec, Identity, Ledger, require_codec, split_private

_BATCH_SIZE = 256
_MIN_STEPS = 100  # a client with few labels trains for more epochs, until it has taken these


class TrainedFederation(NamedTuple):
    """A trained federation; a new client gets the number `clients`, which is the next one.

    >>> import torch, glocal
    >>> dataset = glocal.load_dataset("digits")
    >>> data = glocal.FederatedData.partition(dataset, glocal.iid(10))
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    >>> task = glocal.classification(model)
    >>> algorithm = glocal.FedAvg(task, optimizer=glocal.SGD(lr=0.1))
    >>> result = glocal.fit(algorithm, data, rounds=1, clients_per_round=2, progress=False)
    >>> glocal.TrainedFederation.from_result(result).clients
    10
    """

    algorithm: Algorithm
    plan: Plan
    state: GroupState
    clients: int
    uplink: Codec = Identity()

    def __repr__(self) -> str:
        return one_line(self)

    @property
    def task(self) -> Task:
        """What its clients learn."""
        return self.algorithm.task

    @classmethod
    def from_result(cls, result: Result | GroupResult) -> "TrainedFederation":
        """The federation behind a result of `fit`; of several seeds, the first one's."""
        require_instance("join: result", result, Result | GroupResult, "the result of a fit")
        one = result.group() if isinstance(result, Result) else result
        return cls(one.algorithm, one.plan, one.state, one.num_clients, one.uplink)


class Joining(NamedTuple):
    """A federation that its last client joins: plan, training data of all, and state."""

    plan: Plan
    train: ClientData
    state: GroupState
    uplink: Codec = Identity()


@dataclass(frozen=True)
class JoinPlan:
    """How a new client joins: `epochs` of its local part alone, then `rounds` with others.

    In each of these rounds, `existing_clients` of the others train too. The new client's local
    part starts as every client's did ("initial"), or as the mean of all trained ones ("average").
    The mean is better, but every trained client has to upload its local part for it once.

    >>> JoinPlan(epochs=5, rounds=2, existing_clients=3).start
    'initial'
    """

    epochs: int = count_field(20, minimum=0, maximum=MAX_EPOCHS)
    rounds: int = count_field(0, minimum=0, maximum=MAX_ROUNDS)
    existing_clients: int = count_field(0, minimum=0, maximum=MAX_CLIENTS)
    start: str = "initial"

    def __post_init__(self) -> None:
        require_counts("join: ", self)
        require_choice("join: start", self.start, ("initial", "average"))


class JoinResult(NamedTuple):
    """The state with the new client, its number, and the traffic of joining."""

    state: GroupState
    client: int
    ledger: Ledger

    def params(self, algorithm: Algorithm) -> Params:
        """The new client's model, as a tree."""
        own, _ = split_private(self.state.private.of(self.client))
        return algorithm.personal(self.state.shared, own)

    def state_dict(self, trained_federation: TrainedFederation) -> Params:
        """The new client's model, as a plain state dict of the network."""
        return state_dict(trained_federation.task.model, self.params(trained_federation.algorithm))


def join(
    trained_federation: TrainedFederation,
    train: Examples,
    *,
    existing_data: ClientData | None = None,
    join_plan: JoinPlan | None = None,
    engine: EngineConfig | str = "auto",
) -> JoinResult:
    """Let one new client join with its labelled examples.

    `existing_data` are the training data of the existing clients, if any train in its rounds.

    >>> import torch, glocal
    >>> dataset = glocal.load_dataset("digits")
    >>> data = glocal.FederatedData.partition(dataset, glocal.iid(10))
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    >>> task = glocal.classification(model)
    >>> algorithm = glocal.FedAvg(task, local="1.bias", optimizer=glocal.SGD(lr=0.1))
    >>> result = glocal.fit(algorithm, data, rounds=1, clients_per_round=2, progress=False)
    >>> federation = glocal.TrainedFederation.from_result(result)
    >>> new_client = glocal.Examples(dataset.test.x[:20], dataset.test.y[:20])
    >>> glocal.join(federation, new_client).client
    10
    """
    join_plan = JoinPlan() if join_plan is None else join_plan
    _require_federation(trained_federation)
    require_instance("join: join_plan", join_plan, JoinPlan, "a glocal.JoinPlan")
    require_instance("join: existing_data", existing_data, ClientData | None, "a glocal.ClientData")
    require_instance("join: engine", engine, str | EngineConfig, "a name or a glocal.EngineConfig")
    require_instance("join: train", train, Examples, "a glocal.Examples")
    train = read_examples(tuple(train) if train.has_targets else train.x, "the new client")
    if not train.num_rows:
        raise InputError(
            "join: the client has no labelled example, so it cannot train; use the ensemble instead"
        )
    _require_inputs_and_labels(trained_federation, train)
    has_existing = bool(join_plan.rounds and join_plan.existing_clients)
    if has_existing and existing_data is None:
        raise InputError(
            f"join: {join_plan.existing_clients} existing clients were asked for, "
            "but not their data; give existing_data, or existing_clients=0"
        )
    clients = trained_federation.clients
    client_data = append_client(train, existing_data if has_existing else None, clients)
    if join_plan.epochs:
        batch_size = trained_federation.plan.batch_size
        epochs = _num_epochs(train.num_rows, batch_size, join_plan.epochs)
        join_plan = replace(join_plan, epochs=epochs)
    plan, state = trained_federation.plan, trained_federation.state
    joining = Joining(plan, client_data, state, trained_federation.uplink)
    return join_many(trained_federation.algorithm, [joining], join_plan, engine=engine)[0]


def _require_federation(federation: TrainedFederation) -> None:
    """Refuse what `TrainedFederation.from_result` does not give."""
    expected = "TrainedFederation.from_result(result)"
    require_instance("join: trained_federation", federation, TrainedFederation, expected)
    require_algorithm("join: the federation's algorithm", federation.algorithm)
    require_instance("join: the federation's plan", federation.plan, Plan, "a glocal.Plan")
    require_instance("join: the federation's state", federation.state, GroupState, expected)
    require_count("join: the federation's clients", federation.clients, 0, MAX_CLIENTS)
    require_codec(federation.uplink)


def _require_inputs_and_labels(trained_federation: TrainedFederation, train: Examples) -> None:
    """Refuse inputs that the network cannot take, and labels that it has no output for."""
    task, labels = trained_federation.task, train.y
    output, ignored = example_output(task, train.x), ignored_target(task)
    if ignored is None or (labels.is_floating_point() and labels.shape[1:] == output.shape[1:]):
        return
    classes = output.shape[1]
    wrong = ((labels < 0) | (labels >= classes)) & (labels != ignored)
    if labels.is_floating_point() or bool(wrong.any()):
        raise InputError(
            f"join: labels from 0 to {classes - 1} were expected; "
            f"the client has {labels.min()} to {labels.max()}"
        )


def append_client(train: Examples, existing_data: ClientData | None, clients: int) -> ClientData:
    """The new client's examples as those of the last client, in one store with `existing_data`.

    Without `existing_data`, the existing clients have no rows.
    """
    if existing_data is None:
        absent: Rows = np.zeros(0, dtype=np.int64)
        own = np.arange(train.num_rows, dtype=np.int64)
        return ClientData(train, (*([absent] * clients), own))
    known = existing_data.examples
    moved = train.to(known.device)
    x = concatenate_rows([known.x, moved.x])
    y = concatenate_rows([known.y, moved.y]) if known.has_targets else x
    own = np.arange(known.num_rows, known.num_rows + train.num_rows, dtype=np.int64)
    return ClientData(Examples(x, y), (*existing_data.rows, own))


def join_many(
    algorithm: Algorithm,
    federations: Sequence[Joining],
    join_plan: JoinPlan,
    *,
    engine: EngineConfig | str = "auto",
) -> list[JoinResult]:
    """Let the last client of each of several federations side by side join.

    It trains its local part alone, then takes part in the rounds.
    """
    client = federations[0].train.num_clients - 1
    require_joinable(algorithm, [each.state for each in federations], join_plan, client)
    starts = [_before_training(algorithm, each, join_plan, client) for each in federations]
    joining = [
        each._replace(state=start.state) for each, start in zip(federations, starts, strict=True)
    ]
    if has_private_part(algorithm, joining[0].state) and join_plan.epochs:
        joining = _adapted(algorithm, joining, join_plan.epochs, engine)
    outcomes = [(each.state, Ledger()) for each in joining]
    if join_plan.rounds:
        outcomes = _joint_rounds(algorithm, joining, join_plan, engine)
    results = []
    for start, (state, ledger) in zip(starts, outcomes, strict=True):
        results.append(JoinResult(state, client, start.ledger + ledger))
    return results


def has_private_part(algorithm: Algorithm, state: GroupState) -> bool:
    """Whether an algorithm keeps anything on its clients, which a new one could adapt."""
    own, _ = split_private(state.private.initial)
    return bool(own)


def _adapted(
    algorithm: Algorithm, federations: Sequence[Joining], epochs: int, engine: EngineConfig | str
) -> list[Joining]:
    """The federations after the last client trained its private part for some epochs."""
    client = federations[0].train.num_clients - 1
    alone = []
    for each in federations:
        own, _ = split_private(each.state.private.of(client))
        state = GroupState(each.state.shared, PerClient(own))
        alone.append(Joining(replace(each.plan, local_epochs=1), each.train, state))
    outcomes = _run_rounds(AdaptOnly.to(algorithm), alone, (epochs, 1), (), engine)
    after = []
    for each, (state, _) in zip(federations, outcomes, strict=True):
        _, memory = split_private(each.state.private.of(client))
        row = {**state.private.of(client), **memory}
        state = each.state._replace(private=each.state.private.put([client], [row]))
        plan = replace(each.plan, rounds=each.plan.rounds + epochs)
        after.append(each._replace(plan=plan, state=state))
    return after


def _joint_rounds(
    algorithm: Algorithm,
    federations: Sequence[Joining],
    join_plan: JoinPlan,
    engine: EngineConfig | str,
) -> list[tuple[GroupState, Ledger]]:
    """Rounds in which the last client always takes part, with sampled existing clients if any."""
    client = federations[0].train.num_clients - 1
    available = range(client) if join_plan.existing_clients else ()
    how_long = (join_plan.rounds, max(join_plan.existing_clients, 1))
    return _run_rounds(algorithm, federations, how_long, available, engine)


def require_joinable(
    algorithm: Algorithm, states: Sequence[GroupState], join_plan: JoinPlan, client: int
) -> None:
    """Refuse a new client that has joined already, has no place, or would train nothing."""
    if not algorithm.takes_new_clients:
        raise InputError(
            f"join: {algorithm.name} is made for a fixed number of {client} clients, "
            "and has no place for another one"
        )
    if any(client in state.private.stored for state in states):
        raise InputError(
            f"join: client {client} is in this federation already; "
            "a new client needs the next free number"
        )
    if join_plan.existing_clients > client:
        raise InputError(
            f"join: {join_plan.existing_clients} existing clients were asked for, "
            f"but there are {client}; ask for fewer"
        )
    if join_plan.rounds:
        return
    if not has_private_part(algorithm, states[0]):
        raise InputError(
            f"join: {algorithm.name} has no private part, so nothing would be trained; "
            "let the client join some rounds"
        )
    if not join_plan.epochs:
        raise InputError(
            "join: epochs and rounds are 0, so nothing would be trained; "
            "let the client join some rounds"
        )


def _before_training(
    algorithm: Algorithm, joining: Joining, join_plan: JoinPlan, client: int
) -> JoinResult:
    """The state before the new client trains.

    It has downloaded the shared tree once, and the local part that it starts from.
    """
    state = joining.state
    own, memory = split_private(state.private.initial)
    ledger = Ledger().add_warm_start({**state.shared, **own}, 1)
    if join_plan.start == "average" and state.private.stored and own:
        trained = sorted(state.private.stored)
        rows = [split_private(state.private.of(existing))[0] for existing in trained]
        device = next(iter(rows[0].values())).device
        mean = trees.mean(trees.stack(rows), torch.ones(len(rows), device=device))
        ledger = ledger.add_ensemble(own, {}, num_trained=len(rows), num_clients=0)
        state = state._replace(private=state.private.put([client], [{**mean, **memory}]))
    return JoinResult(state, client, ledger)


def _run_rounds(
    algorithm: Algorithm,
    federations: Sequence[Joining],
    how_long: tuple[int, int],
    available: Sequence[int],
    engine: EngineConfig | str,
) -> list[tuple[GroupState, Ledger]]:
    """The states after some more rounds, each with so many of the available clients.

    The last client always takes part.
    """
    rounds, clients_per_round = how_long
    client = federations[0].train.num_clients - 1
    availability = Availability.of(available, always=[client])
    setup = GroupSetup(algorithm, algorithm.task.initial_params())
    [wire] = start_wires([setup], federations[0].uplink)
    replicas: list[Replica] = []
    for each in federations:
        plan = replace(
            each.plan,
            first_round=each.plan.total_rounds,
            rounds=rounds,
            clients_per_round=clients_per_round,
        )
        replicas.append(Replica((GroupClients(algorithm, each.train, wire),), plan, availability))
    states = [each.state.alone() for each in federations]
    ledgers, seeds = [Ledger() for _ in federations], [each.plan.seed for each in federations]
    executors = build_executors(replicas[0].groups, engine, num_calls=rounds)
    first = replicas[0].plan.first_round
    try:
        for finished in simulate(replicas, states, executors, range(first, first + rounds)):
            require_counted(finished, seeds, federations[0].train.label)
            states = [state for state, _ in finished]
            reports = [report for _, report in finished]
            ledgers = [
                ledger + report.traffic[0] for ledger, report in zip(ledgers, reports, strict=True)
            ]
    finally:
        for executor in executors:
            executor.close()
    return [(state.group(), ledger) for state, ledger in zip(states, ledgers, strict=True)]


def select_ensemble(
    trained_federation: TrainedFederation, sample: Tensor, *, by: str = "everyone", count: int = 10
) -> list[int]:
    """The existing clients whose models a new client without labels uses as an ensemble.

    `by` is "everyone" (all that have trained), the `count` most "confident" (lowest mean entropy),
    or the `count` "nearest" to the mean of all (lowest mean total variation). Models are compared
    on a sample of the new client's inputs (rows, ...).
    """
    scores = {"everyone": None, "confident": _entropy, "nearest": _distance}
    if by not in scores or count < 1:
        raise InputError(
            f"join: by is '{by}' and count {count}; a count of at least 1 and a known method "
            f"were expected; {suggest_name(by, scores)}"
        )
    state = trained_federation.state
    trained, score = sorted(state.private.stored), scores[by]
    if not has_private_part(trained_federation.algorithm, state):
        return trained[:1]
    if score is None or count >= len(trained):
        return trained
    if not len(sample):
        raise InputError(
            f"join: '{by}' needs a sample of the client's inputs; give some, or use 'everyone'"
        )
    _require_classes(by, trained_federation.task, sample)
    order = torch.argsort(score(_probabilities(trained_federation, trained, sample)), stable=True)
    return sorted(trained[place] for place in order[:count].tolist())


def _require_classes(by: str, task: Task, sample: Tensor) -> None:
    output = example_output(task, sample)
    if output.dim() != 2 or output.shape[1] < 2:
        raise InputError(
            f"join: '{by}' compares probabilities of classes, and the outputs for one example are "
            f"{tuple(output.shape)}; use 'everyone'"
        )


def _entropy(probabilities: Tensor) -> Tensor:
    """Mean entropy of each client (clients,), from probabilities (clients, rows, classes)."""
    return -(probabilities * probabilities.clamp(min=1e-12).log()).sum(-1).mean(-1)


def _distance(probabilities: Tensor) -> Tensor:
    """Mean total variation between each client and the mean of all (clients,)."""
    return (probabilities - probabilities.mean(0)).abs().sum(-1).mean(-1) / 2


@torch.no_grad()
def _probabilities(
    trained_federation: TrainedFederation, trained: Sequence[int], sample: Tensor
) -> Tensor:
    """Each client's probabilities (clients, rows, classes), in double precision."""
    order = to_batches(np.arange(len(sample), dtype=np.int64), _BATCH_SIZE)[None]
    examples = Examples(sample, torch.zeros(len(sample), dtype=torch.int64, device=sample.device))
    evaluation = Evaluator(trained_federation.algorithm, engine="vmapped")
    models = _models_of(trained_federation, trained)
    tasks = [ClientTask(shared, private, order) for shared, private in models]
    outputs = evaluation.outputs(tasks, examples).stacked().flatten(1, 2)[:, : len(sample)]
    evaluation.close()
    return outputs.double().softmax(-1)


def _models_of(
    trained_federation: TrainedFederation, members: Sequence[int]
) -> list[tuple[Params, Params]]:
    """The shared tree with each client's private one."""
    state = trained_federation.state
    return [(state.shared, state.private.of(client)) for client in members]


def new_client_ensemble_figure(
    trained_federation: TrainedFederation, members: Sequence[int], test: Examples
) -> float | None:
    """The first metric of the members' outputs together on a new client's examples."""
    state = trained_federation.state
    models = _models_of(trained_federation, members) or [(state.shared, state.private.initial)]
    return _figure(trained_federation, models, test)


def new_client_figure(
    trained_federation: TrainedFederation, joined: JoinResult, test: Examples
) -> float | None:
    """The first metric of the new client's own model."""
    model = (joined.state.shared, joined.state.private.of(joined.client))
    return _figure(trained_federation, [model], test)


def new_client_ensemble_classes(
    trained_federation: TrainedFederation, members: Sequence[int], inputs: Tensor
) -> list[int]:
    """Classes of a new client's inputs (rows, ...), by the members' averaged outputs."""
    outputs = new_client_ensemble_outputs(trained_federation, members, inputs)
    classes: list[int] = outputs.argmax(-1).tolist()
    return classes


@torch.no_grad()
def new_client_ensemble_outputs(
    trained_federation: TrainedFederation, members: Sequence[int], inputs: Tensor
) -> Tensor:
    """The members' averaged outputs for a new client's inputs (rows, ...)."""
    without_targets = Examples(inputs, inputs)
    client_data = ClientData(without_targets, (np.arange(len(inputs), dtype=np.int64),))
    evaluation = Evaluator(trained_federation.algorithm)
    state = trained_federation.state
    models = _models_of(trained_federation, members) or [(state.shared, state.private.initial)]
    outputs = ensemble_outputs(evaluation, models, client_data).mean
    evaluation.close()
    return outputs


def _figure(
    trained_federation: TrainedFederation, models: Sequence[tuple[Params, Params]], test: Examples
) -> float | None:
    if not test.num_rows:
        raise InputError("join: there is no labelled example to test on; give some")
    evaluation = Evaluator(trained_federation.algorithm)
    client_data = ClientData(test, (np.arange(test.num_rows, dtype=np.int64),))
    figure = ensemble_figure(evaluation, models, client_data)
    evaluation.close()
    return figure


def sample_labeled(train: Examples, labels: int | None, *, seed: int) -> Examples:
    """Random labelled examples of a new client; all of them if `labels` is None.

    A larger sample contains each smaller one.
    """
    if labels is None:
        return train
    if not 0 <= labels <= train.num_rows:
        raise InputError(
            f"join: {labels} labelled examples were asked for, but the client has "
            f"{train.num_rows}; ask for fewer"
        )
    order = make_rng(seed, "labels").permutation(train.num_rows)
    return train.take(np.sort(order[:labels]))


def train_alone(
    trained_federation: TrainedFederation,
    train: Examples,
    *,
    epochs: int,
    engine: EngineConfig | str = "auto",
) -> JoinResult:
    """The same network, trained from fresh weights on the new client's examples only.

    This is the result without a federation.
    """
    algorithm = trained_federation.algorithm
    params = trees.to(algorithm.task.initial_params(), train.device)
    setups = [GroupSetup(algorithm, params)]
    wires = start_wires(setups, trained_federation.uplink)
    fresh = trained_federation._replace(
        state=start_state(setups, wires).group(),
        clients=0,
        plan=replace(trained_federation.plan, rounds=1, first_round=0),
    )
    rounds = _num_epochs(train.num_rows, trained_federation.plan.batch_size, epochs)
    return join(fresh, train, join_plan=JoinPlan(epochs=0, rounds=rounds), engine=engine)


def _num_epochs(examples: int, batch: int, epochs: int) -> int:
    """The number of epochs: more where these have fewer than `_MIN_STEPS` steps."""
    return max(epochs, -(-_MIN_STEPS // -(-examples // batch)))
