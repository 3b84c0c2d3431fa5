"""Train a federation from start to end: rounds, validation, checkpoints and the final tests."""

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
from glocal.core.data import ClientData, Examples, client_label
from glocal.core.errors import DivergedError, InputError, describe_error, describe_value
from glocal.core.files import Json, lock_folder, write_json
from glocal.core.metric import Metric
from glocal.core.model_tensors import base_fingerprint, client_tensors
from glocal.core.sampling import Plan, sample_clients
from glocal.core.store import State
from glocal.core.task import Task
from glocal.core.trees import Params
from glocal.datasets.federated import FederatedData
from glocal.engines import ClientTask, EngineConfig, ExecutionPlan, Executor, ResolvedEngine
from glocal.engines.looped import LoopedEngine
from glocal.evaluate import Evaluator, local_figures, new_test
from glocal.federate.checkpoint import Checkpoint, Progress
from glocal.federate.outputs import validate_task_data
from glocal.federate.result import SeedResult, save_models
from glocal.federate.rounds import RoundReport, Seat, initial_state, simulate_seeds
from glocal.wire import Ledger, pack

_FIRST_PRETRAINING_ROUND = 10**6  # its address of randomness: no run has so many rounds


@dataclass(frozen=True)
class Options:
    """How to run a training, and what to test and save.

    `select` decides which round is tested: the "last", the "best" on validation data by the task's
    first metric, or by another one, such as "max auroc" or "min loss". Each validation costs bytes. With `tests` = "local" there is no New Test, for which all clients
    would have to send their models.

    With a folder, `save` = "everything" keeps all. "metrics" saves no models, and drops the
    tensors of the checkpoint once the experiment is finished. `engine`, `chunk_size`, `workers`,
    `fused` and `precision` are those of `EngineConfig`. Apart from `select`, `tests` and
    `precision`, no option changes the numbers beyond rounding.
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
        _require_selection(self.select)
        if self.save not in ("everything", "metrics"):
            raise InputError(
                f"options: save is '{self.save}'; it must be 'everything' or 'metrics'"
            )
        if self.tests not in ("both", "local"):
            raise InputError(
                f"options: tests is '{self.tests}'; it must be 'both' or 'local' (no New Test)"
            )
        require_counts("options: ", self)
        self.engine_config()

    def engine_config(self) -> EngineConfig:
        """The engine's settings."""
        return EngineConfig(self.engine, self.chunk_size, self.workers, self.fused, self.precision)

    def torch_device(self) -> torch.device:
        """torch's device; "auto" takes a GPU if there is one."""
        name = self.device
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            tensor = torch.zeros(1, device=name)
            tensor.item()  # a device such as "meta" has no values
            return tensor.device
        except (RuntimeError, AssertionError) as error:
            raise InputError(
                f"options: device '{self.device}' cannot be used here; try 'cpu', 'cuda' or 'auto'"
            ) from error


def _require_selection(select: object) -> None:
    words = select.split(" ") if isinstance(select, str) else []
    if select in ("last", "best") or (len(words) == 2 and words[0] in ("max", "min") and words[1]):
        return
    raise InputError(
        f"options: select is {describe_value(select)}; 'last', 'best' or a metric with its "
        "direction, such as 'max accuracy' or 'min loss', was expected"
    )


class Pretraining(NamedTuple):
    """Epochs before the first round, in which each client trains its private part alone.

    Clients train by `algorithm.adapt`: with `labels` on their training data, and without on all of
    their inputs.
    """

    algorithm: Algorithm
    epochs: int
    labels: bool = False


@dataclass(frozen=True)
class Case:
    """One algorithm on one data set, with several seeds side by side.

    Each tuple has one entry per seed. Where several kinds of client train together, this is one of
    the kinds: its clients are numbered from `first`, among `total`.
    """

    algorithm: Algorithm
    task: Task
    plan: Plan
    seeds: tuple[int, ...]
    params: tuple[Params, ...]
    federations: tuple[FederatedData, ...]
    spent: tuple[Ledger, ...]
    about: Json = field(default_factory=dict)
    first: int = 0
    total: int | None = None
    pretraining: Pretraining | None = None

    @property
    def model(self) -> nn.Module:
        """The task's model."""
        return self.task.model

    def plans(self) -> list[Plan]:
        """The plan of each seed."""
        return [replace(self.plan, seed=seed) for seed in self.seeds]


