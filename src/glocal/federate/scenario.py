"""Clients that join, leave and drift: training in chapters, in each of which nothing changes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from glocal.algorithms.contract import Algorithm, Update
from glocal.core import trees
from glocal.core.data import ClientData
from glocal.core.errors import InputError
from glocal.core.files import Json, lock_folder, read_rows, write_json
from glocal.core.modules import params_of
from glocal.core.sampling import Availability, IntArray, Plan, sample_available
from glocal.core.store import State
from glocal.core.task import Task
from glocal.datasets.federated import FederatedData
from glocal.engines import Executor
from glocal.evaluate import Evaluator, local_tests
from glocal.evaluate.forgetting import AccuracyHistory
from glocal.evaluate.local_test import Floats
from glocal.federate.checkpoint import Checkpoint, Progress
from glocal.federate.fitting import (
    Case,
    CheckpointPolicy,
    Moment,
    Options,
    Round,
    build_evaluation,
    build_result,
    checkpoint_rounds,
    complete_round,
    fingerprint,
    move_data_to_device,
    require_trainable,
    resolve_engine,
    resume_from_checkpoint,
    start_or_resume,
)
from glocal.federate.result import SeedResult, save_models
from glocal.federate.rounds import Seat, simulate_seeds
from glocal.wire import Ledger


@dataclass(frozen=True)
class Chapter:
    """Rounds from `first_round` on with the same available clients and the same data.

    There is one federation per seed. A client that is absent keeps its test data, so that its
    accuracy can be measured meanwhile.
    """

    first_round: int
    availability: Availability
    federations: tuple[FederatedData, ...]

    def asked(self) -> set[int]:
        """The clients that can be sampled, those that leave before they answer included."""
        return {*self.availability.available.tolist(), *self.availability.always.tolist()}

    def here(self) -> set[int]:
        """The clients that are present at the end of a round."""
        return self.asked() - {*self.availability.dropouts.tolist()}


@dataclass(frozen=True)
class Scenario:
    """Chapters in order, and named groups of clients, each evaluated from its first round on."""

    chapters: tuple[Chapter, ...]
    groups: Mapping[str, tuple[int, ...]]

    def __post_init__(self) -> None:
        starts = [chapter.first_round for chapter in self.chapters]
        if (
            not starts
            or starts[0] != 0
            or any(after <= before for before, after in pairwise(starts))
        ):
            raise InputError(
                f"scenario: its chapters begin in rounds {starts}; "
                "begin with 0, each later than the one before"
            )
        first = self.chapters[0].federations
        if any(len(chapter.federations) != len(first) for chapter in self.chapters):
            raise InputError(
                "scenario: its chapters have different numbers of federations; "
                "give every chapter one per seed"
            )
        federations = [fed for chapter in self.chapters for fed in chapter.federations]
        num_clients = {federation.num_clients for federation in federations}
        if len(num_clients) != 1:
            raise InputError(
                f"scenario: its federations have {sorted(num_clients)} clients; "
                "give a client that is absent no rows"
            )
        _require_groups(self.groups, num_clients.pop())
        _require_one_store(self.chapters)

    def at(self, round_index: int) -> int:
        """The number of the chapter of a round."""
        starts = [chapter.first_round for chapter in self.chapters]
        return int(np.searchsorted(starts, round_index, side="right")) - 1

    def stretches(self, plan: Plan) -> Iterator[tuple[Chapter, Plan]]:
        """Every chapter of a plan's rounds, with the part of the plan in it."""
        ends = [*(chapter.first_round for chapter in self.chapters[1:]), plan.total_rounds]
        for chapter, end in zip(self.chapters, ends, strict=True):
            first, last = max(chapter.first_round, plan.first_round), min(end, plan.total_rounds)
            if first < last:
                yield chapter, replace(plan, first_round=first, rounds=last - first)

    def met(self, round_index: int) -> set[int]:
        """The clients that were available in a round or before it."""
        return set[int]().union(
            *(chapter.asked() for chapter in self.chapters[: self.at(round_index) + 1])
        )

    def looks(self, plan: Plan, every: int) -> set[int]:
        """The rounds with an evaluation: first and last of each chapter, and each `every`-th."""
        edges = set[int]()
        for _, part in self.stretches(plan):
            edges |= {part.first_round, part.total_rounds - 1}
        return edges | {
            plan.first_round + done - 1 for done in range(every, plan.rounds + 1, every)
        }

    def as_dict(self) -> Json:
        """For JSON: the first rounds and the availability of all chapters, and the groups."""
        availability = []
        for chapter in self.chapters:
            clients = chapter.availability._asdict()
            availability.append({name: numbers.tolist() for name, numbers in clients.items()})
        rounds = [chapter.first_round for chapter in self.chapters]
        groups = {name: list(clients) for name, clients in self.groups.items()}
        return {"rounds": rounds, "availability": availability, "groups": groups}


