"""A new device meets a trained federation: it borrows models, learns its local part alone, or joins the rounds.

Nothing that is here already changes: every function returns a new state, and the old one keeps its bits.
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
from glocal.core.modules import params_of, predictor, state_dict
from glocal.core.sampling import Availability, Plan, make_rng, to_batches
from glocal.core.store import State
from glocal.core.trees import Params
from glocal.engines import ClientTask, EngineConfig, Executor
from glocal.evaluate import Evaluator, Metric, accuracy, ensemble_accuracy, ensemble_classes
from glocal.federate.fitting import num_outputs
from glocal.federate.result import Result
from glocal.federate.rounds import Seat, initial_state, simulate_seeds
from glocal.wire import Ledger

_BATCH_SIZE = 256
_MIN_STEPS = 100  # a handful of labels is visited until that many steps were taken


class TrainedFederation(NamedTuple):
    """A trained federation as a newcomer meets it; the newcomer's number is `clients`, the next one."""

    algorithm: Algorithm
    model: nn.Module
    plan: Plan
    state: State
    clients: int
    metric: Metric = accuracy

    @classmethod
    def from_result(cls, result: Result) -> "TrainedFederation":
        """From what `fit` returned."""
        return cls(
            result.algorithm,
            result.architecture,
            result.plan,
            result.state,
            len(result.times_sampled),
            result.metric,
        )