class Moment(NamedTuple):
    """One round: a row per seed, as it is saved, the progress after it, and its seconds."""

    rows: list[Json]
    progress: Progress
    seconds: float


Round = list[tuple[State, RoundReport]]
Afterwards = Callable[[Sequence[SeedResult]], list[Json]]
Advance = Callable[[Progress, Round], tuple[Progress, list[Json]]]


def fit_case(experiment: Case, options: Options, folder: Path | None = None) -> list[SeedResult]:
    """Train and test every seed of an experiment."""
    for fed in experiment.federations:
        require_trainable(experiment, fed, options)
    experiment = move_to_device(experiment, options)
    with lock_folder(folder):
        progress = start_or_resume(experiment, options, folder)
        for moment in train(experiment, options, progress, folder):
            progress = moment.progress
        return finish(experiment, options, progress, folder)


def build_evaluation(
    experiment: Case,
    options: Options,
    checkpoint: Checkpoint | None = None,
    *,
    kind: str = "",
) -> Evaluator:
    """The evaluator of an experiment's models, or of one kind's.

    A resumed run evaluates on the engine that it began with.
    """
    return Evaluator(
        experiment.algorithm,
        experiment.task,
        engine=options.engine_config(),
        resolved=lambda part: resolve_engine(options, checkpoint, f"{part} {kind}".strip()),
    )


def resolve_engine(
    options: Options,
    checkpoint: Checkpoint | None,
    part: str,
    known_engine: ExecutionPlan | None = None,
) -> ResolvedEngine:
    """The execution plan that a part of a run began with, and where to save a new one.

    A resumed run has the same rounding for that. The plan is in the checkpoint, or in the run's
    folder before the first checkpoint.
    """
    if checkpoint is not None and known_engine is None:
        known_engine = checkpoint.read_plan(part)
    if known_engine is not None and not known_engine.allowed_by(options.engine_config()):
        known_engine = None
    return ResolvedEngine(known_engine, partial(checkpoint.save_plan, part) if checkpoint else None)


def warm_start_params(algorithm: Algorithm, state: State) -> Params:
    """The model that others start from: that of a client which has not trained.

    All shared tensors are as they are now.
    """
    if not state.shared:
        raise InputError(
            f"warm start: {algorithm.name} shares nothing, so there is no one model to start from; "
            "use another experiment"
        )
    new_client = algorithm.personal(state.shared, state.private.initial)
    return {name: state.shared.get(name, tensor) for name, tensor in new_client.items()}


def move_to_device(experiment: Case, options: Options) -> Case:
    """The experiment with data and weights on torch's device."""
    device = options.torch_device()
    params = tuple(trees.to(tree, device) for tree in experiment.params)
    return replace(
        experiment, params=params, federations=move_data_to_device(experiment.federations, device)
    )


def move_data_to_device(
    feds: Sequence[FederatedData], device: torch.device
) -> tuple[FederatedData, ...]:
    """Federations on a device; those with one store of examples have one store again."""
    stores = dict[int, Examples]()
    for fed in feds:
        stores |= {id(subset.examples): subset.examples for subset in fed.subsets()}
    moved = {key: examples.to(device) for key, examples in stores.items()}

    def with_moved(subset: ClientData) -> ClientData:
        return replace(subset, examples=moved[id(subset.examples)])

    return tuple(fed.map_subsets(with_moved) for fed in feds)


def require_trainable(experiment: Case, fed: FederatedData, options: Options) -> None:
    """Refuse what would fail later.

    These are data that do not fit the model, too few clients, no validation data to select a round
    on, pre-training of nothing, and a model that cannot be trained.
    """
    validate_task_data(experiment.task, fed)
    total = experiment.total or fed.num_clients
    sample_clients(experiment.plan, total, experiment.plan.first_round)
    if experiment.algorithm.num_clients not in (None, total):
        raise InputError(
            f"{experiment.algorithm.name}: made for {experiment.algorithm.num_clients} clients, "
            f"but the data have {total}"
        )
    if options.select != "last" and not fed.val.sizes.any():
        raise InputError(
            f"options: select = '{options.select}' needs validation data, and no client has any; "
            "raise data.validation, or use 'last'"
        )
    if experiment.pretraining and experiment.pretraining.algorithm.adapt is None:
        raise InputError(
            f"{experiment.algorithm.name}: it has no private part to pre-train; "
            "do without pre-training"
        )
    _try_one_step(experiment, fed)