def _require_groups(groups: Mapping[str, Sequence[int]], clients: int) -> None:
    for name, members in groups.items():
        wrong = [client for client in members if not 0 <= client < clients]
        if wrong or not members:
            fault = f"has client {wrong[0]}" if wrong else "has no client"
            raise InputError(f"scenario: the group '{name}' {fault}; name some of 0..{clients - 1}")


def _require_one_store(chapters: Sequence[Chapter]) -> None:
    stores = {
        id(federation.train.examples.x)
        for chapter in chapters
        for federation in chapter.federations
    }
    if len(stores) > 1:
        raise InputError(
            "scenario: its chapters have different stores of examples; "
            "put all examples into one, and give clients other rows"
        )


@dataclass(frozen=True)
class Story:
    """An experiment with a scenario; `case.federations` are those of the first chapter."""

    case: Case
    scenario: Scenario
    options: Options

    def require(self) -> None:
        """Refuse what would fail later."""
        if self.options.select == "best":
            raise InputError(
                "scenario: select = 'best' compares rounds with different clients and data; "
                "use 'last'"
            )
        seen: set[int] = set()
        for chapter, _ in self.scenario.stretches(self.case.plan):
            for federation in chapter.federations:
                _require_rows(chapter, federation)
                if id(federation) not in seen:
                    require_trainable(
                        replace(self.case, total=federation.num_clients),
                        _without_the_empty(federation),
                        self.options,
                    )
                    seen.add(id(federation))

    @cached_property
    def looks(self) -> set[int]:
        """The rounds with an evaluation."""
        return self.scenario.looks(self.case.plan, self.options.validate_every)

    def met(self, round_index: int) -> set[int]:
        """The clients that were available in this experiment until then.

        Clients that left before a warm start do not count.
        """
        first = self.scenario.at(self.case.plan.first_round)
        chapters = self.scenario.chapters[first : self.scenario.at(round_index) + 1]
        return set[int]().union(*(chapter.asked() for chapter in chapters))

    def move_to_device(self) -> "Story":
        """The same with data and weights on torch's device."""
        chapters, device = self.scenario.chapters, self.options.torch_device()
        federations = [fed for chapter in chapters for fed in chapter.federations]
        moved = move_data_to_device(federations, device)
        there, start = [], 0
        for chapter in chapters:
            stop = start + len(chapter.federations)
            there.append(replace(chapter, federations=moved[start:stop]))
            start = stop
        params = tuple(trees.to(tree, device) for tree in self.case.params)
        case = replace(self.case, params=params, federations=there[0].federations)
        return replace(self, case=case, scenario=replace(self.scenario, chapters=tuple(there)))

    def fingerprint(self) -> Json:
        """What has to be the same when a run is resumed."""
        federations = tuple(
            fed for chapter in self.scenario.chapters for fed in chapter.federations
        )
        about = {**self.case.about, "scenario": self.scenario.as_dict()}
        return fingerprint(replace(self.case, federations=federations, about=about), self.options)

    def start_or_resume(self, folder: Path | None) -> Progress:
        """The progress in the folder's checkpoint; without a checkpoint, that of a fresh start."""
        fresh = start_or_resume(self.case, self.options, None)
        ledgers = [_started(self, place, state) for place, state in enumerate(fresh.states)]
        fresh = fresh._replace(ledgers=ledgers)
        return resume_from_checkpoint(
            fresh, self.options, Checkpoint(folder, self.fingerprint()) if folder else None
        )

    def train(self, progress: Progress, folder: Path | None) -> Iterator[Moment]:
        """Rounds one by one, through all chapters with one state."""
        case, options = self.case, self.options
        checkpoint = Checkpoint(folder, self.fingerprint()) if folder else None
        resolved = resolve_engine(options, checkpoint, "rounds", progress.choices[0])
        executor = Executor(
            case.algorithm.client_update,
            engine=options.engine_config(),
            num_calls=case.plan.rounds,
            **resolved._asdict(),
        )
        evaluation = build_evaluation(case, options, checkpoint)

        def advance(before: Progress, round_: Round) -> tuple[Progress, list[Json]]:
            before = before._replace(choices=(executor.execution_plan,))
            return _advanced(self, evaluation, before, round_)

        try:
            rounds = _rounds(self, executor, progress)
            yield from checkpoint_rounds(
                rounds, advance, progress, CheckpointPolicy(options, case.plan.rounds, checkpoint)
            )
        finally:
            executor.close()
            evaluation.close()

    def finish(self, progress: Progress, folder: Path | None) -> list[SeedResult]:
        """The final tests of the clients that are present at the end.

        With a folder, results and models are saved there.
        """
        checkpoint = Checkpoint(folder, self.fingerprint()) if folder else None
        results, options = _tested_at_the_end(self, progress, checkpoint), self.options
        if folder:
            for result in results if options.save == "everything" else ():
                save_models(result, folder / "models" / f"seed-{result.plan.seed}")
            rows = read_rows(folder / "rows.jsonl")
            tables = [
                {**result.as_dict(), "groups": _summaries(rows, self.scenario, result.plan.seed)}
                for result in results
            ]
            write_json(folder / "result.json", tables)
            if checkpoint and options.save == "metrics":
                checkpoint.drop_tensors(progress)
        return results


