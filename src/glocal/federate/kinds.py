"""Kinds of client: each has its own network and inputs; all train one shared part together."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from glocal.algorithms import fedavg
from glocal.algorithms.contract import Algorithm, Update
from glocal.core import trees
from glocal.core.errors import InputError
from glocal.core.files import Json, lock_folder, write_json
from glocal.core.modules import params_of
from glocal.core.optimizers import Optimizer
from glocal.core.sampling import IntArray, Plan, client_key, sample_clients
from glocal.core.store import State
from glocal.core.task import Task
from glocal.core.trees import Params
from glocal.datasets.federated import FederatedData
from glocal.engines import ClientTask, EngineConfig, Executor, ResolvedEngine
from glocal.engines.protocol import to_device, unstack_rows
from glocal.evaluate import Evaluator
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
    fit_case,
    move_data_to_device,
    require_trainable,
    resolve_engine,
    resume_from_checkpoint,
    start_or_resume,
)
from glocal.federate.result import SeedResult, save_models
from glocal.federate.rounds import Part, RoundReport, rows_for_round
from glocal.wire import Ledger, admit

Cases = Mapping[str, Case]


@dataclass(frozen=True)
class Kind:
    """Clients with one architecture and one form of input.

    They start from `params`, or from the model's own weights; `spent` is the traffic behind these.
    """

    name: str
    algorithm: Algorithm
    task: Task
    federation: FederatedData
    params: Params | None = None
    spent: Ledger = Ledger()

    @property
    def model(self) -> nn.Module:
        """The task's model."""
        return self.task.model

    def start(self) -> Params:
        """The weights that its clients start from."""
        own = params_of(self.model)
        if self.params is not None and self.params.keys() != own.keys():
            differ = sorted(self.params.keys() ^ own.keys())
            raise InputError(
                f"kind '{self.name}': its params are of another model; "
                f"only one of the two has {differ}"
            )
        return own if self.params is None else self.params


def fit_kinds(
    kinds: Sequence[Kind],
    plan: Plan,
    *,
    options: Options | None = None,
    folder: Path | str | None = None,
) -> dict[str, SeedResult]:
    """Train all kinds together and test each.

    With a folder, everything is saved there, and the same call resumes a run that was stopped.
    Clients of a kind are numbered from 0 in its result. Where rounds are selected on validation
    data, each kind selects its own.
    """
    options, path = options or Options(), Path(folder) if folder else None
    cases = company(kinds, plan)
    _require_fit(cases, options)
    cases = _placed(cases, options)
    with lock_folder(path):
        progress = begin_kinds(cases, options, path)
        for moment in train_kinds(cases, options, progress, path):
            progress = moment.progress
        return _finished(cases, options, progress, path)


def warm_kinds(
    kinds: Sequence[Kind], optimizer: Optimizer, plan: Plan, *, options: Options | None = None
) -> list[Kind]:
    """FedAvg within each kind, as a warm start for LG-FedAvg as in the paper.

    It trains classification on whole models. The first kind trains the shared part. The others
    train their local parts under it, so that one shared part fits all kinds.
    """
    warm: list[Kind] = []
    for kind in _agreeing(kinds):
        params, objective, agreed = kind.start(), kind.task.objective(), {}
        if warm:
            agreed = trees.pick(warm[0].start(), kind.algorithm.init(params)[0])
            objective = objective._replace(trainable=objective.trainable - agreed.keys())
        start = {**params, **agreed}
        case = Case(
            fedavg(objective, optimizer),
            kind.task,
            plan,
            (plan.seed,),
            (start,),
            (kind.federation,),
            (kind.spent,),
        )
        with _named(kind.name):
            result = fit_case(case, options or Options())[0]
        # shared tensors are equal on all clients, and their average is only up to rounding
        warm.append(replace(kind, params={**result.state.shared, **agreed}, spent=result.ledger))
    return warm


