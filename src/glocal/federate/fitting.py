"""Train a federation from start to finish: rounds, validation, checkpoints, and the final tests."""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from glocal.algorithms.contract import Algorithm, freeze_shared
from glocal.core import trees
from glocal.core.bounds import MAX_CLIENTS, MAX_ROUNDS, MAX_WORKERS, count_field, require_counts
from glocal.core.errors import DivergedError, InputError, describe_error
from glocal.core.files import Json, lock_folder, write_json
from glocal.core.modules import params_of, predictor
from glocal.core.sampling import Plan, sample_clients
from glocal.core.split import unique_tensors
from glocal.core.store import State
from glocal.core.trees import Params
from glocal.datasets.federated import FederatedData, validate_data
from glocal.engines import ClientTask, EngineConfig, ExecutionPlan, Executor, ResolvedEngine
from glocal.engines.looped import LoopedEngine
from glocal.evaluate import (
    Evaluator,
    Metric,
    accuracy,
    local_test,
    local_tests,
    new_test,
    summarize,
)
from glocal.federate.checkpoint import Checkpoint, Progress
from glocal.federate.result import Result, save_models
from glocal.federate.rounds import RoundReport, Seat, initial_state, simulate_seeds
from glocal.wire import Ledger, pack

_BEFORE = 10**6  # pre-training draws as rounds so far on do, which no run reaches


@dataclass(frozen=True)
class Options:
    """How to run. What is tested is the last round, or the best on validation data (`select`); each validation costs bytes.

    With `tests` = "local" there is no New Test, for which all devices would have to send their models.

    In a folder "everything" is kept, or "figures" only (`keep`): no models, and no checkpoint once a case is finished. `engine`,
    `chunk_size`, `workers`, `fused` and `precision` are those of `EngineConfig`. But for `select`, `tests` and `precision`, nothing here
    changes the numbers beyond rounding.
    """

    device: str = "auto"
    engine: str = "auto"
    chunk_size: int | None = count_field(None, maximum=MAX_CLIENTS)
    workers: int | None = count_field(None, maximum=MAX_WORKERS)
    fused: bool = True
    precision: str = "fp32"
    validate_every: int = count_field(10, maximum=MAX_ROUNDS)
    checkpoint_every: int = count_field(10, maximum=MAX_ROUNDS)
    save: str = "everything"
    select: str = "last"
    tests: str = "both"

    def __post_init__(self) -> None:
        if self.select not in ("last", "best"):
            raise InputError(
                f"options: select is '{self.select}'; it must be 'last' or 'best' (the best round on validation data)"
            )
        if self.save not in ("everything", "metrics"):
            raise InputError(
                f"options: save is '{self.save}'; it must be 'everything' or 'figures'"
            )
        if self.tests not in ("both", "local"):
            raise InputError(
                f"options: tests is '{self.tests}'; it must be 'both' or 'local' (no New Test)"
            )
        require_counts("options: ", self)
        self.engine_config()

    def engine_config(self) -> EngineConfig:
        """The engine to run on."""
        return EngineConfig(self.engine, self.chunk_size, self.workers, self.fused, self.precision)

    def torch_device(self) -> torch.device:
        """Where to compute; `auto` takes a GPU where there is one."""
        name = (
            ("cuda" if torch.cuda.is_available() else "cpu")
            if self.device == "auto"
            else self.device
        )
        try:
            tried = torch.zeros(1, device=name)
            tried.item()  # some devices exist in name only
            return tried.device
        except (RuntimeError, AssertionError) as error:
            raise InputError(
                f"options: device '{self.device}' cannot be used here; try 'cpu', 'cuda' or 'auto'"
            ) from error


class Pretraining(NamedTuple):
    """So many epochs before the first round in which every device trains its private part alone, as its algorithm settles.

    Without labels it learns from all inputs that a device has, with them from what the rounds learn from.
    """

    algorithm: Algorithm
    epochs: int
    labels: bool = False


@dataclass(frozen=True)
class Case:
    """One algorithm on one data set, with one or more seeds side by side; each tuple has one entry per seed.

    Where several kinds of device train together, the case is one of them, its devices numbered from `first` among `total`.
    """

    algorithm: Algorithm
    model: nn.Module
    plan: Plan
    seeds: tuple[int, ...]
    params: tuple[Params, ...]
    federations: tuple[FederatedData, ...]
    spent: tuple[Ledger, ...]
    about: Json = field(default_factory=dict)
    first: int = 0
    total: int | None = None
    pretraining: Pretraining | None = None
    metric: Metric = accuracy

    def plans(self) -> list[Plan]:
        """The plan of each seed."""
        return [replace(self.plan, seed=seed) for seed in self.seeds]


