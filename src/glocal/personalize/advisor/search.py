"""How much of a network to share: devices' variances say what to expect, a short race of splits on validation data decides."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import NamedTuple

import numpy as np
from torch import nn

from glocal.algorithms.contract import Algorithm, Update
from glocal.core import trees
from glocal.core.data import ClientData
from glocal.core.errors import InputError
from glocal.core.files import Json
from glocal.core.modules import params_of
from glocal.core.sampling import IntArray, Plan, client_key, make_rng, to_batches
from glocal.core.split import canonical_names, layer_names
from glocal.core.store import PrivateStates, State
from glocal.core.trees import Params
from glocal.datasets.federated import FederatedData
from glocal.engines import ClientTask, Executor
from glocal.evaluate import Evaluator, Metric, accuracy, local_tests
from glocal.evaluate.intervals import ConfidenceInterval
from glocal.federate.fitting import (
    Case,
    Options,
    build_evaluation,
    move_to_device,
    require_trainable,
)
from glocal.federate.rounds import Seat, initial_state, simulate_seeds
from glocal.personalize.advisor.budget import Budget, Cost
from glocal.personalize.advisor.candidates import NOTHING, Candidate, make_candidates
from glocal.personalize.advisor.groups import ClientGroup, accuracy_difference, find_groups
from glocal.personalize.advisor.halving import (
    CandidateState,
    HalvingSetup,
    Stage,
    keep_better_half,
    run_rounds,
    start_halving,
)
from glocal.personalize.advisor.variances import Variances, estimate_variances
from glocal.wire import Ledger, admit

Log = Callable[[str], None]
PREFERENCES = ("accuracy", "bytes")
_WARMUP_SHARE, _HALVING_SHARE = 0.4, 0.5  # shares of a budget
_MIN_CLIENTS, _MIN_EXAMPLES = 3, 8
_HALVES = 2


@dataclass(frozen=True)
class AdvisorConfig:
    """How advice is found: who races and for how long, what they are judged on, and what it may cost.

    A part `holdout_fraction` of a racing device's examples, its validation data among them, is trained on by nobody. In each of `stages` all
    splits that are left go on for so many rounds. A split within `tolerance` of the best, and not clearly below it, is as good. If
    you `prefer` accuracy, the one of these that shares most is chosen, for what is learnt together shows later than a race ends; if
    bytes, one that sends at most half as much as the best, where there are several that which variances expect to err least.
    """

    num_clients: int = 24
    stages: tuple[int, ...] = (1, 3, 8)
    holdout_fraction: float = 0.25
    tolerance: float = 0.01
    max_candidates: int = 12
    prefer: str = "accuracy"
    budget: Budget = Budget()

    def __post_init__(self) -> None:
        if (
            self.num_clients < _MIN_CLIENTS
            or not self.stages
            or min(self.stages) < 1
            or self.max_candidates < _HALVES
        ):
            raise InputError(
                f"advise: {self.num_clients} racers, stages of {list(self.stages)} rounds and {self.max_candidates} splits were asked for; "
                f"at least {_MIN_CLIENTS}, one stage of a round, and {_HALVES} are needed"
            )
        if self.prefer not in PREFERENCES:
            raise InputError(
                f"advise: prefer is '{self.prefer}'; it must be {' or '.join(PREFERENCES)}"
            )
        if not 0 < self.holdout_fraction < 1 or not self.tolerance >= 0:
            raise InputError(
                f"advise: held_out is {self.holdout_fraction} and tolerance {self.tolerance}; a share and a difference were expected"
            )


class CandidateResult(NamedTuple):
    """What became of a split: what it sends, what variances predict of it, accuracy by rounds, and how far from the choice."""

    candidate: Candidate
    sent_fraction: float
    predicted_error: float
    accuracy: dict[int, float]
    difference: ConfidenceInterval | None


@dataclass(frozen=True)
class Advice:
    """What to share, why, how sure that is, and what it cost to find out."""

    choice: Candidate
    ran_halving: bool
    rows: tuple[CandidateResult, ...]
    equally_good: tuple[str, ...]
    variances: dict[str, Variances]
    by_variances: str
    groups: tuple[ClientGroup, ...]
    participants: tuple[int, ...]
    rounds: int
    finished: bool
    cost: Cost
    seconds: float

    def as_dict(self) -> Json:
        """For JSON: the same whenever the same is asked, and so without the seconds it took."""
        return {
            "choice": {
                "name": self.choice.name,
                "shared": list(self.choice.shared),
                "local": list(self.choice.local),
            },
            "by": "candidates" if self.ran_halving else "variances",
            "equally_good": list(self.equally_good),
            "by_variances": self.by_variances,
            "finished": self.finished,
            "candidates": [_row_as_dict(row) for row in self.rows],
            "variances": {layer: found._asdict() for layer, found in self.variances.items()},
            "groups": [{**group._asdict(), "gain": group.gain._asdict()} for group in self.groups],
            "participants": list(self.participants),
            "cost": {
                "rounds": self.cost.rounds,
                "updates": self.cost.updates,
                "ledger": self.cost.ledger.as_dict(),
            },
        }


def _row_as_dict(row: CandidateResult) -> Json:
    return {
        "split": row.candidate.name,
        "shared": list(row.candidate.shared),
        "sent_fraction": row.sent_fraction,
        "predicted_error": row.predicted_error,
        "accuracy": row.accuracy,
        "difference": row.difference and row.difference._asdict(),
    }


class AdvisorRun(NamedTuple):
    """Where all of it takes place: what is trained, by whom, on what, and by what it is judged."""

    algorithm: Algorithm
    model: nn.Module
    plan: Plan
    params: Params
    train: ClientData
    eval_data: tuple[ClientData, ClientData]
    participants: IntArray
    executor: Executor[Update]
    evaluation: Evaluator
    config: AdvisorConfig
    log: Log


def no_log(message: str) -> None:
    """Tell nobody."""


def advise(
    algorithm: Algorithm,
    model: nn.Module,
    data: FederatedData,
    plan: Plan,
    *,
    config: AdvisorConfig | None = None,
    options: Options | None = None,
    log: Log = no_log,
    metric: Metric = accuracy,
) -> Advice:
    """How much of a model devices should share: `plan` is of the rounds of FedAvg, the algorithm, that come before the race.

    `metric` says what a guess is worth.

    No raw data, labels or counts of classes leave a device: only models or shared parts of them, and accuracies, do.
    """
    config, options = config or AdvisorConfig(), options or Options()
    if not algorithm.init(params_of(model))[0] or algorithm.init(params_of(model))[1]:
        raise InputError(
            f"advise: {algorithm.name} keeps something to itself; begin with one that shares all, such as fedavg"
        )
    experiment = Case(
        algorithm,
        model,
        plan,
        (plan.seed,),
        (params_of(model),),
        (data,),
        (Ledger(),),
        metric=metric,
    )
    run_state = _prepare(experiment, config, options, log)
    try:
        return _find_advice(run_state)
    finally:
        run_state.executor.close()
        run_state.evaluation.close()


def _prepare(experiment: Case, config: AdvisorConfig, options: Options, log: Log) -> AdvisorRun:
    fed = experiment.federations[0]
    require_trainable(experiment, fed, options)
    experiment = move_to_device(experiment, options)
    fed, plan = experiment.federations[0], experiment.plan
    participants = _choose_participants(fed, plan, _affordable_clients(experiment, config))
    train, eval_data = _hold_out(fed, participants, plan.seed, config.holdout_fraction)
    num_calls = plan.rounds + sum(config.stages)
    executor = Executor(
        experiment.algorithm.client_update, engine=options.engine_config(), num_calls=num_calls
    )
    whole = experiment.algorithm._replace(personal=lambda shared, private: private)
    evaluation = build_evaluation(replace(experiment, algorithm=whole), options)
    return AdvisorRun(
        experiment.algorithm,
        experiment.model,
        plan,
        experiment.params[0],
        train,
        eval_data,
        participants,
        executor,
        evaluation,
        config,
        log,
    )


def _affordable_clients(experiment: Case, config: AdvisorConfig) -> int:
    """How many devices may race within the budget's bytes, were those splits to go on that send most."""
    sent = sorted(
        trees.nbytes(each.split.take_shared(experiment.params[0]))
        for each in make_candidates(experiment.model, max_candidates=config.max_candidates)
    )
    total = 0
    for rounds in config.stages:
        total += (2 * rounds + 1) * sum(sent)
        sent = sent[len(sent) // 2 :]
    limit = config.budget.bytes
    return (
        config.num_clients
        if limit is None
        else max(_MIN_CLIENTS, min(config.num_clients, int(_HALVING_SHARE * limit / total)))
    )


def _choose_participants(fed: FederatedData, plan: Plan, wanted: int) -> IntArray:
    """Devices drawn to race, of those with some examples."""
    able = np.flatnonzero(fed.train.sizes >= _MIN_EXAMPLES)
    if len(able) < _MIN_CLIENTS:
        enough = f"{_MIN_EXAMPLES} examples or more to train on"
        raise InputError(
            f"advise: {len(able)} devices have {enough}; at least {_MIN_CLIENTS} have to race"
        )
    return np.sort(
        make_rng(plan.seed, "racers").choice(able, min(wanted, len(able)), replace=False)
    )


def _hold_out(
    fed: FederatedData, participants: IntArray, seed: int, share: float
) -> tuple[ClientData, tuple[ClientData, ClientData]]:
    """What is trained on, and two halves of what racing devices are judged on: validation data, and as much more as is missing."""
    train, judged = list(fed.train.rows), [np.zeros(0, dtype=np.int64)] * fed.num_clients
    for client in participants.tolist():
        own, known = (
            train[client],
            fed.val.rows[client] if fed.val.examples is fed.train.examples else train[client][:0],
        )
        wanted = max(_HALVES, round(share * (len(own) + len(known))))
        missing = max(
            0, min(wanted - len(known), len(own) - _HALVES)
        )  # to be trained on in two halves, some must be left
        order = make_rng(seed, "advice", client).permutation(len(own))
        train[client] = np.sort(own[order[missing:]])
        judged[client] = np.concatenate([known, own[order[:missing]]])[
            make_rng(seed, "judges", client).permutation(len(known) + missing)
        ]
    halves = [tuple(np.sort(rows[half::_HALVES]) for rows in judged) for half in range(_HALVES)]
    return replace(fed.train, rows=tuple(train)), (
        replace(fed.train, rows=halves[0]),
        replace(fed.train, rows=halves[1]),
    )


def _find_advice(run_state: AdvisorRun) -> Advice:
    warm, cost = _warm_up(run_state)
    run_state.log("two updates of every racing device")
    found, cost = _estimate_variances(run_state, warm, cost)
    rivals = make_candidates(run_state.model, max_candidates=run_state.config.max_candidates)
    stages, cost, finished = _run_halving(run_state, rivals, warm, cost)
    predicted_error = {rival.name: _predicted_error(rival, found) for rival in rivals}
    expected = min(predicted_error, key=lambda name: predicted_error[name])
    equally_good = _equally_good(stages, run_state.config.tolerance) if stages else [expected]
    sent_fraction = {rival.name: rival.sent_fraction(warm) for rival in rivals}
    choice = next(
        rival
        for rival in rivals
        if rival.name
        == choose_candidate(equally_good, sent_fraction, predicted_error, run_state.config.prefer)
    )
    rows = [
        _candidate_result(
            rival, stages, choice.name, sent_fraction[rival.name], predicted_error[rival.name]
        )
        for rival in rivals
    ]
    return Advice(
        choice=choice,
        ran_halving=bool(stages),
        rows=tuple(rows),
        equally_good=tuple(equally_good),
        variances=found,
        by_variances=expected,
        groups=tuple(find_groups(stages, choice.name, run_state.participants) if stages else []),
        participants=tuple(run_state.participants.tolist()),
        rounds=stages[-1].rounds if stages else 0,
        finished=finished,
        cost=cost,
        seconds=cost.seconds,
    )


def _warm_up(run_state: AdvisorRun) -> tuple[Params, Cost]:
    """A model off its random start, and what that cost; a budget may end it early, with so much left as variances send."""
    cost, plan, budget = Cost.start(), run_state.plan, run_state.config.budget
    shared, model = run_state.params, trees.nbytes(run_state.params)
    reserve = (1 + _HALVES) * len(run_state.participants) * model
    least = 2 * plan.clients_per_round * model + reserve
    if budget.bytes is not None and budget.bytes < least:
        what = f"a round of FedAvg and two updates of {len(run_state.participants)} devices send {least:,} bytes at least"
        raise InputError(
            f"advise: the budget is {budget.bytes:,} bytes; {what}; raise it, or have a smaller cohort"
        )
    for moment in simulate_seeds(
        run_state.algorithm,
        [Seat(plan, run_state.train, initial_state(run_state.algorithm, run_state.params))],
        run_state.executor,
    ):
        state, report = moment[0]
        shared = state.shared
        cost = cost.add(report.traffic, updates=len(report.clients_per_round), rounds=1)
        run_state.log(f"FedAvg, round {cost.rounds} of {plan.rounds}")
        per_round = cost.ledger.total.bytes // cost.rounds
        if not (
            cost.within(budget, share=_WARMUP_SHARE, extra_bytes=per_round)
            and cost.within(budget, extra_bytes=per_round + reserve)
        ):
            break
    return shared, cost


def _estimate_variances(
    run_state: AdvisorRun, warm: Params, cost: Cost
) -> tuple[dict[str, Variances], Cost]:
    """Variances of the racing devices' updates, layer by layer; every device sends two models."""
    number, tasks = run_state.plan.total_rounds, []
    for half in range(_HALVES):
        for client in run_state.participants.tolist():
            rows = make_rng(run_state.plan.seed, "halves", client).permutation(
                run_state.train.rows[client]
            )
            order = to_batches(
                rows[: len(rows) // _HALVES * _HALVES][half::_HALVES], run_state.plan.batch_size
            )
            tasks.append(ClientTask(warm, {}, order, client_key(run_state.plan, number, client)))
    uploads = admit(
        run_state.executor(tasks, run_state.train.examples, number).stacked().upload, warm
    )
    traffic = Ledger().add_round(
        warm,
        uploads,
        num_sampled=len(run_state.participants),
        num_clients=run_state.train.num_clients,
    )
    moved = {
        name: uploads[name] - warm[name]
        for name, tensor in run_state.model.named_parameters()
        if tensor.requires_grad
    }
    count = len(run_state.participants)
    first, second = (
        {name: tensor[rows] for name, tensor in moved.items()}
        for rows in (slice(count), slice(count, None))
    )
    found = estimate_variances(first, second, _tensors_of_layers(run_state.model, moved))
    if not isfinite(found["all"].within_client + found["all"].between_client):
        raise InputError(
            "advise: devices' updates are no finite numbers, for training diverged; lower optimizer.lr"
        )
    return found, cost.add(traffic, updates=count, rounds=1)


def _tensors_of_layers(model: nn.Module, moved: Params) -> dict[str, list[str]]:
    """The tensors that move, by layer; tied ones belong to the first that has them."""
    firsts, names = canonical_names(model), {}
    for layer in layer_names(model):
        own = [
            f"{layer}.{name}".lstrip(".")
            for name, _ in model.get_submodule(layer).named_parameters(recurse=False)
        ]
        names[layer] = [firsts[name] for name in own if firsts[name] == name and name in moved]
    return {layer: own for layer, own in names.items() if own}


def _run_halving(
    run_state: AdvisorRun, rivals: Sequence[Candidate], warm: Params, cost: Cost
) -> tuple[list[Stage], Cost, bool]:
    """Stage after stage until one split is left or the budget is spent; whether it came to its end."""
    setup = HalvingSetup(
        run_state.plan, run_state.train, run_state.participants, run_state.executor
    )
    candidate_states, stages, done = (
        start_halving(rivals, warm, len(run_state.participants)),
        list[Stage](),
        0,
    )
    for rounds in run_state.config.stages:
        if stages:
            candidate_states = keep_better_half(candidate_states, stages[-1])
        if len(candidate_states) == 1:
            break
        if not _can_afford(run_state, candidate_states, rounds, cost):
            return stages, cost, False
        first = run_state.plan.total_rounds + done
        for moved, ledger in run_rounds(setup, candidate_states, range(first, first + rounds)):
            candidate_states = moved
            cost = cost.add(
                ledger,
                updates=len(candidate_states) * len(run_state.participants),
                rounds=len(candidate_states),
            )
            done += 1
            run_state.log(
                f"{len(candidate_states)} splits on {len(run_state.participants)} devices, round {done} of {sum(run_state.config.stages)}"
            )
        stage, traffic = _evaluate_candidates(run_state, candidate_states, done)
        stages, cost = [*stages, stage], cost.add(traffic)
    return stages, cost, True


def _can_afford(
    run_state: AdvisorRun, candidate_states: Sequence[CandidateState], rounds: int, cost: Cost
) -> bool:
    """Whether the next stage fits into the budget: bytes are known, seconds guessed from those so far."""
    budget, updates = (
        run_state.config.budget,
        rounds * len(candidate_states) * len(run_state.participants),
    )
    in_time = (
        budget.seconds is None
        or cost.seconds * (1 + updates / max(1, cost.updates)) <= budget.seconds
    )
    return in_time and cost.within(
        budget,
        extra_bytes=sum(candidate_state.bytes_for(rounds) for candidate_state in candidate_states),
    )


def _evaluate_candidates(
    run_state: AdvisorRun, candidate_states: Sequence[CandidateState], rounds: int
) -> tuple[Stage, Ledger]:
    """Every device's accuracy in every lane on both halves of what it is judged on; the shared part has to reach it for that."""
    clients, traffic = run_state.participants.tolist(), Ledger()
    states = [
        State(
            {},
            PrivateStates(
                candidate_state.models[0], dict(zip(clients, candidate_state.models, strict=True))
            ),
        )
        for candidate_state in candidate_states
    ]
    for candidate_state in candidate_states:
        traffic = traffic.add_evaluation(candidate_state.shared, len(clients))
    asked = [judge for judge in run_state.eval_data for _ in candidate_states]
    found = np.array(local_tests(run_state.evaluation, states * _HALVES, asked))[
        :, run_state.participants
    ].reshape(_HALVES, len(candidate_states), -1)
    sizes = np.array(
        [judge.sizes[run_state.participants] for judge in run_state.eval_data], dtype=np.float64
    )
    return Stage(
        rounds,
        tuple(candidate_state.candidate.name for candidate_state in candidate_states),
        found,
        sizes,
    ), traffic


def _predicted_error(candidate: Candidate, found: dict[str, Variances]) -> float:
    """The error that the linear theory expects, over that of the better end (Propositions 2 and 3).

    A layer pays its data variance if it is local, and its device variance if it is shared.
    """
    pays = [found[layer].within_client for layer in candidate.local if layer in found]
    pays += [max(0.0, found[layer].between_client) for layer in candidate.shared if layer in found]
    return sum(pays) / max(
        min(found["all"].within_client, max(0.0, found["all"].between_client)), 1e-12
    )


def _equally_good(stages: Sequence[Stage], tolerance: float) -> list[str]:
    """The best of the last stage, and those that were neither clearly nor noticeably below it when they raced last.

    Who fell out at the first stage has not raced long enough. To share nothing has to be clearly ahead: a short race shows at once
    what local parts gain, and what is learnt together comes later. What it is clearly ahead of is not as good.
    """
    best, *others = stages[-1].ranking()
    if best == NOTHING and others and accuracy_difference(stages, best, others[0]).low <= 0:
        best = others[0]
    known = stages[min(1, len(stages) - 1)].ranking()
    beaten = {
        name
        for name in known
        if NOTHING in stages[0].names and accuracy_difference(stages, NOTHING, name).low > 0
    }
    behind = {
        name: accuracy_difference(stages, best, name)
        for name in known
        if name not in (best, NOTHING, *beaten)
    }
    return [best, *(name for name, gap in behind.items() if gap.low <= 0 and gap.mean <= tolerance)]


def choose_candidate(
    equally_good: Sequence[str],
    sent_fraction: Mapping[str, float],
    predicted_error: Mapping[str, float],
    prefer: str,
) -> str:
    """For accuracy the one that shares most; for bytes the first, or, of those that send half as much, what variances expect."""
    if prefer == "accuracy":
        return max(equally_good, key=lambda name: sent_fraction[name])
    cheaper = [
        name for name in equally_good if sent_fraction[name] <= sent_fraction[equally_good[0]] / 2
    ]
    return min(cheaper or equally_good[:1], key=lambda name: predicted_error[name])


def _candidate_result(
    rival: Candidate,
    stages: Sequence[Stage],
    choice: str,
    sent_fraction: float,
    predicted_error: float,
) -> CandidateResult:
    accuracy = {
        stage.rounds: float(stage.accuracies_of(rival.name).mean())
        for stage in stages
        if rival.name in stage.names
    }
    return CandidateResult(
        rival,
        sent_fraction,
        predicted_error,
        accuracy,
        accuracy_difference(stages, rival.name, choice) if stages else None,
    )