def simulate_kinds(
    kinds: Sequence[Kind], plan: Plan, *, engine: EngineConfig | str = "auto"
) -> Iterator[dict[str, tuple[State, RoundReport]]]:
    """Train all kinds together, round by round; a kind's report numbers its clients from 0."""
    cases = company(kinds, plan)
    _require_fit(cases, Options())
    progress = begin_kinds(cases, Options())
    with _engines(cases, engine, [ResolvedEngine()] * len(cases)) as executors:
        for moment in _rounds(cases, executors, progress):
            yield dict(zip(cases, moment, strict=True))


def company(kinds: Sequence[Kind], plan: Plan) -> Cases:
    """An experiment for each kind; kinds that cannot train together are refused.

    The clients of a kind are numbered after those of the kinds before it.
    """
    kinds = _agreeing(kinds)
    params = [kind.start() for kind in kinds]
    ends = np.cumsum([kind.federation.num_clients for kind in kinds]).tolist()
    sample_clients(plan, ends[-1], plan.first_round)
    return {
        kind.name: Case(
            algorithm=kind.algorithm,
            task=kind.task,
            plan=plan,
            seeds=(plan.seed,),
            params=(tree,),
            federations=(kind.federation,),
            spent=(kind.spent,),
            first=end - kind.federation.num_clients,
            total=ends[-1],
        )
        for kind, tree, end in zip(kinds, params, ends, strict=True)
    }


def _require_fit(cases: Cases, options: Options) -> None:
    for name, case in cases.items():
        with _named(name):
            require_trainable(case, case.federations[0], options)


def _agreeing(kinds: Iterable[Kind]) -> list[Kind]:
    """The kinds, if they can train together: unique names, one algorithm, one shared part."""
    listed = list(kinds)
    _require_names([kind.name for kind in listed])
    _require_one_algorithm(listed)
    _require_one_shared_tree({kind.name: kind.algorithm.init(kind.start())[0] for kind in listed})
    return listed


def _require_names(names: Sequence[str]) -> None:
    if not names:
        raise InputError("kinds: none given; give at least one Kind")
    for name in names:
        if names.count(name) > 1:
            raise InputError(
                f"kinds: {names.count(name)} are called '{name}'; give each another name"
            )
        if (
            not isinstance(name, str)
            or not name.isprintable()
            or name in ("", "..")
            or Path(name).name != name
        ):
            raise InputError(
                f"kinds: '{name}' was given as a name, but a folder is named after it; "
                "use a plain word"
            )


def _require_one_algorithm(kinds: Sequence[Kind]) -> None:
    """All uploads are averaged at once, so all kinds need the same average."""
    first = kinds[0]
    for kind in kinds[1:]:
        given, expected = _way(kind.algorithm), _way(first.algorithm)
        if given != expected:
            raise InputError(
                f"kinds: '{kind.name}' runs {given}, but '{first.name}' runs {expected}; "
                "run one algorithm on all kinds"
            )


def _way(algorithm: Algorithm) -> str:
    """An algorithm's name, and the name of its aggregation."""
    aggregation = getattr(algorithm.aggregate, "__qualname__", "a function of its own")
    return f"{algorithm.name} (by {aggregation})"


def _require_one_shared_tree(shared: Mapping[str, Params]) -> None:
    """Shared parts need the same names, shapes and types; everything else may differ."""
    (first, expected), *others = shared.items()
    for name, given in others:
        forms = {
            tensor: (_form(expected, tensor), _form(given, tensor))
            for tensor in sorted({*expected, *given})
        }
        differ = [
            f"'{tensor}' is {there} and {here}"
            for tensor, (there, here) in forms.items()
            if there != here
        ]
        if differ:
            raise InputError(
                f"kinds: '{first}' and '{name}' do not share the same tensors: "
                f"{', '.join(differ)}; give both the same shared part, or keep what differs local"
            )


def _form(tree: Params, name: str) -> str:
    return f"{tuple(tree[name].shape)} {tree[name].dtype}" if name in tree else "absent"


@contextmanager
def _named(kind: str) -> Iterator[None]:
    """Name the kind in errors about its data or its training."""
    try:
        yield
    except InputError as error:
        raise type(error)(f"kind '{kind}': {error}") from error


