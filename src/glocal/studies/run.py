"""Run a study, experiment by experiment, in a folder; a stopped run is resumed."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from glocal import datasets
from glocal.core.errors import DivergedError, InputError, suggest_name
from glocal.core.files import (
    FORMAT,
    Json,
    append_rows,
    lock_folder,
    read_json,
    read_tensors,
    require_format,
    write_json,
    write_tensors,
)
from glocal.core.sampling import Plan, sample_clients
from glocal.core.store import State
from glocal.core.trees import Params
from glocal.datasets.federated import FederatedData
from glocal.datasets.fetch import no_progress
from glocal.federate.checkpoint import Checkpoint, Progress
from glocal.federate.fitting import (
    Afterwards,
    Case,
    Moment,
    Options,
    fingerprint,
    finish,
    move_to_device,
    require_trainable,
    start_or_resume,
    train,
    warm_start_params,
)
from glocal.federate.result import SeedResult
from glocal.federate.scenario import Scenario, Story
from glocal.studies.audit import audit_experiment, require_audit
from glocal.studies.build import (
    Components,
    build_adversary,
    build_algorithm,
    build_auxiliary,
    build_components,
    build_pretraining,
)
from glocal.studies.groups import build_scenario
from glocal.studies.new_client_trial import join_new_clients, require_new_client
from glocal.studies.ordinal import baseline_metrics, measure_ordinal, require_ordinal
from glocal.studies.restarts import best_restarts, restarts_of
from glocal.studies.settings import ExperimentSettings, Settings, from_dict
from glocal.wire import Ledger


class WarmStart(NamedTuple):
    """Where an experiment starts from another: a round, and which of its models.

    `model` is "last", that round's own, or "best", the best so far. Where no round is selected on
    validation data the two are one, and it is called "best".
    """

    round_index: int
    model: str


class StudyEvent(NamedTuple):
    """A round of an experiment, or (moment None) its final results, one per seed."""

    experiment: str
    rounds: int
    moment: Moment | None
    results: list[Json]


@dataclass(frozen=True)
class StudyRun:
    """Settings, the components built from them, and the folder; a scenario, if there are groups."""

    settings: Settings
    parts: Components
    options: Options
    folder: Path
    scenario: Scenario | None = None

    def training(self, experiment: Case) -> "Steady | Story":
        """How an experiment trains."""
        if self.scenario is None:
            return Steady(experiment, self.options)
        return Story(
            replace(experiment, federations=self.scenario.chapters[0].federations),
            self.scenario,
            self.options,
        )


@dataclass(frozen=True)
class Steady:
    """An experiment whose clients all take part from the first round to the last.

    It has the methods of `Story`, which is for clients that join and leave.
    """

    case: Case
    options: Options
    also: Afterwards | None = None

    def require(self) -> None:
        """Refuse what could not run to its end."""
        for federation in self.case.federations:
            require_trainable(self.case, federation, self.options)

    def move_to_device(self) -> "Steady":
        """The same with data and weights on torch's device."""
        return replace(self, case=move_to_device(self.case, self.options))

    def fingerprint(self) -> Json:
        """What must not change when a run is resumed."""
        return fingerprint(self.case, self.options)

    def start_or_resume(self, folder: Path) -> Progress:
        """The state before the first round, or the checkpoint's."""
        return start_or_resume(self.case, self.options, folder)

    def train(self, progress: Progress, folder: Path) -> Iterator[Moment]:
        """The rounds, one by one."""
        return train(self.case, self.options, progress, folder)

    def finish(self, progress: Progress, folder: Path) -> list[SeedResult]:
        """The final evaluation."""
        return finish(self.case, self.options, progress, folder, also=self.also)


def run_study(
    settings: Settings, folder: Path, *, report: datasets.ProgressCallback = no_progress
) -> Iterator[StudyEvent]:
    """Run all experiments in order; those that the folder has finished are not run again.

    What cannot run is refused before anything is written; so is a folder that is in use.
    """
    with lock_folder(folder):
        yield from _run_locked(settings, folder, report)