class Told(NamedTuple):
    """The result of a scenario, and the accuracy of each group over its rounds."""

    result: SeedResult
    courses: dict[str, AccuracyHistory]


def fit_scenario(
    algorithm: Algorithm,
    task: Task,
    scenario: Scenario,
    plan: Plan,
    *,
    options: Options | None = None,
    folder: Path | str | None = None,
) -> Told:
    """Train and test one federation through all chapters.

    With a folder, everything is saved there, and the same call resumes a run that was stopped.
    """
    federations, home = scenario.chapters[0].federations, Path(folder) if folder else None
    if len(federations) != 1:
        raise InputError(
            f"scenario: its chapters have {len(federations)} federations; "
            "give one, or run a study with seeds"
        )
    case = Case(
        algorithm,
        task,
        plan,
        (plan.seed,),
        (params_of(task.model),),
        federations,
        (Ledger(),),
    )
    story = Story(case, scenario, options or Options())
    story.require()
    story = story.move_to_device()
    with lock_folder(home):
        progress, rows = story.start_or_resume(home), read_rows(home / "rows.jsonl") if home else []
        for moment in story.train(progress, home):
            progress = moment.progress
            rows += moment.rows
        result = story.finish(progress, home)[0]
    return Told(result, {group: group_history(rows, group, plan.seed) for group in scenario.groups})


def group_history(rows: Sequence[Json], group: str, seed: int) -> AccuracyHistory:
    """The accuracy of a group over the rounds of a run, from its rows."""
    history = AccuracyHistory([], [], [])
    for row in rows:
        if row["seed"] != seed or not row["groups"]:
            continue
        evaluation = row["groups"][group]
        if evaluation["accuracy"] is not None:
            history.rounds.append(row["round"] + 1)
            history.accuracies.append(evaluation["accuracy"])
            history.present.append(evaluation["present"])
    return history