def _placed(cases: Cases, options: Options) -> Cases:
    """The experiments on torch's device; kinds with one store of examples have one again."""
    device = options.torch_device()
    feds = move_data_to_device([case.federations[0] for case in cases.values()], device)
    placed = zip(cases.items(), feds, strict=True)
    return {
        name: replace(case, params=(trees.to(case.params[0], device),), federations=(fed,))
        for (name, case), fed in placed
    }


def begin_kinds(cases: Cases, options: Options, folder: Path | None = None) -> Progress:
    """The progress in the folder's checkpoint, or a fresh start.

    At a fresh start all clients have the first kind's shared part.
    """
    fresh = Progress.joined([start_or_resume(case, options, None) for case in cases.values()])
    states = [State(fresh.states[0].shared, state.private) for state in fresh.states]
    return resume_from_checkpoint(
        fresh._replace(states=states), options, _checkpoint(cases, options, folder)
    )


def _checkpoint(cases: Cases, options: Options, folder: Path | None) -> Checkpoint | None:
    """One checkpoint for all kinds; a run is resumed with the same kinds only."""
    if folder is None:
        return None
    prints = [fingerprint(case, options) for case in cases.values()]
    together: Json = {"kinds": list(cases), **prints[0]}
    for key in ("algorithm", "model", "data"):
        together[key] = [each[key] for each in prints]
    return Checkpoint(folder, together)


def train_kinds(
    cases: Cases, options: Options, progress: Progress, folder: Path | None = None
) -> Iterator[Moment]:
    """Rounds of experiments whose data are on torch's device, one by one.

    With a folder, rounds are saved there, also when Ctrl-C stops the run.
    """
    rounds = next(iter(cases.values())).plan.rounds
    checkpoint = _checkpoint(cases, options, folder)
    known = dict(zip(cases, progress.choices, strict=True))
    resolved = [
        resolve_engine(options, checkpoint, f"rounds {name}", known[name]) for name in cases
    ]
    named = cases.items()
    evaluations = [build_evaluation(case, options, checkpoint, kind=name) for name, case in named]
    with _engines(cases, options.engine_config(), resolved) as executors, ExitStack() as stack:
        for evaluation in evaluations:
            stack.callback(evaluation.close)

        def advance(before: Progress, round_: Round) -> tuple[Progress, list[Json]]:
            pairs = zip(executors, before.choices, strict=True)
            before = before._replace(
                choices=tuple(
                    executor.execution_plan or execution_plan for executor, execution_plan in pairs
                )
            )
            return _advanced(cases, options, evaluations, (before, round_))

        policy = CheckpointPolicy(options, rounds, checkpoint)
        yield from checkpoint_rounds(_rounds(cases, executors, progress), advance, progress, policy)


@contextmanager
def _engines(
    cases: Cases,
    engine: EngineConfig | str,
    resolved: Sequence[ResolvedEngine],
) -> Iterator[list[Executor[Update]]]:
    """The executor of each kind, closed at the end."""
    with ExitStack() as stack:
        executors = []
        for case, engine_of_kind in zip(cases.values(), resolved, strict=True):
            num_calls, update = case.plan.rounds, case.algorithm.client_update
            executor = Executor(
                update, engine=engine, num_calls=num_calls, **engine_of_kind._asdict()
            )
            executors.append(stack.enter_context(closing(executor)))
        yield executors


def _advanced(
    cases: Cases, options: Options, evaluations: Sequence[Evaluator], step: tuple[Progress, Round]
) -> tuple[Progress, list[Json]]:
    """The progress after one round of all kinds, with one row per kind."""
    (progress, round_), parts, rows = step, [], []
    for place, (name, case) in enumerate(cases.items()):
        with _named(name):
            part, [row] = complete_round(
                case, options, evaluations[place], (progress.of(place), [round_[place]])
            )
        parts.append(part)
        rows.append({"kind": name, **row})
    return Progress.joined(parts), rows