class Moment(NamedTuple):
    """What the caller sees after each round: a row per seed, as it is kept, how far training has come, and the round's seconds."""

    rows: list[Json]
    progress: Progress
    seconds: float


Round = list[tuple[State, RoundReport]]
Afterwards = Callable[[Sequence[Result]], list[Json]]
Advance = Callable[[Progress, Round], tuple[Progress, list[Json]]]


def fit(
    algorithm: Algorithm,
    model: nn.Module,
    data: FederatedData,
    plan: Plan,
    *,
    options: Options | None = None,
    folder: Path | str | None = None,
    start_from: Result | None = None,
    pretraining: Pretraining | None = None,
    metric: Metric = accuracy,
) -> Result:
    """Train and test one federation. With a folder, everything is kept there, and calling again goes on where it stopped.

    `start_from`, the result of another fit, is a warm start: its model becomes the first one here, its traffic is counted, and
    its numbering of rounds is continued. `pretraining` comes before the first round. `metric` says what a guess is worth.
    """
    params, spent = params_of(model), Ledger()
    if start_from is not None:
        names = start_from.algorithm.personal(
            start_from.state.shared, start_from.state.private.initial
        ).keys()
        if names != params.keys():
            raise InputError(
                f"fit: start_from is of another model; only one of the two has {sorted(names ^ params.keys())}"
            )
        params, spent = warm_start_params(start_from.algorithm, start_from.state), start_from.ledger
        plan = replace(plan, first_round=start_from.plan.total_rounds)
    case = Case(
        algorithm,
        model,
        plan,
        (plan.seed,),
        (params,),
        (data,),
        (spent,),
        pretraining=pretraining,
        metric=metric,
    )
    return fit_case(case, options or Options(), Path(folder) if folder else None)[0]


def fit_case(case: Case, options: Options, folder: Path | None = None) -> list[Result]:
    """Train and test every seed of a case."""
    for fed in case.federations:
        require_trainable(case, fed, options)
    case = move_to_device(case, options)
    with lock_folder(folder):
        progress = start_or_resume(case, options, folder)
        for moment in train(case, options, progress, folder):
            progress = moment.progress
        return finish(case, options, progress, folder)


def build_evaluation(
    case: Case,
    options: Options,
    checkpoint: Checkpoint | None = None,
    *,
    kind: str = "",
) -> Evaluator:
    """How a case's models, or those of one kind, are tested; as the run began, if it goes on."""
    return Evaluator(
        case.algorithm,
        predictor(case.model),
        engine=options.engine_config(),
        metric=case.metric,
        resolved=lambda part: resolve_engine(options, checkpoint, f"{part} {kind}".strip()),
    )


def resolve_engine(
    options: Options,
    checkpoint: Checkpoint | None,
    part: str,
    known_engine: ExecutionPlan | None = None,
) -> ResolvedEngine:
    """What a part of a run began with, so that it goes on with the same rounding; where to note it.

    A checkpoint knows what it was made with; before the first one, the run's folder does.
    """
    if checkpoint is not None and known_engine is None:
        known_engine = checkpoint.read_plan(part)
    if known_engine is not None and not known_engine.allowed_by(options.engine_config()):
        known_engine = None
    return ResolvedEngine(known_engine, partial(checkpoint.save_plan, part) if checkpoint else None)


def warm_start_params(algorithm: Algorithm, state: State) -> Params:
    """The one model to start others from: what a newcomer would predict with, every shared tensor as it is now."""
    if not state.shared:
        raise InputError(
            f"warm start: {algorithm.name} shares nothing, so there is no one model to start from; use another case"
        )
    new_client = algorithm.personal(state.shared, state.private.initial)
    return {name: state.shared.get(name, tensor) for name, tensor in new_client.items()}


def move_to_device(case: Case, options: Options) -> Case:
    """The case with data and weights on the computing device."""
    device = options.torch_device()
    params = tuple(trees.to(tree, device) for tree in case.params)
    return replace(case, params=params, federations=move_data_to_device(case.federations, device))


