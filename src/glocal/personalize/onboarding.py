"""New clients of a trained federation.

A new client uses an ensemble of existing models, trains its local part alone, or joins the rounds.
Every function returns a new state. The old one does not change by a bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from glocal.algorithms.contract import Algorithm, freeze_shared
from glocal.core import trees
from glocal.core.bounds import MAX_CLIENTS, MAX_EPOCHS, MAX_ROUNDS, count_field, require_counts
from glocal.core.data import ClientData, Examples, Rows
from glocal.core.errors import DivergedError, InputError, suggest_name
from glocal.core.losses import per_example_cross_entropy
from glocal.core.modules import params_of, state_dict
from glocal.core.sampling import Availability, Plan, make_rng, to_batches
from glocal.core.store import State
from glocal.core.task import Task
from glocal.core.trees import Params
from glocal.engines import ClientTask, EngineConfig, Executor
from glocal.evaluate import Evaluator, ensemble_classes, ensemble_figure
from glocal.federate.outputs import example_output, num_classes
from glocal.federate.result import SeedResult
from glocal.federate.rounds import Seat, initial_state, simulate_seeds
from glocal.wire import Ledger

_BATCH_SIZE = 256
_MIN_STEPS = 100  # a client with few labels trains for more epochs, until it has taken these


class TrainedFederation(NamedTuple):
    """A trained federation; a new client gets the number `clients`, which is the next one."""

    algorithm: Algorithm
    task: Task
    plan: Plan
    state: State
    clients: int

    @property
    def model(self) -> nn.Module:
        """The task's model."""
        return self.task.model

    @classmethod
    def from_result(cls, result: SeedResult) -> "TrainedFederation":
        """The federation behind a result of `fit`."""
        return cls(
            result.algorithm,
            result.task,
            result.plan,
            result.state,
            len(result.times_sampled),
        )


@dataclass(frozen=True)
class JoinPlan:
    """How a new client joins: `epochs` of its local part alone, then `rounds` with others.

    In each of these rounds, `existing_clients` of the others train too. The new client's local
    part starts as every client's did ("initial"), or as the mean of all trained ones ("average").
    The mean is better, but every trained client has to upload its local part for it once.
    """

    epochs: int = count_field(20, minimum=0, maximum=MAX_EPOCHS)
    rounds: int = count_field(0, minimum=0, maximum=MAX_ROUNDS)
    existing_clients: int = count_field(0, minimum=0, maximum=MAX_CLIENTS)
    start: str = "initial"

    def __post_init__(self) -> None:
        require_counts("join: ", self)
        if self.start not in ("initial", "average"):
            raise InputError(f"join: start is '{self.start}'; it must be 'initial' or 'average'")


