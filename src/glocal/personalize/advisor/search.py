"""How much of a network to share: variances of updates, then successive halving of splits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import NamedTuple

import numpy as np
from torch import nn

from glocal.algorithms import FedAvg, LocalOnly
from glocal.algorithms.contract import Algorithm, require_algorithm
from glocal.core import trees
from glocal.core.bounds import MAX_CLIENTS, MAX_ROUNDS, require_count
from glocal.core.checks import (
    require_choice,
    require_instance,
    require_items,
    require_number,
)
from glocal.core.data import ClientData, Rows
from glocal.core.errors import InputError
from glocal.core.files import Json
from glocal.core.metric import Metric
from glocal.core.model_tensors import canonical_names
from glocal.core.one_line import one_line
from glocal.core.sampling import IntArray, Plan, client_key, make_rng, to_batches
from glocal.core.split import layer_names
from glocal.core.store import GroupState, PerClient, TrainingState
from glocal.core.trees import Params
from glocal.datasets.federated import FederatedData
from glocal.engines import ClientTask, Executor
from glocal.evaluate import Evaluator, Floats, local_tests
from glocal.evaluate.intervals import ConfidenceInterval
from glocal.federate.experiment import Experiment
from glocal.federate.fit import build_experiment
from glocal.federate.options import Options
from glocal.federate.requirements import require_trainable
from glocal.federate.rounds import (
    GroupClients,
    GroupSetup,
    Replica,
    Reply,
    build_executors,
    require_counted,
    simulate,
    start_state,
    start_wires,
)
from glocal.personalize.advisor.budget import Budget, Cost
from glocal.personalize.advisor.candidates import NOTHING, Candidate, make_candidates
from glocal.personalize.advisor.groups import ClientGroup, find_groups, find_lead
from glocal.personalize.advisor.halving import (
    CandidateState,
    HalvingSetup,
    Stage,
    build_whole_executor,
    keep_better_half,
    run_rounds,
    start_halving,
)
from glocal.personalize.advisor.variances import Variances, estimate_variances
from glocal.wire import Ledger

Log = Callable[[str], None]
PREFERENCES = ("accuracy", "bytes")
_WARMUP_SHARE, _HALVING_SHARE = 0.4, 0.5  # of a budget
_MIN_CLIENTS, _MIN_EXAMPLES = 3, 8
_HALVES = 2


@dataclass(frozen=True)
class AdvisorConfig:
    """Settings of the advisor: participating clients, stages of successive halving, and budget.

    Of each participating client's examples, the fraction `holdout_fraction` is held out, its
    validation data included. Nobody trains on these. In each of `stages`, the remaining splits
    train for that many rounds. A split counts as equally good if it is at most `tolerance` worse
    than the best and not clearly worse; for a metric that is no fraction, that is a share of its
    mean. If `prefer` is "accuracy", the equally good split that
    shares most is chosen: a short training shows what local parts gain, but not yet what joint
    training gains. If it is "bytes", a split that sends at most half as much as the best is
    chosen, and among several the one with the least predicted error.

    >>> AdvisorConfig(prefer="bytes", budget=Budget.parse("20 MB")).budget.bytes
    20000000
    """

    num_clients: int = 24
    stages: tuple[int, ...] = (1, 3, 8)
    holdout_fraction: float = 0.25
    tolerance: float = 0.01
    max_candidates: int = 12
    prefer: str = "accuracy"
    budget: Budget = Budget()

    def __post_init__(self) -> None:
        for name in ("num_clients", "max_candidates"):
            require_count(f"advise: {name}", getattr(self, name), 0, MAX_CLIENTS)
        require_items("advise: stages", self.stages, int, "a tuple of numbers of rounds")
        for rounds in self.stages:
            require_count("advise: the rounds of a stage", rounds, 0, MAX_ROUNDS)
        require_choice("advise: prefer", self.prefer, PREFERENCES)
        require_instance("advise: budget", self.budget, Budget, "a glocal.Budget")
        has_rounds = bool(self.stages) and min(self.stages) >= 1
        has_clients = self.num_clients >= _MIN_CLIENTS
        if not has_rounds or not has_clients or self.max_candidates < _HALVES:
            raise InputError(
                f"advise: {self.num_clients} clients, stages of {list(self.stages)} rounds and "
                f"{self.max_candidates} splits were asked for; at least {_MIN_CLIENTS} clients, "
                f"one stage of one round and {_HALVES} splits are needed"
            )
        require_number(
            "advise: holdout_fraction",
            self.holdout_fraction,
            lambda share: 0 < share < 1,
            "above 0 and below 1",
        )
        require_number(
            "advise: tolerance", self.tolerance, lambda share: share >= 0, "of at least 0"
        )


class CandidateResult(NamedTuple):
    """A candidate's traffic, predicted error, figures by rounds, and its lead over the choice.

    The lead is positive where the candidate is better.
    """

    candidate: Candidate
    sent_fraction: float
    predicted_error: float
    figures: dict[int, float]
    lead: ConfidenceInterval | None

    def as_dict(self) -> Json:
        """For JSON."""
        return {
            "split": self.candidate.name,
            "shared": list(self.candidate.shared),
            "sends": self.sent_fraction,
            "predicted": self.predicted_error,
            "figures": self.figures,
            "lead": self.lead and self.lead._asdict(),
        }


@dataclass(frozen=True)
class Advice:
    """The recommended split, the reasons, the uncertainty, and the cost of the advice.

    Candidates were compared by `metric`.

    >>> import torch, glocal
    >>> dataset = glocal.load_dataset("digits")
    >>> data = glocal.FederatedData.partition(dataset, glocal.shards(10, 2))
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    >>> task = glocal.classification(model)
    >>> algorithm = glocal.FedAvg(task, optimizer=glocal.SGD(lr=0.1))
    >>> plan = glocal.Plan(rounds=2, clients_per_round=3)
    >>> advice = glocal.advise(algorithm, data, plan)
    >>> len(advice.choice.shared) + len(advice.choice.local), advice.metric.name
    (1, 'accuracy')
    """

    metric: Metric
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

    def __repr__(self) -> str:
        return one_line(self)

    def as_dict(self) -> Json:
        """For JSON, without the seconds: the same inputs give the same bytes."""
        return {
            "metric": {
                "name": self.metric.name,
                "higher_is_better": self.metric.higher_is_better,
                "is_fraction": self.metric.is_fraction,
            },
            "choice": {
                "name": self.choice.name,
                "shared": list(self.choice.shared),
                "local": list(self.choice.local),
            },
            "by": "halving" if self.ran_halving else "variances",
            "as_good": list(self.equally_good),
            "by_variances": self.by_variances,
            "finished": self.finished,
            "halving": [row.as_dict() for row in self.rows],
            "variances": {layer: each._asdict() for layer, each in self.variances.items()},
            "groups": [{**group._asdict(), "gain": group.gain._asdict()} for group in self.groups],
            "participants": list(self.participants),
            "cost": {
                "rounds": self.cost.rounds,
                "updates": self.cost.updates,
                "ledger": self.cost.ledger.as_dict(),
            },
        }


class AdvisorRun(NamedTuple):
    """Everything that the steps of the advisor use: data, participants, engines, settings.

    `eval_data` are the two halves of the examples that participating clients hold out.
    """

    replica: Replica
    start: TrainingState
    eval_data: tuple[ClientData, ClientData]
    participants: IntArray
    executors: list[Executor[Reply]]
    halving: HalvingSetup
    whole: Executor[Reply]
    evaluation: Evaluator
    config: AdvisorConfig
    log: Log

    @property
    def plan(self) -> Plan:
        """The training before the splits are compared."""
        return self.replica.plan

    @property
    def train(self) -> ClientData:
        """The training data, without what is held out."""
        return self.replica.groups[0].train

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self.halving.algorithm.task.model


def no_log(message: str) -> None:
    """Ignore a message."""


def advise(
    algorithm: Algorithm,
    data: FederatedData,
    plan: Plan,
    *,
    config: AdvisorConfig | None = None,
    options: Options | None = None,
    log: Log = no_log,
) -> Advice:
    """How much of a model clients should share.

    `algorithm` is FedAvg, and `plan` is its training before the splits are compared by the task's
    first metric.

    Only models, shared parts of models, and metrics leave a client: no examples, labels or class
    counts do.

    >>> import torch, glocal
    >>> dataset = glocal.load_dataset("digits")
    >>> data = glocal.FederatedData.partition(dataset, glocal.iid(10))
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    >>> task = glocal.classification(model)
    >>> algorithm = glocal.FedAvg(task, optimizer=glocal.SGD(lr=0.1))
    >>> plan = glocal.Plan(rounds=2, clients_per_round=3)
    >>> config = glocal.AdvisorConfig(num_clients=4, stages=(1,))
    >>> len(glocal.advise(algorithm, data, plan, config=config).participants)
    4
    """
    config = AdvisorConfig() if config is None else config
    options = Options() if options is None else options
    require_algorithm("advise: algorithm", algorithm)
    require_instance("advise: plan", plan, Plan, "a glocal.Plan")
    require_instance("advise: config", config, AdvisorConfig, "a glocal.AdvisorConfig")
    require_instance("advise: options", options, Options, "a glocal.Options")
    require_instance("advise: log", log, Callable, "a function of a text")
    if type(algorithm) is not FedAvg or algorithm.split.local:
        raise InputError(
            f"advise: {algorithm!r} was given; begin with FedAvg, which shares everything"
        )
    experiment = build_experiment(algorithm, data, plan=plan, seeds=(plan.seed,))
    run_state = _prepare(experiment, config, options, log)
    try:
        return _find_advice(run_state)
    finally:
        for executor in (*run_state.executors, run_state.whole):
            executor.close()
        run_state.evaluation.close()


def _prepare(
    experiment: Experiment, config: AdvisorConfig, options: Options, log: Log
) -> AdvisorRun:
    require_trainable(experiment)
    placed, engine = experiment.to(options.torch_device()), options.engine_config()
    algorithm, data, plan = placed.algorithm, placed.groups[0].data[0], placed.plans()[0]
    params = trees.to(algorithm.task.initial_params(), options.torch_device())
    participants = _choose_participants(data, plan, _affordable_clients(algorithm, params, config))
    train, eval_data = _hold_out(data, participants, plan.seed, config.holdout_fraction)
    setups = [GroupSetup(algorithm, params)]
    wires = start_wires(setups)
    replica = Replica((GroupClients(algorithm, train, wires[0]),), plan)
    halving = HalvingSetup(algorithm, plan, train, participants)
    calls = plan.rounds + sum(config.stages)
    whole = LocalOnly(algorithm.task, optimizer=algorithm.optimizer)
    return AdvisorRun(
        replica=replica,
        start=start_state(setups, wires),
        eval_data=eval_data,
        participants=participants,
        executors=build_executors(replica.groups, engine, num_calls=calls),
        halving=halving,
        whole=build_whole_executor(halving, engine=engine, num_calls=calls),
        evaluation=Evaluator(whole, engine=engine),
        config=config,
        log=log,
    )


def _affordable_clients(algorithm: Algorithm, params: Params, config: AdvisorConfig) -> int:
    """How many clients can participate within the budget's bytes.

    This assumes the worst: that the candidates which send most go on to the next stage.
    """
    candidates = make_candidates(algorithm.task.model, max_candidates=config.max_candidates)
    if config.budget.bytes is None:
        return config.num_clients
    sent = sorted(trees.nbytes(candidate.split.take_shared(params)) for candidate in candidates)
    bytes_per_client = 0
    for rounds in config.stages:
        bytes_per_client += (2 * rounds + 1) * sum(sent)
        sent = sent[len(sent) // 2 :]
    affordable = int(_HALVING_SHARE * config.budget.bytes / bytes_per_client)
    return max(_MIN_CLIENTS, min(config.num_clients, affordable))


def _choose_participants(fed: FederatedData, plan: Plan, count: int) -> IntArray:
    """Clients drawn at random from those with enough examples."""
    able = np.flatnonzero(fed.train.sizes >= _MIN_EXAMPLES)
    if len(able) < _MIN_CLIENTS:
        raise InputError(
            f"advise: {len(able)} clients have {_MIN_EXAMPLES} examples or more to train on; "
            f"at least {_MIN_CLIENTS} clients have to participate"
        )
    generator = make_rng(plan.seed, "racers")
    return np.sort(generator.choice(able, min(count, len(able)), replace=False))


def _hold_out(
    fed: FederatedData, participants: IntArray, seed: int, share: float
) -> tuple[ClientData, tuple[ClientData, ClientData]]:
    """Training data, and two halves of the examples that participating clients hold out.

    Validation data are held out first, then as many training examples as are missing.
    """
    train, held_out = list(fed.train.rows), [np.zeros(0, dtype=np.int64)] * fed.num_clients
    for client in participants.tolist():
        own = train[client]
        known = fed.val.rows[client] if fed.val.examples is fed.train.examples else own[:0]
        count = max(_HALVES, round(share * (len(own) + len(known))))
        # Two halves are trained on afterwards, so that two examples at least have to stay.
        missing = max(0, min(count - len(known), len(own) - _HALVES))
        order = make_rng(seed, "advice", client).permutation(len(own))
        train[client] = np.sort(own[order[missing:]])
        shuffled = make_rng(seed, "judges", client).permutation(len(known) + missing)
        held_out[client] = np.concatenate([known, own[order[:missing]]])[shuffled]
    first, second = (_every_second(held_out, half) for half in range(_HALVES))
    halves = (replace(fed.train, rows=first), replace(fed.train, rows=second))
    return replace(fed.train, rows=tuple(train)), halves


def _every_second(held_out: Sequence[Rows], start: int) -> tuple[Rows, ...]:
    """Every second row of each client, sorted."""
    return tuple(np.sort(rows[start::_HALVES]) for rows in held_out)


def _find_advice(run_state: AdvisorRun) -> Advice:
    config = run_state.config
    model, cost = _warm_up(run_state)
    run_state.log("two updates of every participating client")
    variances, cost = _estimate_variances(run_state, model, cost)
    candidates = make_candidates(run_state.model, max_candidates=config.max_candidates)
    stages, cost, finished = _run_halving(run_state, candidates, model, cost)
    predicted_error = {each.name: _predicted_error(each, variances) for each in candidates}
    sent_fraction = {each.name: each.sent_fraction(model) for each in candidates}
    by_variances = min(predicted_error, key=lambda name: predicted_error[name])
    equally_good = _equally_good(stages, config.tolerance) if stages else [by_variances]
    name = choose_candidate(equally_good, sent_fraction, predicted_error, config.prefer)
    choice = next(each for each in candidates if each.name == name)
    rows = []
    for candidate in candidates:
        sent, error = sent_fraction[candidate.name], predicted_error[candidate.name]
        figures = _figures(run_state.evaluation.task.metric, candidate, stages)
        lead = find_lead(stages, candidate.name, choice.name) if stages else None
        rows.append(CandidateResult(candidate, sent, error, figures, lead))
    return Advice(
        metric=run_state.evaluation.task.metric,
        choice=choice,
        ran_halving=bool(stages),
        rows=tuple(rows),
        equally_good=tuple(equally_good),
        variances=variances,
        by_variances=by_variances,
        groups=tuple(find_groups(stages, choice.name, run_state.participants) if stages else []),
        participants=tuple(run_state.participants.tolist()),
        rounds=stages[-1].rounds if stages else 0,
        finished=finished,
        cost=cost,
        seconds=cost.seconds,
    )


def _warm_up(run_state: AdvisorRun) -> tuple[Params, Cost]:
    """FedAvg from the model's initial weights, and its cost.

    A budget may end it early; enough is left to estimate the variances.
    """
    cost, plan, budget = Cost.start(), run_state.plan, run_state.config.budget
    shared, model_bytes = run_state.start.shared, trees.nbytes(run_state.start.shared)
    reserve = (1 + _HALVES) * len(run_state.participants) * model_bytes
    least = 2 * plan.clients_per_round * model_bytes + reserve
    if budget.bytes is not None and budget.bytes < least:
        raise InputError(
            f"advise: the budget is {budget.bytes:,} bytes; a round of FedAvg and two updates of "
            f"{len(run_state.participants)} clients send {least:,} bytes at least; "
            "raise it, or lower clients_per_round"
        )
    rounds = range(plan.first_round, plan.total_rounds)
    replicas, states = [run_state.replica], [run_state.start]
    for finished in simulate(replicas, states, run_state.executors, rounds):
        [(state, report)] = finished
        require_counted(finished, [plan.seed], run_state.train.label)
        shared = state.shared
        cost = cost.add(report.traffic[0], updates=len(report.clients), rounds=1)
        run_state.log(f"FedAvg, round {cost.rounds} of {plan.rounds}")
        per_round = cost.ledger.total.bytes // cost.rounds
        has_share = cost.within(budget, share=_WARMUP_SHARE, extra_bytes=per_round)
        if not has_share or not cost.within(budget, extra_bytes=per_round + reserve):
            break
    return shared, cost


def _estimate_variances(
    run_state: AdvisorRun, model: Params, cost: Cost
) -> tuple[dict[str, Variances], Cost]:
    """Variances of the participating clients' updates; each client sends two models."""
    round_index, train = run_state.plan.total_rounds, run_state.train
    tasks = []
    for half in range(_HALVES):
        for client in run_state.participants.tolist():
            key = client_key(run_state.plan, round_index, client)
            tasks.append(ClientTask(model, {}, _half_order(run_state, client, half), key))
    result = run_state.executors[0](tasks, train.examples, round_index).stacked()
    count = len(run_state.participants)
    uploads = run_state.replica.groups[0].wire.decode(result.payload)
    traffic = Ledger().add_round(
        model,
        result.payload,
        scalars=trees.numel(model),
        num_sampled=count,
        num_replied=_HALVES * count,
        num_clients=train.num_clients,
    )
    trainable = run_state.halving.algorithm.task.trainable
    updates = trees.pick(uploads, trainable)
    first = {name: tensor[:count] for name, tensor in updates.items()}
    second = {name: tensor[count:] for name, tensor in updates.items()}
    variances = estimate_variances(first, second, _tensors_of_layers(run_state.model, updates))
    if not isfinite(variances["all"].within_client + variances["all"].between_client):
        raise InputError(
            "advise: clients' updates are not finite: training diverged; lower optimizer.lr"
        )
    return variances, cost.add(traffic, updates=count, rounds=1)