def move_data_to_device(
    feds: Sequence[FederatedData], device: torch.device
) -> tuple[FederatedData, ...]:
    """Federations moved to a device; stores that they have in common stay in common."""
    stores = {id(part.examples): part.examples for fed in feds for part in fed.subsets()}
    moved = {key: examples.to(device) for key, examples in stores.items()}
    return tuple(
        fed.map_subsets(lambda part: replace(part, examples=moved[id(part.examples)]))
        for fed in feds
    )


def require_trainable(case: Case, fed: FederatedData, options: Options) -> None:
    """Refuse what could not run to its end: data that do not fit the model, a cohort too large, nothing to choose on."""
    validate_data(fed, num_classes(case.model, fed))
    total = case.total or fed.num_clients
    sample_clients(case.plan, total, case.plan.first_round)
    if case.algorithm.num_clients not in (None, total):
        raise InputError(
            f"{case.algorithm.name}: made for {case.algorithm.num_clients} devices, but the data have {total}"
        )
    if options.select == "best" and not fed.val.sizes.any():
        raise InputError(
            "options: select = 'best' needs validation data, and nobody has any; raise data.validation, or use 'last'"
        )
    if case.pretraining and case.pretraining.algorithm.adapt is None:
        raise InputError(
            f"{case.algorithm.name}: nothing of it is private, so that there is nothing to train alone; do without"
        )
    _try_one_step(case, fed)


def num_classes(model: nn.Module, fed: FederatedData) -> int:
    """How many classes the model knows."""
    return num_outputs(model, fed.train.examples.x)


def num_outputs(model: nn.Module, inputs: torch.Tensor) -> int:
    """How many outputs the model has for one of such inputs (rows, ...)."""
    example = inputs[:1].cpu()
    try:
        with torch.no_grad():
            output = predictor(model)(
                trees.to(params_of(model), torch.device("cpu")),
                example,
                torch.ones(1, dtype=torch.bool),
            )
    except InputError:
        raise
    except Exception as error:  # whatever a user's own module may raise
        shape = tuple(example.shape[1:])
        raise InputError(
            f"model: it cannot take inputs of shape {shape} {example.dtype}, as the data have them ({describe_error(error)})"
        ) from error
    if not isinstance(output, torch.Tensor) or output.dim() != 2:
        given = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise InputError(
            f"model: it puts out {given} for one example; a tensor (1, classes) was expected"
        )
    return output.shape[1]


def _try_one_step(case: Case, fed: FederatedData) -> None:
    """Train on two rows and on three, to no effect: what fails here would fail in the first round.

    Both, as a loss that gives one value per class may by chance give as many as there are rows.
    """
    cpu, largest = torch.device("cpu"), int(fed.train.sizes.argmax())
    examples = fed.train.examples.take(fed.train.rows[largest][:3]).to(cpu)
    start, own = case.algorithm.init(trees.to(case.params[0], cpu)), np.arange(len(examples.y))
    try:
        for rows in (2, 3):  # a device that holds fewer shows some again
            task = ClientTask(*start, np.resize(own, (1, rows)))
            LoopedEngine(case.algorithm.client_update)([task], examples, case.plan.first_round)
    except InputError:
        raise
    except Exception as error:  # whatever a user's own module may raise
        raise InputError(f"model: it cannot be trained ({describe_error(error)})") from error


def start_or_resume(case: Case, options: Options, folder: Path | None) -> Progress:
    """Where to start: at the last checkpoint if the folder has one, else before the first round."""
    states = [initial_state(case.algorithm, params, len(case.seeds)) for params in case.params]
    started = [_started(case, place, state) for place, state in enumerate(states)]
    fresh = Progress(0, states, started, [None for _ in states])
    checkpoint = Checkpoint(folder, fingerprint(case, options)) if folder else None
    progress = resume_from_checkpoint(fresh, options, checkpoint)
    if progress is not fresh or case.pretraining is None:
        return progress
    return _pretrained(case, case.pretraining, options, fresh, checkpoint)