class JoinResult(NamedTuple):
    """The state with the new client, its number, and the traffic of joining."""

    state: State
    client: int
    ledger: Ledger

    def params(self, algorithm: Algorithm) -> Params:
        """The new client's model, as a tree."""
        return algorithm.personal(self.state.shared, self.state.private.of(self.client))

    def state_dict(self, trained_federation: TrainedFederation) -> Params:
        """The new client's model, as a plain state dict of the network."""
        return state_dict(trained_federation.model, self.params(trained_federation.algorithm))


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
    """
    join_plan = join_plan or JoinPlan()
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
    seat = Seat(trained_federation.plan, client_data, trained_federation.state)
    return join_many(trained_federation.algorithm, [seat], join_plan, engine=engine)[0]


def _require_inputs_and_labels(trained_federation: TrainedFederation, train: Examples) -> None:
    """Refuse inputs that the network cannot take, and labels that it has no output for."""
    task, labels = trained_federation.task, train.y
    if task.per_example is not per_example_cross_entropy:
        example_output(task, train.x)
        return
    classes = num_classes(task, train.x)
    if labels.is_floating_point() or bool(((labels < 0) | (labels >= classes)).any()):
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
    x, y, _ = existing_data.examples
    store = Examples(torch.cat([x, train.x.to(x.device)]), torch.cat([y, train.y.to(y.device)]))
    own = np.arange(len(y), store.num_rows, dtype=np.int64)
    return ClientData(store, (*existing_data.rows, own))


def join_many(
    algorithm: Algorithm,
    seats: Sequence[Seat],
    join_plan: JoinPlan,
    *,
    engine: EngineConfig | str = "auto",
) -> list[JoinResult]:
    """Let the last client of each of several federations side by side join.

    It trains its local part alone, then takes part in the rounds.
    """
    client = seats[0].train.num_clients - 1
    require_joinable(algorithm, [seat.state for seat in seats], join_plan, client)
    starts = [_before_training(seat, join_plan, client) for seat in seats]
    seats = [seat._replace(state=start.state) for seat, start in zip(seats, starts, strict=True)]
    if algorithm.adapt is not None and join_plan.epochs:
        seats = _adapted(algorithm, seats, join_plan.epochs, engine)
    outcomes = [(seat.state, Ledger()) for seat in seats]
    if join_plan.rounds:
        outcomes = _joint_rounds(algorithm, seats, join_plan, engine)
    results = []
    for start, (state, ledger) in zip(starts, outcomes, strict=True):
        results.append(JoinResult(state, client, start.ledger + ledger))
    return results


def _adapted(
    algorithm: Algorithm, seats: Sequence[Seat], epochs: int, engine: EngineConfig | str
) -> list[Seat]:
    """The federations after the last client trained its private part for some epochs."""
    client = seats[0].train.num_clients - 1
    by_epochs = [seat._replace(plan=replace(seat.plan, local_epochs=1)) for seat in seats]
    alone = _with_availability(by_epochs, epochs, (), client)
    outcomes = _run_rounds(freeze_shared(algorithm), alone, engine)
    return [
        _after_rounds(seat, state, epochs) for seat, (state, _) in zip(seats, outcomes, strict=True)
    ]


def _joint_rounds(
    algorithm: Algorithm, seats: Sequence[Seat], join_plan: JoinPlan, engine: EngineConfig | str
) -> list[tuple[State, Ledger]]:
    """Rounds in which the last client always takes part, with sampled existing clients if any."""
    client = seats[0].train.num_clients - 1
    available = range(client) if join_plan.existing_clients else ()
    clients_per_round = max(join_plan.existing_clients, 1)
    sampled = [
        seat._replace(plan=replace(seat.plan, clients_per_round=clients_per_round))
        for seat in seats
    ]
    together = _with_availability(sampled, join_plan.rounds, available, client)
    return _run_rounds(algorithm, together, engine)


def require_joinable(
    algorithm: Algorithm, states: Sequence[State], join_plan: JoinPlan, client: int
) -> None:
    """Refuse a new client that has joined already, has no place, or would train nothing."""
    if algorithm.num_clients is not None:
        raise InputError(
            f"join: {algorithm.name} is made for {algorithm.num_clients} clients, "
            "and has no place for another one"
        )
    if any(client in state.private.trained for state in states):
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
    if algorithm.adapt is None:
        raise InputError(
            f"join: {algorithm.name} has no private part, so nothing would be trained; "
            "let the client join some rounds"
        )
    if not join_plan.epochs:
        raise InputError(
            "join: epochs and rounds are 0, so nothing would be trained; "
            "let the client join some rounds"
        )


def _before_training(seat: Seat, join_plan: JoinPlan, client: int) -> JoinResult:
    """The state before the new client trains.

    It has downloaded the shared tree once, and the local part that it starts from.
    """
    state = seat.state
    ledger = Ledger().add_warm_start({**state.shared, **state.private.initial}, 1)
    if join_plan.start == "average" and state.private.trained and state.private.initial:
        rows = [state.private.of(existing) for existing in sorted(state.private.trained)]
        device = next(iter(rows[0].values())).device
        mean = trees.mean(trees.stack(rows), torch.ones(len(rows), device=device))
        ledger = ledger.add_ensemble(
            state.private.initial, {}, num_trained=len(rows), num_clients=0
        )
        state = State(state.shared, state.private.put([client], [mean]))
    return JoinResult(state, client, ledger)


def _with_availability(
    seats: Sequence[Seat], rounds: int, available: Sequence[int], always: int
) -> list[Seat]:
    """Seats for some rounds after the last one, in which one client always takes part."""
    availability = Availability.of(available, always=[always])
    return [
        seat._replace(
            plan=replace(seat.plan, first_round=seat.plan.total_rounds, rounds=rounds),
            availability=availability,
        )
        for seat in seats
    ]


def _after_rounds(seat: Seat, state: State, rounds: int) -> Seat:
    """The seat after some more rounds."""
    return seat._replace(state=state, plan=replace(seat.plan, rounds=seat.plan.rounds + rounds))


def _run_rounds(
    algorithm: Algorithm, seats: Sequence[Seat], engine: EngineConfig | str
) -> list[tuple[State, Ledger]]:
    """The states after all rounds, and their traffic."""
    executor = Executor(algorithm.client_update, engine=engine, num_calls=seats[0].plan.rounds)
    states, ledgers = [seat.state for seat in seats], [Ledger() for _ in seats]
    try:
        for moment in simulate_seeds(algorithm, seats, executor):
            states = [state for state, _ in moment]
            if not all(bool(torch.isfinite(report.losses).all()) for _, report in moment):
                raise DivergedError(
                    "join: training diverged, a loss is not finite; lower the learning rate"
                )
            ledgers = [
                ledger + report.traffic for ledger, (_, report) in zip(ledgers, moment, strict=True)
            ]
    finally:
        executor.close()
    return list(zip(states, ledgers, strict=True))


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
    trained, score = sorted(trained_federation.state.private.trained), scores[by]
    if not trained or not trained_federation.state.private.initial:
        return trained[:1]
    if score is None or count >= len(trained):
        return trained
    if not len(sample):
        raise InputError(
            f"join: '{by}' needs a sample of the client's inputs; give some, or use 'everyone'"
        )
    order = torch.argsort(score(_probabilities(trained_federation, trained, sample)), stable=True)
    return sorted(trained[place] for place in order[:count].tolist())


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
    order = to_batches(np.arange(len(sample), dtype=np.int64), _BATCH_SIZE)
    examples = Examples(sample, torch.zeros(len(sample), dtype=torch.int64, device=sample.device))
    evaluation = Evaluator(trained_federation.algorithm, trained_federation.task, engine="vmapped")
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
) -> float:
    """Accuracy of the members' averaged logits on a new client's examples."""
    state = trained_federation.state
    models = _models_of(trained_federation, members) or [(state.shared, state.private.initial)]
    return _figure(trained_federation, models, test)


def new_client_figure(
    trained_federation: TrainedFederation, joined: JoinResult, test: Examples
) -> float:
    """Accuracy of the new client's own model."""
    model = (joined.state.shared, joined.state.private.of(joined.client))
    return _figure(trained_federation, [model], test)


