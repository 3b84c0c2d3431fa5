"""How much of a network to share: devices' variances say what to expect, a short race of splits on validation data decides."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import NamedTuple

import numpy as np
from torch import nn

from glocal.algorithms.contract import Algorithm, Update
from glocal.core import trees
from glocal.core.data import Holdings
from glocal.core.errors import InputError
from glocal.core.files import Json
from glocal.core.modules import params_of
from glocal.core.sampling import Integers, Plan, in_batches, noise_key, stream
from glocal.core.split import first_names, layers_of
from glocal.core.store import PrivateRows, State
from glocal.core.trees import Params
from glocal.datasets.federated import Federation
from glocal.engines import OverDevices, Task
from glocal.evaluate import Credit, Evaluation, local_tests, matching
from glocal.evaluate.theory import Estimate
from glocal.federate.fitting import Case, Options, evaluation_of, placed, require_fit
from glocal.federate.rounds import Seat, begin, simulate_seeds
from glocal.personalize.advisor.budget import Budget, Spent
from glocal.personalize.advisor.candidates import NOTHING, Candidate, candidates
from glocal.personalize.advisor.groups import Group, difference, groups
from glocal.personalize.advisor.halving import Course, Lane, Rung, halved, run, start
from glocal.personalize.advisor.variances import Variance, variances
from glocal.wire import Ledger, admit

Tell = Callable[[str], None]
PREFERENCES = ("accuracy", "bytes")
_FOR_THE_START, _FOR_THE_RACE = 0.4, 0.5  # shares of a budget
_FEWEST_RACERS, _FEWEST_EXAMPLES = 3, 8
_HALVES = 2


@dataclass(frozen=True)
class Counsel:
    """How advice is found: who races and for how long, what they are judged on, and what it may cost.

    A part `held_out` of a racing device's examples, its validation data among them, is trained on by nobody. In each of `rungs` all
    splits that are left go on for so many rounds. A split within `tolerance` of the best, and not clearly below it, is as good. If
    you `prefer` accuracy, the one of these that shares most is chosen, for what is learnt together shows later than a race ends; if
    bytes, one that sends at most half as much as the best, where there are several that which variances expect to err least.
    """

    racers: int = 24
    rungs: tuple[int, ...] = (1, 3, 8)
    held_out: float = 0.25
    tolerance: float = 0.01
    most: int = 12
    prefer: str = "accuracy"
    budget: Budget = Budget()

    def __post_init__(self) -> None:
        if self.racers < _FEWEST_RACERS or not self.rungs or min(self.rungs) < 1 or self.most < _HALVES:
            raise InputError(
                f"advise: {self.racers} racers, rungs of {list(self.rungs)} rounds and {self.most} splits were asked for; "
                f"at least {_FEWEST_RACERS}, one rung of a round, and {_HALVES} are needed"
            )
        if self.prefer not in PREFERENCES:
            raise InputError(f"advise: prefer is '{self.prefer}'; it must be {' or '.join(PREFERENCES)}")
        if not 0 < self.held_out < 1 or not self.tolerance >= 0:
            raise InputError(
                f"advise: held_out is {self.held_out} and tolerance {self.tolerance}; a share and a difference were expected"
            )


class Row(NamedTuple):
    """What became of a split: what it sends, what variances predict of it, accuracy by rounds, and how far from the choice."""

    candidate: Candidate
    sends: float
    predicted: float
    accuracy: dict[int, float]
    difference: Estimate | None


@dataclass(frozen=True)
class Advice:
    """What to share, why, how sure that is, and what it cost to find out."""

    choice: Candidate
    raced: bool
    rows: tuple[Row, ...]
    alike: tuple[str, ...]
    variances: dict[str, Variance]
    by_variances: str
    groups: tuple[Group, ...]
    racers: tuple[int, ...]
    rounds: int
    finished: bool
    spent: Spent
    seconds: float

    def as_dict(self) -> Json:
        """For JSON: the same whenever the same is asked, and so without the seconds it took."""
        return {
            "choice": {"name": self.choice.name, "shared": list(self.choice.shared), "local": list(self.choice.local)},
            "by": "race" if self.raced else "variances",
            "as_good": list(self.alike),
            "by_variances": self.by_variances,
            "finished": self.finished,
            "race": [_row_as_dict(row) for row in self.rows],
            "variances": {layer: found._asdict() for layer, found in self.variances.items()},
            "groups": [{**group._asdict(), "gain": group.gain._asdict()} for group in self.groups],
            "racers": list(self.racers),
            "cost": {
                "rounds": self.spent.rounds,
                "updates": self.spent.updates,
                "ledger": self.spent.ledger.as_dict(),
            },
        }


def _row_as_dict(row: Row) -> Json:
    return {
        "split": row.candidate.name,
        "shared": list(row.candidate.shared),
        "sends": row.sends,
        "predicted": row.predicted,
        "accuracy": row.accuracy,
        "difference": row.difference and row.difference._asdict(),
    }


class Hall(NamedTuple):
    """Where all of it takes place: what is trained, by whom, on what, and by what it is judged."""

    algorithm: Algorithm
    model: nn.Module
    plan: Plan
    params: Params
    train: Holdings
    judges: tuple[Holdings, Holdings]
    racers: Integers
    over: OverDevices[Update]
    evaluation: Evaluation
    how: Counsel
    tell: Tell


def unheard(words: str) -> None:
    """Tell nobody."""


def advise(
    algorithm: Algorithm,
    model: nn.Module,
    federation: Federation,
    plan: Plan,
    *,
    how: Counsel | None = None,
    options: Options | None = None,
    tell: Tell = unheard,
    credit: Credit = matching,
) -> Advice:
    """How much of a model devices should share: `plan` is of the rounds of FedAvg, the algorithm, that come before the race.

    `credit` says what a guess is worth.

    No raw data, labels or counts of classes leave a device: only models or shared parts of them, and accuracies, do.
    """
    how, options = how or Counsel(), options or Options()
    if not algorithm.init(params_of(model))[0] or algorithm.init(params_of(model))[1]:
        raise InputError(f"advise: {algorithm.name} keeps something to itself; begin with one that shares all, such as fedavg")
    case = Case(algorithm, model, plan, (plan.seed,), (params_of(model),), (federation,), (Ledger(),), credit=credit)
    hall = _prepared(case, how, options, tell)
    try:
        return _advice(hall)
    finally:
        hall.over.close()
        hall.evaluation.close()


def _prepared(case: Case, how: Counsel, options: Options, tell: Tell) -> Hall:
    fed = case.federations[0]
    require_fit(case, fed, options)
    case = placed(case, options)
    fed, plan = case.federations[0], case.plan
    racers = _racers(fed, plan, _affordable(case, how))
    train, judges = _set_aside(fed, racers, plan.seed, how.held_out)
    calls = plan.rounds + sum(how.rungs)
    over = OverDevices(case.algorithm.client_update, engine=options.how(), calls=calls)
    whole = case.algorithm._replace(personal=lambda shared, private: private)
    evaluation = evaluation_of(replace(case, algorithm=whole), options)
    return Hall(case.algorithm, case.model, plan, case.params[0], train, judges, racers, over, evaluation, how, tell)


def _affordable(case: Case, how: Counsel) -> int:
    """How many devices may race within the budget's bytes, were those splits to go on that send most."""
    sent = sorted(trees.nbytes(each.split.take_shared(case.params[0])) for each in candidates(case.model, most=how.most))
    total = 0
    for rounds in how.rungs:
        total += (2 * rounds + 1) * sum(sent)
        sent = sent[len(sent) // 2 :]
    limit = how.budget.bytes
    return how.racers if limit is None else max(_FEWEST_RACERS, min(how.racers, int(_FOR_THE_RACE * limit / total)))


def _racers(fed: Federation, plan: Plan, wanted: int) -> Integers:
    """Devices drawn to race, of those with some examples."""
    able = np.flatnonzero(fed.train.sizes >= _FEWEST_EXAMPLES)
    if len(able) < _FEWEST_RACERS:
        enough = f"{_FEWEST_EXAMPLES} examples or more to train on"
        raise InputError(f"advise: {len(able)} devices have {enough}; at least {_FEWEST_RACERS} have to race")
    return np.sort(stream(plan.seed, "racers").choice(able, min(wanted, len(able)), replace=False))


def _set_aside(fed: Federation, racers: Integers, seed: int, share: float) -> tuple[Holdings, tuple[Holdings, Holdings]]:
    """What is trained on, and two halves of what racing devices are judged on: validation data, and as much more as is missing."""
    train, judged = list(fed.train.rows), [np.zeros(0, dtype=np.int64)] * fed.devices
    for device in racers.tolist():
        own, known = train[device], fed.val.rows[device] if fed.val.examples is fed.train.examples else train[device][:0]
        wanted = max(_HALVES, round(share * (len(own) + len(known))))
        missing = max(0, min(wanted - len(known), len(own) - _HALVES))  # to be trained on in two halves, some must be left
        order = stream(seed, "advice", device).permutation(len(own))
        train[device] = np.sort(own[order[missing:]])
        judged[device] = np.concatenate([known, own[order[:missing]]])[
            stream(seed, "judges", device).permutation(len(known) + missing)
        ]
    halves = [tuple(np.sort(rows[half::_HALVES]) for rows in judged) for half in range(_HALVES)]
    return replace(fed.train, rows=tuple(train)), (replace(fed.train, rows=halves[0]), replace(fed.train, rows=halves[1]))


def _advice(hall: Hall) -> Advice:
    warm, spent = _warmed(hall)
    hall.tell("two updates of every racing device")
    found, spent = _varied(hall, warm, spent)
    rivals = candidates(hall.model, most=hall.how.most)
    rungs, spent, finished = _raced(hall, rivals, warm, spent)
    predicted = {rival.name: _predicted(rival, found) for rival in rivals}
    expected = min(predicted, key=lambda name: predicted[name])
    alike = _as_good(rungs, hall.how.tolerance) if rungs else [expected]
    sends = {rival.name: rival.sends(warm) for rival in rivals}
    choice = next(rival for rival in rivals if rival.name == chosen(alike, sends, predicted, hall.how.prefer))
    rows = [_row(rival, rungs, choice.name, sends[rival.name], predicted[rival.name]) for rival in rivals]
    return Advice(
        choice=choice,
        raced=bool(rungs),
        rows=tuple(rows),
        alike=tuple(alike),
        variances=found,
        by_variances=expected,
        groups=tuple(groups(rungs, choice.name, hall.racers) if rungs else []),
        racers=tuple(hall.racers.tolist()),
        rounds=rungs[-1].rounds if rungs else 0,
        finished=finished,
        spent=spent,
        seconds=spent.seconds,
    )


def _warmed(hall: Hall) -> tuple[Params, Spent]:
    """A model off its random start, and what that cost; a budget may end it early, with so much left as variances send."""
    spent, plan, budget = Spent.nothing(), hall.plan, hall.how.budget
    shared, model = hall.params, trees.nbytes(hall.params)
    reserve = (1 + _HALVES) * len(hall.racers) * model
    least = 2 * plan.cohort * model + reserve
    if budget.bytes is not None and budget.bytes < least:
        what = f"a round of FedAvg and two updates of {len(hall.racers)} devices send {least:,} bytes at least"
        raise InputError(f"advise: the budget is {budget.bytes:,} bytes; {what}; raise it, or have a smaller cohort")
    for moment in simulate_seeds(hall.algorithm, [Seat(plan, hall.train, begin(hall.algorithm, hall.params))], hall.over):
        state, report = moment[0]
        shared = state.shared
        spent = spent.and_also(report.traffic, updates=len(report.cohort), rounds=1)
        hall.tell(f"FedAvg, round {spent.rounds} of {plan.rounds}")
        per_round = spent.ledger.total.bytes // spent.rounds
        if not (spent.within(budget, share=_FOR_THE_START, more=per_round) and spent.within(budget, more=per_round + reserve)):
            break
    return shared, spent


def _varied(hall: Hall, warm: Params, spent: Spent) -> tuple[dict[str, Variance], Spent]:
    """Variances of the racing devices' updates, layer by layer; every device sends two models."""
    number, tasks = hall.plan.last_round, []
    for half in range(_HALVES):
        for device in hall.racers.tolist():
            rows = stream(hall.plan.seed, "halves", device).permutation(hall.train.rows[device])
            order = in_batches(rows[: len(rows) // _HALVES * _HALVES][half::_HALVES], hall.plan.batch)
            tasks.append(Task(warm, {}, order, noise_key(hall.plan, number, device)))
    uploads = admit(hall.over(tasks, hall.train.examples, number).stacked().upload, warm)
    traffic = Ledger().after_round(warm, uploads, cohort=len(hall.racers), devices=hall.train.devices)
    moved = {name: uploads[name] - warm[name] for name, tensor in hall.model.named_parameters() if tensor.requires_grad}
    count = len(hall.racers)
    first, second = ({name: tensor[rows] for name, tensor in moved.items()} for rows in (slice(count), slice(count, None)))
    found = variances(first, second, _tensors_of_layers(hall.model, moved))
    if not isfinite(found["all"].data + found["all"].device):
        raise InputError("advise: devices' updates are no finite numbers, for training diverged; lower optimiser.rate")
    return found, spent.and_also(traffic, updates=count, rounds=1)


def _tensors_of_layers(model: nn.Module, moved: Params) -> dict[str, list[str]]:
    """The tensors that move, by layer; tied ones belong to the first that has them."""
    firsts, names = first_names(model), {}
    for layer in layers_of(model):
        own = [f"{layer}.{name}".lstrip(".") for name, _ in model.get_submodule(layer).named_parameters(recurse=False)]
        names[layer] = [firsts[name] for name in own if firsts[name] == name and name in moved]
    return {layer: own for layer, own in names.items() if own}


def _raced(hall: Hall, rivals: Sequence[Candidate], warm: Params, spent: Spent) -> tuple[list[Rung], Spent, bool]:
    """Rung after rung until one split is left or the budget is spent; whether it came to its end."""
    course = Course(hall.plan, hall.train, hall.racers, hall.over)
    lanes, rungs, done = start(rivals, warm, len(hall.racers)), list[Rung](), 0
    for rounds in hall.how.rungs:
        if rungs:
            lanes = halved(lanes, rungs[-1])
        if len(lanes) == 1:
            break
        if not _affords(hall, lanes, rounds, spent):
            return rungs, spent, False
        first = hall.plan.last_round + done
        for moved, ledger in run(course, lanes, range(first, first + rounds)):
            lanes = moved
            spent = spent.and_also(ledger, updates=len(lanes) * len(hall.racers), rounds=len(lanes))
            done += 1
            hall.tell(f"{len(lanes)} splits on {len(hall.racers)} devices, round {done} of {sum(hall.how.rungs)}")
        rung, traffic = _judged(hall, lanes, done)
        rungs, spent = [*rungs, rung], spent.and_also(traffic)
    return rungs, spent, True


def _affords(hall: Hall, lanes: Sequence[Lane], rounds: int, spent: Spent) -> bool:
    """Whether the next rung fits into the budget: bytes are known, seconds guessed from those so far."""
    budget, updates = hall.how.budget, rounds * len(lanes) * len(hall.racers)
    in_time = budget.seconds is None or spent.seconds * (1 + updates / max(1, spent.updates)) <= budget.seconds
    return in_time and spent.within(budget, more=sum(lane.bytes_of(rounds) for lane in lanes))


def _judged(hall: Hall, lanes: Sequence[Lane], rounds: int) -> tuple[Rung, Ledger]:
    """Every device's accuracy in every lane on both halves of what it is judged on; the shared part has to reach it for that."""
    devices, traffic = hall.racers.tolist(), Ledger()
    states = [State({}, PrivateRows(lane.models[0], dict(zip(devices, lane.models, strict=True)))) for lane in lanes]
    for lane in lanes:
        traffic = traffic.after_evaluation(lane.shared, len(devices))
    asked = [judge for judge in hall.judges for _ in lanes]
    found = np.array(local_tests(hall.evaluation, states * _HALVES, asked))[:, hall.racers].reshape(_HALVES, len(lanes), -1)
    sizes = np.array([judge.sizes[hall.racers] for judge in hall.judges], dtype=np.float64)
    return Rung(rounds, tuple(lane.candidate.name for lane in lanes), found, sizes), traffic


def _predicted(candidate: Candidate, found: dict[str, Variance]) -> float:
    """The error that the linear theory expects, over that of the better end (Propositions 2 and 3).

    A layer pays its data variance if it is local, and its device variance if it is shared.
    """
    pays = [found[layer].data for layer in candidate.local if layer in found]
    pays += [max(0.0, found[layer].device) for layer in candidate.shared if layer in found]
    return sum(pays) / max(min(found["all"].data, max(0.0, found["all"].device)), 1e-12)


def _as_good(rungs: Sequence[Rung], tolerance: float) -> list[str]:
    """The best of the last rung, and those that were neither clearly nor noticeably below it when they raced last.

    Who fell out at the first rung has not raced long enough. To share nothing has to be clearly ahead: a short race shows at once
    what local parts gain, and what is learnt together comes later. What it is clearly ahead of is not as good.
    """
    best, *others = rungs[-1].ranking()
    if best == NOTHING and others and difference(rungs, best, others[0]).low <= 0:
        best = others[0]
    known = rungs[min(1, len(rungs) - 1)].ranking()
    beaten = {name for name in known if NOTHING in rungs[0].names and difference(rungs, NOTHING, name).low > 0}
    behind = {name: difference(rungs, best, name) for name in known if name not in (best, NOTHING, *beaten)}
    return [best, *(name for name, gap in behind.items() if gap.low <= 0 and gap.mean <= tolerance)]


def chosen(alike: Sequence[str], sends: Mapping[str, float], predicted: Mapping[str, float], prefer: str) -> str:
    """For accuracy the one that shares most; for bytes the first, or, of those that send half as much, what variances expect."""
    if prefer == "accuracy":
        return max(alike, key=lambda name: sends[name])
    cheaper = [name for name in alike if sends[name] <= sends[alike[0]] / 2]
    return min(cheaper or alike[:1], key=lambda name: predicted[name])


def _row(rival: Candidate, rungs: Sequence[Rung], choice: str, sends: float, predicted: float) -> Row:
    accuracy = {rung.rounds: float(rung.of(rival.name).mean()) for rung in rungs if rival.name in rung.names}
    return Row(rival, sends, predicted, accuracy, difference(rungs, rival.name, choice) if rungs else None)