def _pretrained(
    case: Case,
    before: Pretraining,
    options: Options,
    progress: Progress,
    checkpoint: Checkpoint | None,
) -> Progress:
    """All devices after they trained their private parts alone; nothing has been sent for it."""
    settling, seats = freeze_shared(before.algorithm), []
    for plan, fed, state in zip(case.plans(), case.federations, progress.states, strict=True):
        alone = replace(
            plan,
            rounds=before.epochs,
            clients_per_round=fed.num_clients,
            local_epochs=1,
            first_round=_BEFORE,
        )
        seats.append(Seat(alone, fed.train if before.labels else fed.unlabeled or fed.train, state))
    states, begun = progress.states, resolve_engine(options, checkpoint, "pretraining")
    executor = Executor(settling.client_update, engine=options.engine_config(), **begun._asdict())
    try:
        for moment in simulate_seeds(settling, seats, executor):
            list(map(_finite, case.seeds, [report for _, report in moment]))
            states = [state for state, _ in moment]
    finally:
        executor.close()
    return progress._replace(states=states)


def resume_from_checkpoint(
    fresh: Progress, options: Options, checkpoint: Checkpoint | None
) -> Progress:
    """What a checkpoint holds, on the computing device; if there is none, the fresh beginning."""
    saved = checkpoint.load() if checkpoint else None
    if saved is None:
        return fresh
    device, rooms = options.torch_device(), [state.private.max_gpu_rows for state in fresh.states]
    states = [
        state.to(device, max_gpu_rows)
        for state, max_gpu_rows in zip(saved.states, rooms, strict=True)
    ]
    best = [
        kept and (*kept[:2], kept[2].to(device, max_gpu_rows))
        for kept, max_gpu_rows in zip(saved.best, rooms, strict=True)
    ]
    return saved._replace(states=states, best=best)


def _started(case: Case, place: int, state: State) -> Ledger:
    """Traffic before the first round: a warm start's, and its local part to every device, unless it was validated there before."""
    spent, fed = case.spent[place], case.federations[place]
    validated = bool(fed.val.sizes.any())
    local = restrict_to_model(case.model, state.private.initial)
    return (
        spent.add_warm_start(local, fed.num_clients)
        if case.plan.first_round and not validated
        else spent
    )


def fingerprint(case: Case, options: Options) -> Json:
    """What must be the same for a run to be continued."""
    shared, private = case.algorithm.init(case.params[0])
    shapes = {
        side: {name: [*tensor.shape] for name, tensor in tree.items()}
        for side, tree in (("shared", shared), ("private", private))
    }
    plan = {
        name: value
        for name, value in asdict(case.plan).items()
        if name not in ("rounds", "seed") and value is not None
    }
    algorithm = (
        f"{case.algorithm.name}: {case.algorithm.description}"
        if case.algorithm.description
        else case.algorithm.name
    )
    choice = {"select": options.select, "validate_every": options.validate_every}
    choice |= {} if options.precision == "fp32" else {"precision": options.precision}
    choice |= {} if options.tests == "both" else {"tests": options.tests}
    told = {
        "algorithm": algorithm,
        "model": shapes,
        "plan": plan,
        "seeds": list(case.seeds),
        "choice": choice,
        **case.about,
    }
    if case.pretraining:
        told |= {
            "pretraining": {"epochs": case.pretraining.epochs, "labels": case.pretraining.labels}
        }
    return {**told, "data": _data_fingerprint(case.federations)}