def _run_locked(
    settings: Settings, folder: Path, report: datasets.ProgressCallback
) -> Iterator[StudyEvent]:
    settings = resolve(settings)
    parts = build_components(settings, report)
    study = StudyRun(settings, parts, settings.run, folder, _scenario(settings, parts))
    experiments = {name: initial_case(settings, name, study.parts) for name in settings.experiments}
    for index, (name, experiment) in enumerate(experiments.items()):
        user_defined = ":" in settings.experiments[name].algorithm  # it may have a loss of its own
        if index == 0 or user_defined or settings.experiments[name].pretext is not None:
            study.training(experiment).require()
    study.options.torch_device()
    if study.scenario is not None and any(
        experiment.pretraining for experiment in experiments.values()
    ):
        raise InputError(
            "settings: an experiment has `pretext.pretrain_epochs`, and the study has groups; "
            "use one of the two"
        )
    if study.scenario is not None and any(
        experiment.skip_seeds for experiment in settings.experiments.values()
    ):
        raise InputError(
            "settings: an experiment has `skip_seeds`, and the study has groups; use one of the two"
        )
    if settings.ordinal is not None:
        require_ordinal(settings.ordinal, study.parts.federations[0])
    if settings.audit is not None:
        require_audit(settings.audit, next(iter(experiments.values())), study.parts.federations[0])
    for name, experiment in experiments.items():
        if settings.experiments[name].join_plan is not None:
            if study.scenario is not None:
                raise InputError(
                    f"settings: experiments.{name} has a join_plan, and the study has groups; "
                    "use one of the two"
                )
            require_new_client(settings.new_client, study.parts.federations[0], name)
        sample_clients(
            experiment.plan, study.parts.federations[0].num_clients, experiment.plan.first_round
        )
        _require_resumable(study, name, experiment)
    write_json(folder / "settings.json", {"format": FORMAT, **settings.as_dict()})
    write_json(folder / "federation.json", _class_counts(study.parts.federations[0]))
    _write_baselines(study)
    for name, experiment in experiments.items():
        yield from _run_experiment(study, name, experiment)
    write_json(folder / "results.json", read_results(folder))


def _write_baselines(study: StudyRun) -> None:
    """Write the baselines, one per partition of the data, unless they are there already."""
    ordinal, path = study.settings.ordinal, study.folder / "baselines.json"
    if ordinal is None or not ordinal.bag_of_words:
        return
    first_run: dict[int, int] = {}  # of each partition
    for index, run in enumerate(restarts_of(study.settings.plan)):
        first_run.setdefault(run.data_seed, index)
    seeds = sorted(first_run)
    if path.exists():
        saved_rows = next(iter(read_json(path, dict).values()))
        if [row["seed"] for row in saved_rows] == seeds:
            return
    rows: dict[str, list[Json]] = {}
    for seed in seeds:
        metrics = baseline_metrics(study.parts.federations[first_run[seed]], ordinal)
        for name, values in metrics.items():
            rows.setdefault(name, []).append({"seed": seed, **values})
    write_json(path, rows)


def _scenario(settings: Settings, parts: Components) -> Scenario | None:
    """The scenario, if there are groups; it is as long as the longest experiment."""
    rounds = max(plan.total_rounds for plan in plans_of(settings).values())
    return build_scenario(settings.groups, parts.federations, rounds) if settings.groups else None


def resolve(settings: Settings) -> Settings:
    """The same settings with the start round of every warm start.

    A longer run then still starts its later experiments where it did before.
    """
    _check_experiments(settings)
    starts = {
        name: _warm_start(settings, experiment).round_index
        for name, experiment in settings.experiments.items()
        if experiment.start_from is not None
    }
    return replace(
        settings,
        experiments={
            name: replace(experiment, start_round=starts.get(name))
            for name, experiment in settings.experiments.items()
        },
    )


def initial_case(settings: Settings, name: str, parts: Components) -> Case:
    """An experiment before its warm start is known: initial weights, nothing sent."""
    plain, parts = settings.as_dict(), parts_of(settings.experiments[name], parts)
    algorithm = build_algorithm(settings, settings.experiments[name], parts)
    about = {
        f"{part} settings": plain[part] for part in ("data", "model", "optimizer")
    } | parts.about
    if "join_plan" in plain["experiments"][name]:
        about |= {
            "join_plan": plain["experiments"][name]["join_plan"],
            "new_client": plain.get("new_client"),
        }
    params, pretext = parts.params, settings.experiments[name].pretext
    if pretext is not None:
        auxiliary = [
            build_auxiliary(settings, pretext, parts, seed)[1].params for seed in parts.seeds
        ]
        params = tuple({**own, **more} for own, more in zip(parts.params, auxiliary, strict=True))
        about |= {"pretext": plain["experiments"][name]["pretext"]}
    if settings.audit is not None:
        about |= {"audit": plain["audit"]}
    if settings.experiments[name].start_from is not None:
        about |= {
            "start_from": settings.experiments[name].start_from,
            "start_model": _warm_start(settings, settings.experiments[name]).model,
        }
    ledgers = tuple(Ledger() for _ in parts.seeds)
    before = build_pretraining(settings, settings.experiments[name], parts)
    plan = plans_of(settings)[name]
    return Case(
        algorithm,
        parts.task,
        plan,
        parts.seeds,
        params,
        parts.federations,
        ledgers,
        about,
        pretraining=before,
    )