def _try_one_step(experiment: Case, fed: FederatedData) -> None:
    """Train on two rows and then on three, and discard the result.

    What fails here would fail in the first round. A loss that wrongly gives one value per class
    may by chance give as many values as there are rows, but not for two and three rows.
    """
    cpu, largest = torch.device("cpu"), int(fed.train.sizes.argmax())
    examples = fed.train.examples.take(fed.train.rows[largest][:3]).to(cpu)
    own = np.arange(examples.num_rows)
    shared, private = experiment.algorithm.init(trees.to(experiment.params[0], cpu))
    try:
        for rows in (2, 3):  # a client with fewer examples repeats some
            task = ClientTask(shared, private, np.resize(own, (1, rows)))
            LoopedEngine(experiment.algorithm.client_update)(
                [task], examples, experiment.plan.first_round
            )
    except InputError:
        raise
    except Exception as error:  # a user's own module may raise anything
        raise InputError(f"model: it cannot be trained ({describe_error(error)})") from error


def start_or_resume(experiment: Case, options: Options, folder: Path | None) -> Progress:
    """The progress in the folder's checkpoint; without a checkpoint, that of a fresh start."""
    states = [
        initial_state(experiment.algorithm, params, len(experiment.seeds))
        for params in experiment.params
    ]
    ledgers = [_first_ledger(experiment, place, state) for place, state in enumerate(states)]
    fresh = Progress(0, states, ledgers, [None for _ in states])
    checkpoint = Checkpoint(folder, fingerprint(experiment, options)) if folder else None
    progress = resume_from_checkpoint(fresh, options, checkpoint)
    if progress is not fresh or experiment.pretraining is None:
        return progress
    return _pretrain(experiment, experiment.pretraining, options, fresh, checkpoint)


def _pretrain(
    experiment: Case,
    pretraining: Pretraining,
    options: Options,
    progress: Progress,
    checkpoint: Checkpoint | None,
) -> Progress:
    """The progress after each client trained its private part alone; nothing is sent for it."""
    adapting, seats = freeze_shared(pretraining.algorithm), []
    for plan, fed, state in zip(
        experiment.plans(), experiment.federations, progress.states, strict=True
    ):
        alone = replace(
            plan,
            rounds=pretraining.epochs,
            clients_per_round=fed.num_clients,
            local_epochs=1,
            first_round=_FIRST_PRETRAINING_ROUND,
        )
        data = fed.train if pretraining.labels else fed.unlabeled or fed.train
        seats.append(Seat(alone, data, state))
    names = experiment.federations[0].names
    states, resolved = progress.states, resolve_engine(options, checkpoint, "pretraining")
    executor = Executor(
        adapting.client_update, engine=options.engine_config(), **resolved._asdict()
    )
    try:
        for moment in simulate_seeds(adapting, seats, executor):
            for seed, (_, report) in zip(experiment.seeds, moment, strict=True):
                _require_finite(seed, report, names)
            states = [state for state, _ in moment]
    finally:
        executor.close()
    return progress._replace(states=states)


def resume_from_checkpoint(
    fresh: Progress, options: Options, checkpoint: Checkpoint | None
) -> Progress:
    """The progress in the checkpoint, on torch's device; without one, the fresh progress."""
    saved = checkpoint.load() if checkpoint else None
    if saved is None:
        return fresh
    device, states = options.torch_device(), list[State]()
    bests = list[tuple[float, int, State] | None]()
    for place, before in enumerate(fresh.states):
        max_gpu_rows, best = before.private.max_gpu_rows, saved.best[place]
        states.append(saved.states[place].to(device, max_gpu_rows))
        bests.append(best and (best[0], best[1], best[2].to(device, max_gpu_rows)))
    return saved._replace(states=states, best=bests)


def _first_ledger(experiment: Case, place: int, state: State) -> Ledger:
    """Traffic before the first round: that of a warm start, and its local part to each client.

    Clients that were validated before the warm start have the local part already.
    """
    spent, fed = experiment.spent[place], experiment.federations[place]
    if not experiment.plan.first_round or fed.val.sizes.any():
        return spent
    local = restrict_to_model(experiment.model, state.private.initial)
    return spent.add_warm_start(local, fed.num_clients)