def _rounds(
    cases: Cases, executors: Sequence[Executor[Update]], progress: Progress
) -> Iterator[Round]:
    parties, states = list(cases.values()), progress.states
    plan = parties[0].plan
    for round_index in range(plan.first_round + progress.done, plan.total_rounds):
        moment = _round(parties, executors, states, round_index)
        states = [state for state, _ in moment]
        yield moment


def _round(
    cases: Sequence[Case],
    executors: Sequence[Executor[Update]],
    states: Sequence[State],
    round_index: int,
) -> Round:
    """One round of clients sampled over all kinds.

    Each kind trains in a batch of its own. All uploads are averaged at once, in client order.
    """
    everyone = sample_clients(
        cases[0].plan, sum(case.federations[0].num_clients for case in cases), round_index
    )
    sampled_by_kind = [_own(case, everyone) for case in cases]
    kinds = list(zip(cases, executors, states, sampled_by_kind, strict=True))
    parts = [
        _trained(case, executor, (state, sampled), round_index)
        for case, executor, state, sampled in kinds
    ]
    before = states[0].shared
    uploads = Params()
    for name in before:
        uploads[name] = torch.cat([part.uploads[name] for part in parts])
    sizes = np.concatenate(
        [case.federations[0].train.sizes[sampled] for case, _, _, sampled in kinds]
    )
    after = cases[0].algorithm.aggregate(before, uploads, to_device(sizes, parts[0].losses.device))
    moment = []
    for (case, _, state, sampled), part in zip(kinds, parts, strict=True):
        private = state.private.put(sampled.tolist(), part.private)
        traffic = _traffic(case, before, part.uploads, len(sampled))
        report = RoundReport(round_index, sampled, part.losses, traffic)
        moment.append((State(after, private), report))
    return moment


def _own(case: Case, everyone: IntArray) -> IntArray:
    """The sampled clients of this kind, by their numbers within the kind."""
    own = everyone - case.first
    return own[(own >= 0) & (own < case.federations[0].num_clients)]


def _traffic(case: Case, shared: Params, uploads: Params, num_sampled: int) -> Ledger:
    return Ledger().add_round(
        shared, uploads, num_sampled=num_sampled, num_clients=case.federations[0].num_clients
    )


def _trained(
    case: Case,
    executor: Executor[Update],
    sampled_clients: tuple[State, IntArray],
    round_index: int,
) -> Part:
    """The results of one kind's sampled clients, through the gate; empty if there are none."""
    (state, sampled), train = sampled_clients, case.federations[0].train
    if not len(sampled):
        here = train.examples.device
        return Part(
            {name: tensor[None][:0] for name, tensor in state.shared.items()},
            [],
            torch.zeros(0, device=here),
        )
    tasks = [_task(case, state, client, round_index) for client in sampled.tolist()]
    update = executor(tasks, train.examples, round_index).stacked()
    return Part(
        admit(update.upload, state.shared),
        unstack_rows(update.private, len(sampled)),
        update.loss.clone(),
    )


def _task(case: Case, state: State, client: int, round_index: int) -> ClientTask:
    """One client's task; its randomness is addressed by its number among all kinds."""
    number = case.first + client
    order = rows_for_round(case.plan, case.federations[0].train, round_index, client, number=number)
    return ClientTask(
        state.shared, state.private.of(client), order, client_key(case.plan, round_index, number)
    )


def _finished(
    cases: Cases, options: Options, progress: Progress, folder: Path | None
) -> dict[str, SeedResult]:
    """The final tests of every kind; with a folder, results and models are saved there."""
    results, checkpoint = {}, _checkpoint(cases, options, folder)
    for place, (name, case) in enumerate(cases.items()):
        with closing(build_evaluation(case, options, checkpoint, kind=name)) as evaluation:
            results[name] = build_result(case, options, evaluation, progress.of(place))
    if folder:
        for name, result in results.items() if options.save == "everything" else ():
            save_models(result, folder / "models" / name)
        write_json(
            folder / "result.json",
            [{"kind": name, **result.as_dict()} for name, result in results.items()],
        )
        if checkpoint and options.save == "metrics":
            checkpoint.drop_tensors(progress)
    return results