def parts_of(experiment: ExperimentSettings, parts: Components) -> Components:
    """The components of an experiment: all seeds but those that it skips."""
    return parts.without_seeds(experiment.skip_seeds or ())


def _require_resumable(study: StudyRun, name: str, experiment: Case) -> None:
    """Refuse a folder of another run, or one that is past the round to be done."""
    folder = experiment_folder(study.folder, name)
    checkpoint = Checkpoint(folder, study.training(experiment).fingerprint())
    rounds_done = checkpoint.rounds_done()
    if rounds_done < experiment.plan.rounds:
        checkpoint.require_tensors()
    if rounds_done > experiment.plan.rounds:
        raise InputError(
            f"resume: {folder} has done {rounds_done} rounds, "
            f"and plan.rounds is {experiment.plan.rounds}; choose {rounds_done} or more"
        )
    missing = [
        start
        for start in _needed_snapshots(study.settings, name)
        if not _snapshot(folder, start).exists()
    ]
    for start in sorted(missing):
        if start.round_index < experiment.plan.first_round + rounds_done:
            model = f"the {start.model} model" if study.options.select == "best" else "the model"
            raise InputError(
                f"resume: {folder} is past round {start.round_index} and did not save {model} "
                "of it; start a new run for that"
            )
    if missing and _is_finished(folder, experiment.plan):
        checkpoint.require_tensors()


def _class_counts(federation: FederatedData) -> Json:
    """The number of examples per client and class, for the first seed."""
    classes = int(federation.train.examples.y.max()) + 1
    counts = {
        part: datasets.class_counts(getattr(federation, part), classes).tolist()
        for part in ("train", "test")
    }
    return {"classes": classes, **counts}


def is_run(folder: Path) -> bool:
    """Whether the folder holds a run."""
    return (folder / "settings.json").exists()


def read_settings(folder: Path) -> Settings:
    """The settings of the run in a folder."""
    path = folder / "settings.json"
    return from_dict(require_format(read_json(path, dict), path))


def read_results(folder: Path) -> dict[str, list[Json]]:
    """The results of every finished experiment, one per seed."""
    settings = read_settings(folder)
    paths = {name: experiment_folder(folder, name) / "result.json" for name in settings.experiments}
    return {
        name: best_restarts(read_json(path, list), settings.plan)
        for name, path in paths.items()
        if path.exists()
    }


def experiment_folder(folder: Path, name: str) -> Path:
    """The folder of an experiment: its name in small letters and dashes."""
    return folder / "experiments" / slug(name)


def slug(name: str) -> str:
    """A name as a folder: small letters, digits and dashes.

    >>> slug("LG-FedAvg, 2 classes")
    'lg-fedavg-2-classes'
    """
    folder = re.sub(r"\W+", "-", name.lower()).strip("-")
    if not folder:
        raise InputError(f"settings: '{name}' is not a name; use letters or digits")
    return folder