def _summaries(rows: Sequence[Json], scenario: Scenario, seed: int) -> Json:
    """A summary of each group's accuracy, for JSON."""
    summaries = {group: group_history(rows, group, seed).summary() for group in scenario.groups}
    return {group: summary and summary._asdict() for group, summary in summaries.items()}


def _rounds(story: Story, executor: Executor[Update], progress: Progress) -> Iterator[Round]:
    """The remaining rounds, chapter by chapter; each chapter goes on with the state before it."""
    case, states = story.case, progress.states
    following = case.plan.first_round + progress.done
    for chapter, plan in story.scenario.stretches(case.plan):
        if plan.total_rounds <= following:
            continue
        there = zip(case.seeds, chapter.federations, states, strict=True)
        seats = [
            Seat(replace(plan, seed=seed), fed.train, state, chapter.availability)
            for seed, fed, state in there
        ]
        for round_ in simulate_seeds(
            case.algorithm, seats, executor, done=max(0, following - plan.first_round)
        ):
            states = [state for state, _ in round_]
            yield round_


def _advanced(
    story: Story, evaluation: Evaluator, before: Progress, round_: Round
) -> tuple[Progress, list[Json]]:
    """The progress after one round, and its rows.

    It does what `fit` does with the clients that are present, and evaluates all groups in some
    rounds.
    """
    scenario, index = story.scenario, round_[0][1].round_index
    chapter = scenario.chapters[scenario.at(index)]
    here = tuple(_held_by(federation, chapter.here()) for federation in chapter.federations)
    case = replace(story.case, federations=here)
    progress, rows = complete_round(case, story.options, evaluation, (before, round_))
    progress = progress._replace(ledgers=_with_newcomers(story, index, progress))
    if index not in story.looks:
        return progress, [{**row, "groups": None} for row in rows]
    validated = progress.done % story.options.validate_every == 0
    evaluated = _looked(story, evaluation, progress.states, index)
    ledgers, with_groups = [], []
    for place, row in enumerate(rows):
        ledger, state = progress.ledgers[place], progress.states[place]
        ledger = _after_look(ledger, state, here[place], validated=validated)
        traffic = {"bytes": ledger.total.bytes, "paper_parameters": ledger.paper.parameters}
        ledgers.append(ledger)
        with_groups.append({**row, **traffic, "groups": evaluated[place]})
    return progress._replace(ledgers=ledgers), with_groups


def _after_look(ledger: Ledger, state: State, here: FederatedData, *, validated: bool) -> Ledger:
    """An evaluation sends the shared tree to the present clients without a validation just now."""
    reached = (here.test.sizes > 0) & ~(validated & (here.val.sizes > 0))
    return ledger.add_evaluation(state.shared, int(np.count_nonzero(reached)))


def _started(story: Story, place: int, state: State) -> Ledger:
    """Traffic before the first round: a warm start's, and its local part to clients without it."""
    case, scenario, first = story.case, story.scenario, story.case.plan.first_round
    if not first:
        return case.spent[place]
    validated = bool(case.federations[place].val.sizes.any())
    new = scenario.chapters[scenario.at(first)].asked() - (
        scenario.met(first - 1) if validated else set()
    )
    return case.spent[place].add_warm_start(state.private.initial, len(new))


def _with_newcomers(story: Story, index: int, progress: Progress) -> list[Ledger]:
    """The ledgers with the local part of a warm start, sent to clients that join after it."""
    late = index > story.case.plan.first_round > 0
    new = story.scenario.met(index) - story.scenario.met(index - 1) if late else set()
    counted = zip(progress.ledgers, progress.states, strict=True)
    return [
        ledger.add_warm_start(state.private.initial, len(new)) if new else ledger
        for ledger, state in counted
    ]