@dataclass(frozen=True)
class JoinPlan:
    """How a newcomer is taken in: its local part alone for `epochs`, then `rounds` together with `existing_clients` of the old devices each.

    Its local part starts as every device's did ("initial"), or as the mean of all trained ones ("average"): better, but for that
    every trained device has to show its local part to the server once.
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
    """The federation with the newcomer in it, as number `client`, and what joining cost."""

    state: State
    client: int
    ledger: Ledger

    def params(self, algorithm: Algorithm) -> Params:
        """What the newcomer predicts with."""
        return algorithm.personal(self.state.shared, self.state.private.of(self.client))

    def state_dict(self, trained_federation: TrainedFederation) -> Params:
        """The same as a plain state dict of the network."""
        return state_dict(trained_federation.model, self.params(trained_federation.algorithm))


def join(
    trained_federation: TrainedFederation,
    train: Examples,
    *,
    existing_data: ClientData | None = None,
    join_plan: JoinPlan | None = None,
    engine: EngineConfig | str = "auto",
) -> JoinResult:
    """Take one newcomer in, by its labelled examples; `existing_data` are the training data of the devices that are asked as guests."""
    how = join_plan or JoinPlan()
    if not len(train.y):
        raise InputError(
            "join: the device has no labelled example, so that nothing can be learnt; use the ensemble instead"
        )
    _require_inputs_and_labels(trained_federation, train)
    if how.rounds and how.existing_clients and existing_data is None:
        raise InputError(
            f"join: {how.existing_clients} guests were asked for, but not their data; give old=, or guests=0"
        )
    crowd = append_client(
        train,
        existing_data if how.rounds and how.existing_clients else None,
        trained_federation.clients,
    )
    if how.epochs:
        how = replace(
            how, epochs=_num_epochs(len(train.y), trained_federation.plan.batch_size, how.epochs)
        )
    return join_many(
        trained_federation.algorithm,
        [Seat(trained_federation.plan, crowd, trained_federation.state)],
        how,
        engine=engine,
    )[0]


def _require_inputs_and_labels(trained_federation: TrainedFederation, train: Examples) -> None:
    """Refuse inputs that the network cannot take, and labels that it does not know."""
    classes, labels = num_outputs(trained_federation.model, train.x), train.y
    if labels.is_floating_point() or bool(((labels < 0) | (labels >= classes)).any()):
        raise InputError(
            f"join: labels from 0 to {classes - 1} were expected; the device has {labels.min()} to {labels.max()}"
        )


def append_client(train: Examples, existing_data: ClientData | None, clients: int) -> ClientData:
    """The newcomer's examples as those of the last device, beside the old ones' if they are to train too."""
    if existing_data is None:
        absent: Rows = np.zeros(0, dtype=np.int64)
        return ClientData(
            train, (*(absent for _ in range(clients)), np.arange(len(train.y), dtype=np.int64))
        )
    x, y, _ = existing_data.examples
    store = Examples(torch.cat([x, train.x.to(x.device)]), torch.cat([y, train.y.to(y.device)]))
    return ClientData(store, (*existing_data.rows, np.arange(len(y), len(store.y), dtype=np.int64)))


def join_many(
    algorithm: Algorithm,
    seats: Sequence[Seat],
    join_plan: JoinPlan,
    *,
    engine: EngineConfig | str = "auto",
) -> list[JoinResult]:
    """The last device of each of several federations side by side is new: let it learn its local part, then join the rounds."""
    client = seats[0].train.num_clients - 1
    require_joinable(algorithm, [seat.state for seat in seats], join_plan, client)
    joined = [_before_training(seat, join_plan, client) for seat in seats]
    seats = [seat._replace(state=state) for seat, (state, _, _) in zip(seats, joined, strict=True)]
    if algorithm.adapt is not None and join_plan.epochs:
        by_epochs = [seat._replace(plan=replace(seat.plan, local_epochs=1)) for seat in seats]
        states = [
            state
            for state, _ in _run_rounds(
                freeze_shared(algorithm),
                _with_attendance(by_epochs, join_plan.epochs, (), client),
                engine,
            )
        ]
        seats = [
            _after_rounds(seat, state, join_plan.epochs)
            for seat, state in zip(seats, states, strict=True)
        ]
    outcomes = [(seat.state, Ledger()) for seat in seats]
    if join_plan.rounds:
        present = range(client) if join_plan.existing_clients else ()
        guested = [
            seat._replace(
                plan=replace(seat.plan, clients_per_round=max(join_plan.existing_clients, 1))
            )
            for seat in seats
        ]
        outcomes = _run_rounds(
            algorithm, _with_attendance(guested, join_plan.rounds, present, client), engine
        )
    return [
        JoinResult(state, client, met.ledger + ledger)
        for (state, ledger), met in zip(outcomes, joined, strict=True)
    ]


def require_joinable(
    algorithm: Algorithm, states: Sequence[State], join_plan: JoinPlan, client: int
) -> None:
    """Refuse a newcomer who is there already, for whom there is no place, or who would learn nothing."""
    if algorithm.num_clients is not None:
        raise InputError(
            f"join: {algorithm.name} is made for {algorithm.num_clients} devices, and has no place for one more"
        )
    if any(client in state.private.trained for state in states):
        raise InputError(
            f"join: device {client} is in this federation already; a newcomer needs the next free number"
        )
    if join_plan.existing_clients > client:
        raise InputError(
            f"join: {join_plan.existing_clients} guests were asked for, but there are {client} devices; ask for fewer"
        )
    if not join_plan.rounds and (algorithm.adapt is None or not join_plan.epochs):
        why = (
            f"{algorithm.name} keeps nothing local"
            if algorithm.adapt is None
            else "epochs and rounds are 0"
        )
        raise InputError(f"join: {why}, so that nothing would be learnt; let it join some rounds")


def _before_training(seat: Seat, join_plan: JoinPlan, client: int) -> JoinResult:
    """The newcomer before it learns: it has received the shared tree once, and the local part that it starts from."""
    state, ledger = (
        seat.state,
        Ledger().add_warm_start({**seat.state.shared, **seat.state.private.initial}, 1),
    )
    if join_plan.start == "average" and state.private.trained and state.private.initial:
        members = [state.private.of(member) for member in sorted(state.private.trained)]
        mean = trees.mean(
            trees.stack(members),
            torch.ones(len(members), device=next(iter(members[0].values())).device),
        )
        ledger = ledger.add_ensemble(
            state.private.initial, {}, num_trained=len(members), num_clients=0
        )
        state = State(state.shared, state.private.put([client], [mean]))
    return JoinResult(state, client, ledger)


def _with_attendance(
    seats: Sequence[Seat], rounds: int, present: Sequence[int], always: int
) -> list[Seat]:
    """Seats for some rounds after the last, in which one device always takes part."""
    attendance = Availability.of(present, always=[always])
    return [
        seat._replace(
            plan=replace(seat.plan, first_round=seat.plan.total_rounds, rounds=rounds),
            attendance=attendance,
        )
        for seat in seats
    ]


def _after_rounds(seat: Seat, state: State, rounds: int) -> Seat:
    """The seat after some rounds more."""
    return seat._replace(state=state, plan=replace(seat.plan, rounds=seat.plan.rounds + rounds))


def _run_rounds(
    algorithm: Algorithm, seats: Sequence[Seat], engine: EngineConfig | str
) -> list[tuple[State, Ledger]]:
    """The states after all rounds, and what was sent in them."""
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
    """Whose models a newcomer without labels borrows, judged by what they say about a sample of its inputs (rows, ...).

    "everyone" who has trained; the `count` most "confident" (lowest entropy on average); or the `count` "nearest" to what all
    together say (smallest total variation on average).
    """
    scores = {"everyone": None, "confident": _entropy, "nearest": _distance}
    if by not in scores or count < 1:
        raise InputError(
            f"join: by is '{by}' and count {count}; at least 1 of a known way was expected; {suggest_name(by, scores)}"
        )
    trained, judge = sorted(trained_federation.state.private.trained), scores[by]
    if not trained or not trained_federation.state.private.initial:
        return trained[:1]
    if judge is None or count >= len(trained):
        return trained
    if not len(sample):
        raise InputError(
            f"join: '{by}' needs a sample of the device's inputs; give some, or use 'everyone'"
        )
    order = torch.argsort(judge(_probabilities(trained_federation, trained, sample)), stable=True)
    return sorted(trained[place] for place in order[:count].tolist())


def _entropy(probabilities: Tensor) -> Tensor:
    """How unsure each member is on average (members,), from probabilities (members, rows, classes)."""
    return -(probabilities * probabilities.clamp(min=1e-12).log()).sum(-1).mean(-1)


def _distance(probabilities: Tensor) -> Tensor:
    """How far each member is from all together on average (members,)."""
    return (probabilities - probabilities.mean(0)).abs().sum(-1).mean(-1) / 2


@torch.no_grad()
def _probabilities(
    trained_federation: TrainedFederation, trained: Sequence[int], sample: Tensor
) -> Tensor:
    """The probabilities that each member gives (members, rows, classes), in double precision."""
    order = to_batches(np.arange(len(sample), dtype=np.int64), _BATCH_SIZE)
    examples = Examples(sample, torch.zeros(len(sample), dtype=torch.int64, device=sample.device))
    evaluation = Evaluator(
        trained_federation.algorithm, predictor(trained_federation.model), engine="vmapped"
    )
    tasks = [
        ClientTask(
            trained_federation.state.shared, trained_federation.state.private.of(member), order
        )
        for member in trained
    ]
    outputs = evaluation.outputs(tasks, examples).stacked().flatten(1, 2)[:, : len(sample)]
    evaluation.close()
    return outputs.double().softmax(-1)


def new_client_ensemble_accuracy(
    trained_federation: TrainedFederation, members: Sequence[int], test: Examples
) -> float:
    """Accuracy of the averaged logits of some members on a newcomer's examples."""
    trees_of = [
        (trained_federation.state.shared, trained_federation.state.private.of(member))
        for member in members
    ]
    return _accuracy(
        trained_federation,
        trees_of or [(trained_federation.state.shared, trained_federation.state.private.initial)],
        test,
    )