def fingerprint(experiment: Case, options: Options) -> Json:
    """What has to be the same when a run is resumed."""
    shared, private = experiment.algorithm.init(experiment.params[0])
    plan = {
        name: value
        for name, value in asdict(experiment.plan).items()
        if name not in ("rounds", "seed") and value is not None
    }
    name, description = experiment.algorithm.name, experiment.algorithm.description
    choice = {"select": options.select, "validate_every": options.validate_every}
    if options.precision != "fp32":
        choice["precision"] = options.precision
    if options.tests != "both":
        choice["tests"] = options.tests
    result: Json = {
        "algorithm": f"{name}: {description}" if description else name,
        "model": {"shared": _shapes(shared), "private": _shapes(private)},
        "plan": plan,
        "seeds": list(experiment.seeds),
        "choice": choice,
        **experiment.about,
    }
    if base := base_fingerprint(experiment.model):
        result["base of frozen tensors"] = base
    if experiment.pretraining:
        pretraining = experiment.pretraining
        result["pretraining"] = {"epochs": pretraining.epochs, "labels": pretraining.labels}
    return {**result, "data": _data_fingerprint(experiment.federations)}


def _shapes(tree: Params) -> dict[str, list[int]]:
    return {name: [*tensor.shape] for name, tensor in tree.items()}