def _data_fingerprint(feds: Sequence[FederatedData]) -> str:
    """Who holds which rows, every label, what stands beside the labels, and a sample of the inputs, as one short word."""
    told = hashlib.sha256()
    for part in (part for fed in feds for part in (fed.train, fed.val, fed.test)):
        told.update(b"".join(rows.tobytes() for rows in part.rows))
    for x, y, group in {
        id(part.examples): part.examples for fed in feds for part in (fed.train, fed.val, fed.test)
    }.values():
        told.update(
            pack(
                {
                    "y": y,
                    "x": x[:: max(1, len(x) // 500)],
                    **({} if group is None else {"group": group}),
                }
            )
        )
    return told.hexdigest()[:16]


def train(
    case: Case, options: Options, progress: Progress, folder: Path | None = None
) -> Iterator[Moment]:
    """Rounds of a placed case as they happen; kept in the folder if there is one, also when it is stopped by Ctrl-C."""
    checkpoint = Checkpoint(folder, fingerprint(case, options)) if folder else None
    begun = resolve_engine(options, checkpoint, "rounds", progress.choices[0])
    executor = Executor(
        case.algorithm.client_update,
        engine=options.engine_config(),
        num_calls=case.plan.rounds,
        **begun._asdict(),
    )
    evaluation = build_evaluation(case, options, checkpoint)
    seats = [
        Seat(plan, fed.train, state)
        for plan, fed, state in zip(case.plans(), case.federations, progress.states, strict=True)
    ]

    def advance(before: Progress, round_: Round) -> tuple[Progress, list[Json]]:
        return complete_round(
            case, options, evaluation, (before._replace(choices=(executor.execution_plan,)), round_)
        )

    try:
        rounds = simulate_seeds(case.algorithm, seats, executor, done=progress.done)
        yield from checkpoint_rounds(
            rounds, advance, progress, CheckpointPolicy(options, case.plan.rounds, checkpoint)
        )
    finally:
        executor.close()
        evaluation.close()


class CheckpointPolicy(NamedTuple):
    """What is kept and how often, until how many rounds are done, and where; nowhere if there is no checkpoint."""

    options: Options
    rounds: int
    checkpoint: Checkpoint | None

    def due(self, done: int) -> bool:
        """Whether a checkpoint is to be written after so many rounds."""
        at_the_end = done == self.rounds and self.options.save == "everything"
        return done % self.options.checkpoint_every == 0 or at_the_end


def checkpoint_rounds(
    rounds: Iterator[Round], advance: Advance, progress: Progress, policy: CheckpointPolicy
) -> Iterator[Moment]:
    """Rounds as they happen, written down as they do; what is done is saved also when Ctrl-C stops them."""
    checkpoint, saved, started = policy.checkpoint, progress.done, time.perf_counter()
    try:
        for round_ in rounds:
            further, rows = advance(progress, round_)
            if checkpoint:
                checkpoint.append(rows)
            progress = further  # only now: a stop before this comes back to the round, rows and all
            if checkpoint and policy.due(progress.done):
                saved = checkpoint.save(progress)
            finished = time.perf_counter()
            yield Moment(rows, progress, finished - started)
            started = finished
    except (KeyboardInterrupt, GeneratorExit):
        if checkpoint and saved < progress.done:
            checkpoint.save(progress)
        raise


def complete_round(
    case: Case, options: Options, evaluation: Evaluator, step: tuple[Progress, Round]
) -> tuple[Progress, list[Json]]:
    """One round further: ledgers, losses, and every so often a validation score."""
    progress, moment = step
    ledgers = [
        ledger + report.traffic
        for ledger, (_, report) in zip(progress.ledgers, moment, strict=True)
    ]
    progress = progress._replace(
        done=progress.done + 1, states=[state for state, _ in moment], ledgers=ledgers
    )
    scores: list[float | None] = [None] * len(moment)
    if progress.done % options.validate_every == 0:
        progress, scores = _validated(case, options, evaluation, progress)
    reports = [report for _, report in moment]
    return progress, list(map(_row, case.seeds, reports, scores, progress.ledgers))


def _row(seed: int, report: RoundReport, score: float | None, ledger: Ledger) -> Json:
    losses = _finite(seed, report)
    sent = {"bytes": ledger.total.bytes, "paper_parameters": ledger.paper.parameters}
    loss = float(losses.mean()) if len(losses) else None  # nobody of this kind took part
    return {"seed": seed, "round": report.round_index, "loss": loss, "validation": score, **sent}


def _finite(seed: int, report: RoundReport) -> Tensor:
    """The losses of a round (devices,), or an error."""
    losses = report.losses.cpu()
    if not bool(torch.isfinite(losses).all()):
        device = int(report.clients_per_round[int((~torch.isfinite(losses)).nonzero()[0])])
        error = DivergedError(
            f"training diverged in round {report.round_index}: device {device}'s loss is not finite; lower the learning rate"
        )
        error.seed = seed
        raise error
    return losses


def _validated(
    case: Case, options: Options, evaluation: Evaluator, progress: Progress
) -> tuple[Progress, list[float | None]]:
    """Score every seed on validation data; the shared tree has to reach those devices for it, and that is counted."""
    scores, ledgers, best = [], [], []
    accuracies = local_tests(evaluation, progress.states, [fed.val for fed in case.federations])
    seeds = zip(
        case.federations, progress.states, progress.ledgers, progress.best, accuracies, strict=True
    )
    for fed, state, ledger, so_far, found in seeds:
        score = summarize(found, fed.val.sizes).mean
        scores.append(score)
        ledgers.append(ledger.add_evaluation(state.shared, int(np.count_nonzero(fed.val.sizes))))
        better = (
            options.select == "best" and score is not None and (so_far is None or score > so_far[0])
        )
        best.append((score, progress.done, state) if better and score is not None else so_far)
    return progress._replace(ledgers=ledgers, best=best), scores


def finish(
    case: Case,
    options: Options,
    progress: Progress,
    folder: Path | None = None,
    *,
    also: Afterwards | None = None,
) -> list[Result]:
    """The final tests of every seed of a placed case, kept in the folder if there is one, with what `also` says of each."""
    checkpoint = Checkpoint(folder, fingerprint(case, options)) if folder else None
    evaluation = build_evaluation(case, options, checkpoint)
    results = [
        build_result(case, options, evaluation, progress, place=place)
        for place in range(len(case.seeds))
    ]
    evaluation.close()
    if folder and checkpoint:
        for result in results if options.save == "everything" else ():
            save_models(result, folder / "models" / f"seed-{result.plan.seed}")
        more = _afterwards(also, results, lambda: checkpoint.save(progress))
        write_json(
            folder / "result.json",
            [{**result.as_dict(), **said} for result, said in zip(results, more, strict=True)],
        )
        if options.save == "metrics":
            checkpoint.drop_tensors(progress)
    return results


def restrict_to_model(model: nn.Module, tree: Params) -> Params:
    """What a tree holds of the model itself: an auxiliary model beside it is of no use to anybody else, and is never sent."""
    return trees.pick(tree, unique_tensors(model))


def _afterwards(
    also: Afterwards | None, results: Sequence[Result], save: Callable[[], int]
) -> list[Json]:
    """What there is to add to the results; whoever stops it does not lose the rounds before."""
    try:
        return also(results) if also else [{} for _ in results]
    except KeyboardInterrupt:
        save()
        raise


def build_result(
    case: Case, options: Options, evaluation: Evaluator, progress: Progress, *, place: int = 0
) -> Result:
    """The outcome of one seed: what was selected, on test data."""
    fed, plan = case.federations[place], case.plans()[place]
    done, state = _selected(
        options, evaluation, fed, (progress.done, progress.states[place], progress.best[place])
    )
    accuracies = local_test(evaluation, state, fed.test)
    local, trained = (
        restrict_to_model(case.model, state.private.initial),
        len(state.private.trained),
    )
    ledger = progress.ledgers[place].add_evaluation(
        state.shared, int(np.count_nonzero(fed.test.sizes))
    )
    if (
        options.select == "best" and progress.done % options.validate_every
    ):  # the last round was looked at besides
        ledger = ledger.add_evaluation(
            progress.states[place].shared, int(np.count_nonzero(fed.val.sizes))
        )
    personal = case.algorithm.personal(state.shared, state.private.initial)
    whole, counted = restrict_to_model(case.model, personal), fed.num_clients if state.shared else 0
    if options.tests == "both":
        ledger = ledger.add_ensemble(local, whole, num_trained=trained, num_clients=counted)
    return Result(
        algorithm=case.algorithm,
        architecture=case.model,
        plan=replace(plan, rounds=max(progress.done, 1)),
        state=state,
        selected_round=plan.first_round + done,
        accuracies=accuracies,
        local_spread=summarize(accuracies, fed.test.sizes),
        new_spread=new_test(evaluation, state, fed.test) if options.tests == "both" else None,
        validation=summarize(local_test(evaluation, state, fed.val), fed.val.sizes),
        ledger=ledger,
        sizes={
            "train": fed.train.sizes.tolist(),
            "val": fed.val.sizes.tolist(),
            "test": fed.test.sizes.tolist(),
        },
        times_sampled=participation(plan, case.total or fed.num_clients, done)[
            case.first : case.first + fed.num_clients
        ],
        metric=case.metric,
    )


def _selected(
    options: Options,
    evaluation: Evaluator,
    fed: FederatedData,
    last: tuple[int, State, tuple[float, int, State] | None],
) -> tuple[int, State]:
    """Rounds done and state to test: the last one, or an earlier one that was better on validation data."""
    done, state, best = last
    if options.select == "last" or best is None:
        return done, state
    score = summarize(local_test(evaluation, state, fed.val), fed.val.sizes).mean
    return (done, state) if score is None or score > best[0] else best[1:]


def participation(plan: Plan, clients: int, done: int) -> list[int]:
    """How often each device took part."""
    counts = np.zeros(clients, dtype=np.int64)
    for round_index in range(plan.first_round, plan.first_round + done):
        counts[sample_clients(plan, clients, round_index)] += 1
    return [int(count) for count in counts]