def _run_experiment(study: StudyRun, name: str, experiment: Case) -> Iterator[StudyEvent]:
    folder, plan = experiment_folder(study.folder, name), experiment.plan
    wanted = _needed_snapshots(study.settings, name)
    if _is_finished(folder, plan):
        checkpoint = Checkpoint(folder, study.training(experiment).fingerprint())
        missing = any(not _snapshot(folder, start).exists() for start in wanted)
        if missing and (last := checkpoint.read()):  # an experiment that needs it was added since
            _save_snapshot(folder, experiment, last, wanted)
        if study.options.save == "metrics":  # a run may have stopped between the results and this
            checkpoint.drop_tensors()
        yield StudyEvent(name, plan.rounds, None, _read_best_results(study, folder))
        return
    start, spent = _initial_params(study, study.settings.experiments[name])
    params = tuple({**own, **known} for own, known in zip(experiment.params, start, strict=True))
    training = study.training(replace(experiment, params=params, spent=spent)).move_to_device()
    progress = training.start_or_resume(folder)
    _save_snapshot(folder, experiment, progress, wanted)
    try:
        for moment in training.train(progress, folder):
            progress = moment.progress
            _save_snapshot(folder, experiment, progress, wanted)
            append_rows(
                folder / "timing.jsonl",
                [{"round": moment.rows[0]["round"], "seconds": moment.seconds}],
            )
            yield StudyEvent(name, plan.rounds, moment, [])
    except DivergedError as error:
        error.experiment = name
        raise
    _with_final_measurements(study, name, training).finish(progress, folder)
    yield StudyEvent(name, plan.rounds, None, _read_best_results(study, folder))


def _read_best_results(study: StudyRun, folder: Path) -> list[Json]:
    return best_restarts(read_json(folder / "result.json", list), study.settings.plan)


def _with_final_measurements(
    study: StudyRun, name: str, training: Steady | Story
) -> Steady | Story:
    """Add what is measured after the test: a new client, an audit, ordinal metrics."""
    settings, experiment = study.settings, study.settings.experiments[name]
    join_plan, new_client, audit, ordinal = (
        experiment.join_plan,
        settings.new_client,
        settings.audit,
        settings.ordinal,
    )
    if not isinstance(training, Steady) or (
        join_plan is None and audit is None and ordinal is None
    ):
        return training

    def also(results: Sequence[SeedResult]) -> list[Json]:
        extra: list[Json] = [{} for _ in results]

        def add(key: str, measurements: Sequence[Json]) -> None:
            for row, measured in zip(extra, measurements, strict=True):
                row[key] = measured

        if join_plan is not None and new_client is not None:
            joined = join_new_clients(
                training.case, results, study.options, new_client=new_client, join_plan=join_plan
            )
            add("new_client", joined)
        if audit is not None:
            adversary = build_adversary(experiment.pretext, parts_of(experiment, study.parts))
            add("audit", audit_experiment(training.case, results, audit, adversary))
        if ordinal is not None:
            add("ordinal", measure_ordinal(training.case, results, study.options, ordinal))
        return extra

    return replace(training, also=also)


def _is_finished(folder: Path, plan: Plan) -> bool:
    path = folder / "result.json"
    return path.exists() and bool(read_json(path, list)[0].get("rounds") == plan.total_rounds)


def _initial_params(
    study: StudyRun, experiment: ExperimentSettings
) -> tuple[tuple[Params, ...], tuple[Ledger, ...]]:
    """Initial parameters and ledgers: new ones, or those of the warm start."""
    parts = parts_of(experiment, study.parts)
    if experiment.start_from is None:
        return parts.params, tuple(Ledger() for _ in parts.seeds)
    tensors, about = read_tensors(
        _snapshot(
            experiment_folder(study.folder, experiment.start_from),
            _warm_start(study.settings, experiment),
        )
    )
    earlier = parts_of(study.settings.experiments[experiment.start_from], study.parts).seeds
    params: list[Params] = []
    ledgers: list[Ledger] = []
    for seed in parts.seeds:
        index = earlier.index(seed)
        params.append({name: tensors[f"{index}/{name}"] for name in parts.params[0]})
        ledgers.append(Ledger.from_dict(about["ledgers"][index]))
    return tuple(params), tuple(ledgers)


def _save_snapshot(
    folder: Path, experiment: Case, progress: Progress, wanted: set[WarmStart]
) -> None:
    """Save the models that later experiments start from."""
    done = experiment.plan.first_round + progress.done
    for start in sorted(wanted):
        if start.round_index == done and not _snapshot(folder, start).exists():
            tensors: Params = {}
            for index, state in enumerate(_start_states(progress, start)):
                model = warm_start_params(experiment.algorithm, state)
                tensors |= {f"{index}/{name}": tensor for name, tensor in model.items()}
            write_tensors(
                _snapshot(folder, start),
                tensors,
                {"ledgers": [ledger.as_dict() for ledger in progress.ledgers]},
            )