def new_client_accuracy(
    trained_federation: TrainedFederation, joined: JoinResult, test: Examples
) -> float:
    """Accuracy of the newcomer's own model."""
    return _accuracy(
        trained_federation, [(joined.state.shared, joined.state.private.of(joined.client))], test
    )


def new_client_ensemble_classes(
    trained_federation: TrainedFederation, members: Sequence[int], inputs: Tensor
) -> list[int]:
    """The classes that the averaged logits of some members give to a newcomer's inputs (rows, ...)."""
    unknown = Examples(inputs, torch.zeros(len(inputs), dtype=torch.int64, device=inputs.device))
    client_data = ClientData(unknown, (np.arange(len(inputs), dtype=np.int64),))
    evaluation = Evaluator(trained_federation.algorithm, predictor(trained_federation.model))
    models = [
        (trained_federation.state.shared, trained_federation.state.private.of(member))
        for member in members
    ]
    classes: list[int] = ensemble_classes(evaluation, models, client_data).tolist()
    evaluation.close()
    return classes


def _accuracy(
    trained_federation: TrainedFederation, models: Sequence[tuple[Params, Params]], test: Examples
) -> float:
    if not len(test.y):
        raise InputError("join: there is no labelled example to test on; give some")
    evaluation = Evaluator(
        trained_federation.algorithm,
        predictor(trained_federation.model),
        metric=trained_federation.metric,
    )
    client_data = ClientData(test, (np.arange(len(test.y), dtype=np.int64),))
    accuracy = ensemble_accuracy(evaluation, models, client_data)
    evaluation.close()
    return accuracy


def sample_labeled(train: Examples, labels: int | None, *, seed: int) -> Examples:
    """Some labelled examples of a newcomer, drawn at random; more are a superset of fewer. All if None."""
    if labels is None:
        return train
    if not 0 <= labels <= len(train.y):
        raise InputError(
            f"join: {labels} labelled examples were asked for, but the device has {len(train.y)}; ask for fewer"
        )
    order = make_rng(seed, "labels").permutation(len(train.y))
    return train.take(np.sort(order[:labels]))


def train_alone(
    trained_federation: TrainedFederation,
    train: Examples,
    *,
    epochs: int,
    engine: EngineConfig | str = "auto",
) -> JoinResult:
    """The same network from fresh weights on the newcomer's examples only: what it would have without a federation."""
    fresh = initial_state(
        trained_federation.algorithm, trees.to(params_of(trained_federation.model), train.y.device)
    )
    lonely = trained_federation._replace(
        state=fresh, clients=0, plan=replace(trained_federation.plan, rounds=1, first_round=0)
    )
    return join(
        lonely,
        train,
        join_plan=JoinPlan(
            epochs=0, rounds=_num_epochs(len(train.y), trained_federation.plan.batch_size, epochs)
        ),
        engine=engine,
    )


def _num_epochs(examples: int, batch: int, epochs: int) -> int:
    """How often to visit the examples: a handful of them more often."""
    return max(epochs, -(-_MIN_STEPS // -(-examples // batch)))