def new_client_ensemble_classes(
    trained_federation: TrainedFederation, members: Sequence[int], inputs: Tensor
) -> list[int]:
    """Classes of a new client's inputs (rows, ...), by the members' averaged logits."""
    unknown = Examples(inputs, torch.zeros(len(inputs), dtype=torch.int64, device=inputs.device))
    client_data = ClientData(unknown, (np.arange(len(inputs), dtype=np.int64),))
    evaluation = Evaluator(trained_federation.algorithm, trained_federation.task)
    models = _models_of(trained_federation, members)
    classes: list[int] = ensemble_classes(evaluation, models, client_data).tolist()
    evaluation.close()
    return classes


def _figure(
    trained_federation: TrainedFederation, models: Sequence[tuple[Params, Params]], test: Examples
) -> float:
    if not test.num_rows:
        raise InputError("join: there is no labelled example to test on; give some")
    evaluation = Evaluator(trained_federation.algorithm, trained_federation.task)
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
            f"join: {labels} labelled examples were asked for, but the client has {train.num_rows}; "
            "ask for fewer"
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
    params = trees.to(params_of(trained_federation.model), train.device)
    fresh = trained_federation._replace(
        state=initial_state(trained_federation.algorithm, params),
        clients=0,
        plan=replace(trained_federation.plan, rounds=1, first_round=0),
    )
    rounds = _num_epochs(train.num_rows, trained_federation.plan.batch_size, epochs)
    return join(fresh, train, join_plan=JoinPlan(epochs=0, rounds=rounds), engine=engine)


def _num_epochs(examples: int, batch: int, epochs: int) -> int:
    """The number of epochs: more where these have fewer than `_MIN_STEPS` steps."""
    return max(epochs, -(-_MIN_STEPS // -(-examples // batch)))