def _half_order(run_state: AdvisorRun, client: int, half: int) -> IntArray:
    """One epoch over one half of a client's training examples, as batches."""
    generator = make_rng(run_state.plan.seed, "halves", client)
    rows = generator.permutation(run_state.train.rows[client])
    even = rows[: len(rows) // _HALVES * _HALVES]
    return to_batches(even[half::_HALVES], run_state.plan.batch_size)[None]


def _tensors_of_layers(model: nn.Module, updates: Params) -> dict[str, list[str]]:
    """The names of updated tensors by layer; tied tensors belong to the first layer with them."""
    firsts, names = canonical_names(model), dict[str, list[str]]()
    for layer in layer_names(model):
        parameters = model.get_submodule(layer).named_parameters(recurse=False)
        full_names = [f"{layer}.{name}".lstrip(".") for name, _ in parameters]
        own = [name for name in full_names if firsts[name] == name and name in updates]
        if own:
            names[layer] = own
    return names


def _run_halving(
    run_state: AdvisorRun, candidates: Sequence[Candidate], model: Params, cost: Cost
) -> tuple[list[Stage], Cost, bool]:
    """Stages until one candidate is left or the budget is spent; whether they ended by plan."""
    plan, config, count = run_state.plan, run_state.config, len(run_state.participants)
    candidate_states = start_halving(run_state.halving, candidates, model)
    stages, done = list[Stage](), 0
    for rounds in config.stages:
        if stages:
            candidate_states = keep_better_half(candidate_states, stages[-1])
        if len(candidate_states) == 1:
            break
        if not _can_afford(run_state, candidate_states, rounds, cost):
            return stages, cost, False
        first, number = plan.total_rounds + done, len(candidate_states)
        following = range(first, first + rounds)
        for trained, ledger in run_rounds(run_state.whole, candidate_states, following):
            candidate_states = trained
            cost = cost.add(ledger, updates=number * count, rounds=number)
            done += 1
            run_state.log(
                f"{number} splits on {count} clients, round {done} of {sum(config.stages)}"
            )
        stage, traffic = _evaluate_candidates(run_state, candidate_states, done)
        stages, cost = [*stages, stage], cost.add(traffic)
    return stages, cost, True


def _can_afford(
    run_state: AdvisorRun, candidate_states: Sequence[CandidateState], rounds: int, cost: Cost
) -> bool:
    """Whether the next stage is within the budget; its seconds are extrapolated."""
    budget = run_state.config.budget
    sent = sum(candidate_state.bytes_for(rounds) for candidate_state in candidate_states)
    if not cost.within(budget, extra_bytes=sent):
        return False
    if budget.seconds is None:
        return True
    updates = rounds * len(candidate_states) * len(run_state.participants)
    return cost.seconds * (1 + updates / max(1, cost.updates)) <= budget.seconds


def _evaluate_candidates(
    run_state: AdvisorRun, candidate_states: Sequence[CandidateState], rounds: int
) -> tuple[Stage, Ledger]:
    """Scores of all candidates on both halves of the data that participants hold out.

    The shared part is sent to each participant for it, and counted.
    """
    participants = run_state.participants
    states, traffic = [], Ledger()
    for candidate_state in candidate_states:
        models = candidate_state.models
        states.append(GroupState({}, PerClient(next(iter(models.values())), models)))
        traffic = traffic.add_evaluation(candidate_state.shared, len(participants))
    first, second = run_state.eval_data
    data = [first] * len(states) + [second] * len(states)
    values = np.array(local_tests(run_state.evaluation, states * _HALVES, data))
    halves = values[:, participants].reshape(_HALVES, len(states), -1)
    metric = run_state.evaluation.task.metric
    _require_defined(metric, halves)
    sizes = [half.sizes[participants] for half in run_state.eval_data]
    names = tuple(candidate_state.candidate.name for candidate_state in candidate_states)
    unit = 1.0 if metric.is_fraction else abs(float(np.nanmean(halves)))
    scores = _sign(metric) * halves
    return Stage(rounds, names, scores, np.array(sizes, dtype=np.float64), unit), traffic


def _sign(metric: Metric) -> int:
    """What makes a score of a figure: of scores, higher is better."""
    return 1 if metric.higher_is_better else -1


def _require_defined(metric: Metric, halves: Floats) -> None:
    """Refuse a metric that is undefined for all participants, or for all with one candidate."""
    if bool(np.isnan(halves).all((0, 2)).any()):
        raise InputError(
            f"advise: {metric.name} is undefined for the examples that every participating client "
            "holds out; let more clients take part, or use another metric"
        )


def _predicted_error(candidate: Candidate, variances: Mapping[str, Variances]) -> float:
    """The error that the linear theory predicts, relative to the better extreme.

    A local layer adds its within-client variance, and a shared layer its between-client variance
    (Propositions 2 and 3).
    """
    local = [variances[layer] for layer in candidate.local if layer in variances]
    shared = [variances[layer] for layer in candidate.shared if layer in variances]
    errors = [layer.within_client for layer in local]
    errors += [max(0.0, layer.between_client) for layer in shared]
    whole = variances["all"]
    return sum(errors) / max(min(whole.within_client, max(0.0, whole.between_client)), 1e-12)


def _equally_good(stages: Sequence[Stage], tolerance: float) -> list[str]:
    """The best candidate of the last stage, then those that are equally good.

    Candidates that the first stage ended have trained too briefly to be compared. Sharing nothing
    counts as best only if it is clearly ahead: a short training shows at once what local parts
    gain, and joint training gains later. What it is clearly ahead of is not equally good.
    """
    best, *others = stages[-1].ranking()
    if best == NOTHING and others and find_lead(stages, best, others[0]).low <= 0:
        best = others[0]
    equally_good = [best]
    for name in stages[min(1, len(stages) - 1)].ranking():
        if name in (best, NOTHING) or _is_behind_nothing(stages, name):
            continue
        lead = find_lead(stages, best, name)
        if lead.low <= 0 and lead.mean <= tolerance * stages[-1].unit:
            equally_good.append(name)
    return equally_good


def _is_behind_nothing(stages: Sequence[Stage], name: str) -> bool:
    """Whether sharing nothing is clearly ahead of a candidate."""
    if NOTHING not in stages[0].names:
        return False
    return find_lead(stages, NOTHING, name).low > 0


def choose_candidate(
    equally_good: Sequence[str],
    sent_fraction: Mapping[str, float],
    predicted_error: Mapping[str, float],
    prefer: str,
) -> str:
    """The candidate that is chosen among equally good ones, the best of which comes first.

    For accuracy it is the one that shares most. For bytes it is the best, or one that sends at
    most half as much as the best: of several, the one with the least predicted error.
    """
    if prefer == "accuracy":
        return max(equally_good, key=lambda name: sent_fraction[name])
    limit = sent_fraction[equally_good[0]] / 2
    cheaper = [name for name in equally_good if sent_fraction[name] <= limit]
    return min(cheaper or equally_good[:1], key=lambda name: predicted_error[name])


def _figures(metric: Metric, candidate: Candidate, stages: Sequence[Stage]) -> dict[int, float]:
    """A candidate's mean over clients after each stage that it was in."""
    figures: dict[int, float] = {}
    for stage in stages:
        if candidate.name in stage.names:
            mean = float(np.nanmean(stage.scores_of(candidate.name)))
            figures[stage.rounds] = _sign(metric) * mean
    return figures