def _start_states(progress: Progress, start: WarmStart) -> list[State]:
    """The state of each seed to start from: the best so far, or the last."""
    if start.model == "last":
        return progress.states
    return [
        best[2] if best else state
        for best, state in zip(progress.best, progress.states, strict=True)
    ]


def _snapshot(folder: Path, start: WarmStart) -> Path:
    suffix = "-last" if start.model == "last" else ""
    return folder / "snapshots" / f"round-{start.round_index:05d}{suffix}.safetensors"


def _needed_snapshots(settings: Settings, name: str) -> set[WarmStart]:
    return {
        _warm_start(settings, experiment)
        for experiment in settings.experiments.values()
        if experiment.start_from == name
    }


def _warm_start(settings: Settings, experiment: ExperimentSettings) -> WarmStart:
    assert experiment.start_from is not None
    plan = plans_of(settings)[experiment.start_from]
    start = plan.total_rounds if experiment.start_round is None else experiment.start_round
    if not plan.first_round < start <= plan.total_rounds:
        raise InputError(
            f"settings: start_round is {start}, but an experiment can start from "
            f"{experiment.start_from} after {plan.first_round + 1} to {plan.total_rounds} rounds; "
            "choose one of those"
        )
    return WarmStart(
        start,
        "last" if experiment.start_model == "last" and settings.run.select == "best" else "best",
    )


def plans_of(settings: Settings) -> dict[str, Plan]:
    """Each experiment's plan; one with a warm start continues the numbering of rounds."""
    common = settings.plan
    plans: dict[str, Plan] = {}
    for name, experiment in settings.experiments.items():
        rounds = common.rounds if experiment.rounds is None else experiment.rounds
        clients_per_round = (
            common.clients_per_round
            if experiment.clients_per_round is None
            else experiment.clients_per_round
        )
        plans[name] = Plan(
            rounds,
            clients_per_round,
            common.local_epochs,
            common.batch_size,
            common.seed,
            max_tokens=common.max_tokens,
        )
        if experiment.start_from is not None:
            start = (
                plans[experiment.start_from].total_rounds
                if experiment.start_round is None
                else experiment.start_round
            )
            plans[name] = replace(plans[name], first_round=start)
    return plans


def _check_experiments(settings: Settings) -> None:
    """Refuse a study that could not run to its end, before it starts."""
    if not settings.experiments:
        raise InputError(
            "settings: there are no experiments; "
            "add a table such as [experiments.LG] with algorithm = 'lg_fedavg'"
        )
    seen: dict[Path, str] = {}
    for name, experiment in settings.experiments.items():
        if experiment.start_from is not None and experiment.start_from not in seen.values():
            raise InputError(
                f"settings: experiments.{name}.start_from is '{experiment.start_from}', "
                "which is not an earlier experiment; "
                f"{suggest_name(experiment.start_from, seen.values())}"
            )
        missing = (
            {*(settings.experiments[experiment.start_from].skip_seeds or ())}
            - {*(experiment.skip_seeds or ())}
            if experiment.start_from
            else set()
        )
        if missing:
            raise InputError(
                f"settings: experiments.{name} starts from {experiment.start_from}, "
                f"which skips seed {min(missing)}; skip it too"
            )
        twin = seen.setdefault(experiment_folder(Path(), name), name)
        if twin != name:
            raise InputError(
                f"settings: the experiments '{twin}' and '{name}' would share a folder; rename one"
            )
    plans_of(settings)
    for name, experiment in settings.experiments.items():
        _require_start_model(settings, name)
        if experiment.start_from is not None:
            _warm_start(settings, experiment)


def _require_start_model(settings: Settings, name: str) -> None:
    """Refuse a `start_model` that is unknown or has no effect."""
    experiment, where = (
        settings.experiments[name],
        f"settings: experiments.{name}.start_model is '{settings.experiments[name].start_model}'",
    )
    if experiment.start_model not in (None, "best", "last"):
        raise InputError(f"{where}; it must be 'best' (so far, on validation data) or 'last'")
    if experiment.start_model and experiment.start_from is None:
        raise InputError(
            f"{where}, but it starts from no other experiment; name one with `start_from`"
        )
    if experiment.start_model == "best" and settings.run.select != "best":
        raise InputError(
            f"{where}, but run.select is '{settings.run.select}', so no round is selected; "
            "set run.select to 'best' too"
        )