def _data_fingerprint(feds: Sequence[FederatedData]) -> str:
    """A short hash of each client's rows, all labels and groups, and a sample of the inputs."""
    digest, stores = hashlib.sha256(), dict[int, Examples]()
    for fed in feds:
        for subset in (fed.train, fed.val, fed.test):
            digest.update(b"".join(rows.tobytes() for rows in subset.rows))
            stores[id(subset.examples)] = subset.examples
    for x, y, group in stores.values():
        tensors = {"y": y, "x": x[:: max(1, len(x) // 500)]}
        if group is not None:
            tensors["group"] = group
        digest.update(pack(tensors))
    return digest.hexdigest()[:16]


def train(
    experiment: Case, options: Options, progress: Progress, folder: Path | None = None
) -> Iterator[Moment]:
    """Rounds of an experiment whose data are on torch's device, one by one.

    With a folder, rounds are saved there, also when Ctrl-C stops the run.
    """
    checkpoint = Checkpoint(folder, fingerprint(experiment, options)) if folder else None
    resolved = resolve_engine(options, checkpoint, "rounds", progress.choices[0])
    executor = Executor(
        experiment.algorithm.client_update,
        engine=options.engine_config(),
        num_calls=experiment.plan.rounds,
        **resolved._asdict(),
    )
    evaluation = build_evaluation(experiment, options, checkpoint)
    seats = [
        Seat(plan, fed.train, state)
        for plan, fed, state in zip(
            experiment.plans(), experiment.federations, progress.states, strict=True
        )
    ]

    def advance(before: Progress, round_: Round) -> tuple[Progress, list[Json]]:
        before = before._replace(choices=(executor.execution_plan,))
        return complete_round(experiment, options, evaluation, (before, round_))

    try:
        rounds = simulate_seeds(experiment.algorithm, seats, executor, done=progress.done)
        yield from checkpoint_rounds(
            rounds, advance, progress, CheckpointPolicy(options, experiment.plan.rounds, checkpoint)
        )
    finally:
        executor.close()
        evaluation.close()


class CheckpointPolicy(NamedTuple):
    """When checkpoints are written, and where; nothing is saved without a checkpoint."""

    options: Options
    rounds: int
    checkpoint: Checkpoint | None

    def due(self, done: int) -> bool:
        """Whether a checkpoint is due after `done` rounds."""
        is_last = done == self.rounds and self.options.save == "everything"
        return done % self.options.checkpoint_every == 0 or is_last


def checkpoint_rounds(
    rounds: Iterator[Round], advance: Advance, progress: Progress, policy: CheckpointPolicy
) -> Iterator[Moment]:
    """Rounds one by one, each saved as it is done; also the last one before Ctrl-C."""
    checkpoint, saved, started = policy.checkpoint, progress.done, time.perf_counter()
    try:
        for round_ in rounds:
            after, rows = advance(progress, round_)
            if checkpoint:
                checkpoint.append(rows)
            # Not before the rows are saved: a run that is stopped here repeats the round, and
            # writes all of its rows again.
            progress = after
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
    experiment: Case, options: Options, evaluation: Evaluator, step: tuple[Progress, Round]
) -> tuple[Progress, list[Json]]:
    """The progress and the rows after one round; after some rounds with a validation score."""
    progress, moment = step
    ledgers = []
    for ledger, (_, report) in zip(progress.ledgers, moment, strict=True):
        ledgers.append(ledger + report.traffic)
    states = [state for state, _ in moment]
    progress = progress._replace(done=progress.done + 1, states=states, ledgers=ledgers)
    scores: list[float | None] = [None] * len(moment)
    if progress.done % options.validate_every == 0:
        progress, scores = _validate(experiment, options, evaluation, progress)
    rows = []
    for place, (_, report) in enumerate(moment):
        losses = _require_finite(
            experiment.seeds[place], report, experiment.federations[place].names
        )
        rows.append(
            _row(experiment.seeds[place], report, losses, scores[place], progress.ledgers[place])
        )
    return progress, rows


def _row(
    seed: int, report: RoundReport, losses: Tensor, score: float | None, ledger: Ledger
) -> Json:
    sent = {"bytes": ledger.total.bytes, "paper_parameters": ledger.paper.parameters}
    loss = float(losses.mean()) if len(losses) else None  # None if no client of this kind took part
    return {"seed": seed, "round": report.round_index, "loss": loss, "validation": score, **sent}


def _require_finite(seed: int, report: RoundReport, names: Sequence[str]) -> Tensor:
    """The losses of a round (clients,); refused if one is not finite."""
    losses = report.losses.cpu()
    diverged = (~torch.isfinite(losses)).nonzero()
    if len(diverged):
        client = int(report.sampled[int(diverged[0])])
        error = DivergedError(
            f"training diverged in round {report.round_index}: "
            f"{client_label(client, names)}'s loss is not finite; lower the learning rate"
        )
        error.seed = seed
        raise error
    return losses


def _validate(
    experiment: Case, options: Options, evaluation: Evaluator, progress: Progress
) -> tuple[Progress, list[float | None]]:
    """Validation scores of all seeds; the shared tree is sent to the clients for them."""
    scores, ledgers, bests = [], [], []
    val = [fed.val for fed in experiment.federations]
    figures = local_figures(evaluation, progress.states, val)
    criterion = selection_metric(experiment.task, options.select)
    for place, state in enumerate(progress.states):
        best = progress.best[place]
        score = figures[place][criterion.name].summary().mean
        if options.select != "last" and _is_better(score, best, criterion):
            assert score is not None
            best = (score, progress.done, state)
        num_validated = int(np.count_nonzero(val[place].sizes))
        scores.append(score)
        ledgers.append(progress.ledgers[place].add_evaluation(state.shared, num_validated))
        bests.append(best)
    return progress._replace(ledgers=ledgers, best=bests), scores


def finish(
    experiment: Case,
    options: Options,
    progress: Progress,
    folder: Path | None = None,
    *,
    also: Afterwards | None = None,
) -> list[SeedResult]:
    """The final tests of all seeds of an experiment whose data are on torch's device.

    With a folder, the results are saved there, with the entries that `also` adds to each.
    """
    checkpoint = Checkpoint(folder, fingerprint(experiment, options)) if folder else None
    evaluation = build_evaluation(experiment, options, checkpoint)
    results = [
        build_result(experiment, options, evaluation, progress, place=place)
        for place in range(len(experiment.seeds))
    ]
    evaluation.close()
    if folder and checkpoint:
        for result in results if options.save == "everything" else ():
            save_models(result, folder / "models" / f"seed-{result.plan.seed}")
        added = _afterwards(also, results, lambda: checkpoint.save(progress))
        tables = [
            {**result.as_dict(), **entries} for result, entries in zip(results, added, strict=True)
        ]
        write_json(folder / "result.json", tables)
        if options.save == "metrics":
            checkpoint.drop_tensors(progress)
    return results


def restrict_to_model(model: nn.Module, tree: Params) -> Params:
    """A tree without auxiliary models' tensors: no other client uses them, so none is sent."""
    return trees.pick(tree, client_tensors(model))


def _afterwards(
    also: Afterwards | None, results: Sequence[SeedResult], save: Callable[[], int]
) -> list[Json]:
    """Entries to add to the results; if Ctrl-C stops them, the rounds are saved first."""
    try:
        return also(results) if also else [{} for _ in results]
    except KeyboardInterrupt:
        save()
        raise


def build_result(
    experiment: Case, options: Options, evaluation: Evaluator, progress: Progress, *, place: int = 0
) -> SeedResult:
    """The result of one seed: the selected round on test data."""
    fed, plan = experiment.federations[place], experiment.plans()[place]
    last, best = progress.states[place], progress.best[place]
    done, state = _selected(options, evaluation, fed, (progress.done, last, best))
    ledger = progress.ledgers[place]
    ledger = ledger.add_evaluation(state.shared, int(np.count_nonzero(fed.test.sizes)))
    if options.select != "last" and progress.done % options.validate_every:
        # `_selected` validated the last round too, which `complete_round` did not.
        ledger = ledger.add_evaluation(last.shared, int(np.count_nonzero(fed.val.sizes)))
    if options.tests == "both":
        personal = experiment.algorithm.personal(state.shared, state.private.initial)
        ledger = ledger.add_ensemble(
            restrict_to_model(experiment.model, state.private.initial),
            restrict_to_model(experiment.model, personal),
            num_trained=len(state.private.trained),
            num_clients=fed.num_clients if state.shared else 0,
        )
    times_sampled = participation(plan, experiment.total or fed.num_clients, done)
    return SeedResult(
        algorithm=experiment.algorithm,
        task=experiment.task,
        plan=replace(plan, rounds=max(progress.done, 1)),
        state=state,
        selected_round=plan.first_round + done,
        test=local_figures(evaluation, [state], [fed.test])[0],
        validation=local_figures(evaluation, [state], [fed.val])[0],
        new=new_test(evaluation, state, fed.test) if options.tests == "both" else None,
        ledger=ledger,
        sizes={
            "train": fed.train.sizes.tolist(),
            "val": fed.val.sizes.tolist(),
            "test": fed.test.sizes.tolist(),
        },
        times_sampled=times_sampled[experiment.first : experiment.first + fed.num_clients],
        names=fed.names,
    )


def _selected(
    options: Options,
    evaluation: Evaluator,
    fed: FederatedData,
    last: tuple[int, State, tuple[float, int, State] | None],
) -> tuple[int, State]:
    """The round to test and its state: the last one, or an earlier one with a better score."""
    done, state, best = last
    if options.select == "last" or best is None:
        return done, state
    criterion = selection_metric(evaluation.task, options.select)
    figures = local_figures(evaluation, [state], [fed.val])[0][criterion.name]
    score = figures.summary().mean
    return (done, state) if score is None or _is_better(score, best, criterion) else best[1:]


def selection_metric(task: Task, select: str) -> Metric:
    """The metric that rounds are selected by; the first one where none is named."""
    _, _, name = select.partition(" ")
    return task.find_metric(name) if name else task.metric


def with_selection_metric(task: Task, select: str) -> Task:
    """The task with the metric that rounds are selected by; its direction has to be right."""
    criterion = selection_metric(task, select)
    direction = "max" if criterion.higher_is_better else "min"
    if " " in select and not select.startswith(direction):
        raise InputError(
            f"options: select is '{select}', but {criterion.name} is better when "
            f"{'higher' if criterion.higher_is_better else 'lower'}; "
            f"use '{direction} {criterion.name}'"
        )
    if criterion.name in [metric.name for metric in task.all_metrics]:
        return task
    return replace(task, metrics=[*task.all_metrics, criterion])


def _is_better(
    score: float | None, best: tuple[float, int, State] | None, criterion: Metric
) -> bool:
    if score is None or best is None:
        return score is not None
    return score > best[0] if criterion.higher_is_better else score < best[0]


def participation(plan: Plan, clients: int, done: int) -> list[int]:
    """How often each client took part."""
    counts = np.zeros(clients, dtype=np.int64)
    for round_index in range(plan.first_round, plan.first_round + done):
        counts[sample_clients(plan, clients, round_index)] += 1
    return [int(count) for count in counts]