def _looked(story: Story, evaluation: Evaluator, states: Sequence[State], index: int) -> list[Json]:
    """Each seed's Local Test by group, over all clients that were present so far.

    A client that left is tested with its own local part and the current shared one.
    """
    scenario, met = story.scenario, story.met(index)
    chapter = scenario.chapters[scenario.at(index)]
    data = [_of_those(federation.test, met) for federation in chapter.federations]
    here, by_seed = chapter.here(), []
    for accuracies in local_tests(evaluation, states, data):
        groups: Json = {}
        for name, members in scenario.groups.items():
            present = len(here.intersection(members))
            groups[name] = {"accuracy": _mean(accuracies, members), "present": present}
        by_seed.append(groups)
    return by_seed


def _mean(accuracies: Floats, members: Sequence[int]) -> float | None:
    known = accuracies[list(members)]
    known = known[~np.isnan(known)]
    return float(known.mean()) if len(known) else None


def _of_those(data: ClientData, clients: set[int]) -> ClientData:
    """The same data with rows for some clients only."""
    none = np.zeros(0, dtype=np.int64)
    rows_by_client = [own if client in clients else none for client, own in enumerate(data.rows)]
    return replace(data, rows=tuple(rows_by_client))


def _held_by(federation: FederatedData, clients: set[int]) -> FederatedData:
    """The federation with validation and test data of some clients only."""
    return replace(
        federation, val=_of_those(federation.val, clients), test=_of_those(federation.test, clients)
    )


def _tested_at_the_end(
    story: Story,
    progress: Progress,
    checkpoint: Checkpoint | None,
) -> list[SeedResult]:
    """Results of the clients that are present at the end; only these are in the ensemble."""
    case, scenario = story.case, story.scenario
    chapter = scenario.chapters[scenario.at(case.plan.total_rounds - 1)]
    here = chapter.here()
    case = replace(
        case, federations=tuple(_held_by(federation, here) for federation in chapter.federations)
    )
    present = progress._replace(states=[_with_rows_of(state, here) for state in progress.states])
    evaluation = build_evaluation(case, story.options, checkpoint)
    results = [
        build_result(case, story.options, evaluation, present, place=place)
        for place in range(len(case.seeds))
    ]
    evaluation.close()
    sampled = [participation(scenario, plan).tolist() for plan in case.plans()]
    whole = zip(results, progress.states, sampled, strict=True)
    return [replace(result, state=state, times_sampled=counts) for result, state, counts in whole]


def _with_rows_of(state: State, clients: set[int]) -> State:
    trained = {client: row for client, row in state.private.trained.items() if client in clients}
    return state._replace(private=replace(state.private, trained=trained))


def participation(scenario: Scenario, plan: Plan) -> IntArray:
    """How often each client took part, up to the end of a round (clients,)."""
    counts = np.zeros(scenario.chapters[0].federations[0].num_clients, dtype=np.int64)
    for chapter, part in scenario.stretches(plan):
        for round_index in range(part.first_round, part.total_rounds):
            sampled = sample_available(plan, chapter.availability, round_index)
            counts[np.setdiff1d(sampled, chapter.availability.dropouts)] += 1
    return counts


def _require_rows(chapter: Chapter, federation: FederatedData) -> None:
    """Refuse available clients that do not exist or have no training examples."""
    for client in sorted(chapter.asked()):
        if not 0 <= client < federation.num_clients:
            raise InputError(
                f"availability: there is no client {client}; "
                f"clients are 0..{federation.num_clients - 1}"
            )
        if not len(federation.train.rows[client]):
            raise InputError(
                f"availability: client {client} is available from round {chapter.first_round} on "
                "and has no training examples; let it be absent, or give it some"
            )


def _without_the_empty(federation: FederatedData) -> FederatedData:
    """The federation with only the clients that have training examples."""
    if federation.train.sizes.all():
        return federation
    some = np.flatnonzero(federation.train.sizes).tolist()
    subsets = []
    for part in (federation.train, federation.val, federation.test):
        subsets.append(replace(part, rows=tuple(part.rows[client] for client in some)))
    return FederatedData(*subsets)
