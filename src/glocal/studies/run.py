"""Run a study, experiment by experiment, in a folder; a stopped run is resumed."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from glocal import datasets
from glocal.core import trees
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
from glocal.core.modules import params_of
from glocal.core.sampling import Plan, sample_clients
from glocal.core.store import TrainingState
from glocal.core.task import Task
from glocal.core.trees import Params
from glocal.datasets.federated import FederatedData
from glocal.datasets.fetch import no_progress
from glocal.federate.checkpoint import RunProgress
from glocal.federate.experiment import Experiment, Group, Phase
from glocal.federate.fit import warm_start_params
from glocal.federate.records import RoundRecord
from glocal.federate.requirements import require_trainable
from glocal.federate.run import Run
from glocal.personalize.class_targets import count_classes
from glocal.studies.audit import Audit, require_audit
from glocal.studies.build import (
    Components,
    build_adversary,
    build_algorithm,
    build_auxiliary,
    build_components,
    build_pretraining,
)
from glocal.studies.groups import build_phases, clients_by_group
from glocal.studies.metric_format import MetricFormat
from glocal.studies.new_client_trial import NewClientTrial, require_new_client
from glocal.studies.ordinal import OrdinalMetrics, baseline_metrics, require_ordinal
from glocal.studies.restarts import best_restarts, restarts_of
from glocal.studies.settings import ExperimentSettings, Settings, from_dict
from glocal.wire import Ledger, parse_codec


class WarmStart(NamedTuple):
    """Where an experiment starts from another: a round, and which of its models.

    `model` is "last", that round's own, or "best", the best so far. Where no round is selected on
    validation data the two are one, and it is called "best".
    """

    round_index: int
    model: str


class StudyEvent(NamedTuple):
    """A round of an experiment, or (without records) its final results, one per seed."""

    experiment: str
    rounds: int
    records: tuple[RoundRecord, ...]
    results: list[Json]


@dataclass(frozen=True)
class StudyRun:
    """Settings, the components built from them, and the folder; phases, if there are groups."""

    settings: Settings
    parts: Components
    folder: Path
    phases: tuple[Phase, ...] = ()

    def start(self, name: str, experiment: Experiment) -> Run:
        """The run of an experiment."""
        options, folder = self.settings.run.options(), experiment_folder(self.folder, name)
        return Run(experiment, folder=folder, options=options, callbacks=self._callbacks(name))

    def _callbacks(self, name: str) -> list[object]:
        """What is measured after the tests of an experiment."""
        settings, experiment = self.settings, self.settings.experiments[name]
        callbacks: list[object] = []
        if experiment.join_plan is not None and settings.new_client is not None:
            callbacks.append(NewClientTrial(settings.new_client, experiment.join_plan))
        if settings.audit is not None:
            adversary = build_adversary(experiment.pretext, parts_of(experiment, self.parts))
            callbacks.append(Audit(settings.audit, adversary))
        if settings.ordinal is not None:
            callbacks.append(OrdinalMetrics(settings.ordinal))
        return callbacks


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
    study = StudyRun(settings, parts, folder, _phases(settings, parts))
    experiments = {name: initial_experiment(study, name) for name in settings.experiments}
    _require_study(study, experiments)
    write_json(folder / "settings.json", {"format": FORMAT, **settings.as_dict()})
    write_json(folder / "federation.json", _about_data(study.parts))
    _write_baselines(study)
    for name, experiment in experiments.items():
        yield from _run_experiment(study, name, experiment)
    write_json(folder / "results.json", read_results(folder))


def _require_study(study: StudyRun, experiments: Mapping[str, Experiment]) -> None:
    """Refuse what could not run to its end, before anything is written."""
    settings, first_federation = study.settings, study.parts.federations[0]
    for index, (name, experiment) in enumerate(experiments.items()):
        own = settings.experiments[name]
        user_defined = ":" in own.algorithm  # it may have a loss of its own
        if index == 0 or user_defined or own.pretext is not None:
            require_trainable(experiment)
    settings.run.options().torch_device()
    if settings.ordinal is not None:
        require_ordinal(settings.ordinal, study.parts.task, first_federation)
    if settings.audit is not None:
        require_audit(settings.audit, study.parts.task, first_federation)
    for name, experiment in experiments.items():
        if study.phases:
            _refuse_with_groups(settings, name)
        elif settings.experiments[name].join_plan is not None:
            require_new_client(settings.new_client, first_federation, name)
        if not study.phases:
            plan = experiment.plan
            sample_clients(plan, first_federation.num_clients, plan.first_round)
        _require_resumable(study, name, experiment)


def _refuse_with_groups(settings: Settings, name: str) -> None:
    """Refuse what a study with groups cannot have."""
    own = settings.experiments[name]
    pretrains = own.pretext is not None and own.pretext.pretrain_epochs
    for option, given in {
        "pretext.pretrain_epochs": pretrains,
        "skip_seeds": own.skip_seeds,
        "join_plan": own.join_plan,
    }.items():
        if given:
            raise InputError(
                f"settings: experiments.{name} has `{option}`, and the study has groups; "
                "use one of the two"
            )


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


def _phases(settings: Settings, parts: Components) -> tuple[Phase, ...]:
    """The phases, if there are groups; they are as long as the longest experiment."""
    if not settings.groups:
        return ()
    rounds = max(plan.total_rounds for plan in plans_of(settings).values())
    return build_phases(settings.groups, parts.federations, rounds)


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


def initial_experiment(study: StudyRun, name: str) -> Experiment:
    """An experiment before its warm start is known: initial weights, nothing sent."""
    settings, own = study.settings, study.settings.experiments[name]
    parts = parts_of(own, study.parts)
    algorithm = build_algorithm(settings, own, parts)
    params = parts.params
    if own.pretext is not None:
        networks = [build_auxiliary(own.pretext, parts, seed).params() for seed in parts.seeds]
        params = tuple({**tree, **more} for tree, more in zip(parts.params, networks, strict=True))
    return Experiment(
        groups=(Group(algorithm, parts.federations, params=params),),
        plan=plans_of(settings)[name],
        seeds=parts.seeds,
        evaluation=settings.run.evaluation(),
        uplink=parse_codec(settings.plan.uplink or (), "plan.uplink"),
        phases=study.phases,
        subgroups=clients_by_group(settings.groups) if study.phases else {},
        pretraining=build_pretraining(settings, own, parts),
        about=_about(settings, name, parts),
    )


def _about(settings: Settings, name: str, parts: Components) -> Json:
    """What else must not change when a run of an experiment is resumed."""
    plain, own = settings.as_dict(), settings.experiments[name]
    about: Json = {f"{part} settings": plain[part] for part in ("data", "model")} | parts.about
    if "join_plan" in plain["experiments"][name]:
        about |= {"join_plan": plain["experiments"][name]["join_plan"]}
        about |= {"new_client": plain.get("new_client")}
    if settings.audit is not None:
        about |= {"audit": plain["audit"]}
    if own.start_from is not None:
        model = _warm_start(settings, own).model
        about |= {"start_from": own.start_from, "start_model": model}
    return about


def parts_of(experiment: ExperimentSettings, parts: Components) -> Components:
    """The components of an experiment: all seeds but those that it skips."""
    return parts.without_seeds(experiment.skip_seeds or ())


def _require_resumable(study: StudyRun, name: str, experiment: Experiment) -> None:
    """Refuse a folder of another run, or one that is past the round to be done."""
    folder = experiment_folder(study.folder, name)
    checkpoint = study.start(name, experiment).checkpoint
    assert checkpoint is not None
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
            selects = experiment.evaluation.selects
            model = f"the {start.model} model" if selects else "the model"
            raise InputError(
                f"resume: {folder} is past round {start.round_index} and did not save {model} "
                "of it; start a new run for that"
            )
    if missing and _is_finished(folder, experiment.plan):
        checkpoint.require_tensors()


def _about_data(parts: Components) -> Json:
    """The examples per client and class, for the first seed; and the metrics, the first one first.

    Reports of unfinished runs need them.
    """
    metrics = [MetricFormat.of(metric)._asdict() for metric in parts.task.all_metrics]
    return {**_class_counts(parts.task, parts.federations[0]), "metrics": metrics}


def _class_counts(task: Task, federation: FederatedData) -> Json:
    """The number of examples per client and class; nothing where targets are no classes."""
    labels = federation.train.examples.y
    is_classes = count_classes(task, federation.train.examples) is not None
    if not is_classes or bool((labels < 0).any()):
        return {}
    classes = int(labels.max()) + 1
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
        name: best_restarts(read_json(path, list), settings)
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


def _run_experiment(study: StudyRun, name: str, experiment: Experiment) -> Iterator[StudyEvent]:
    folder, plan = experiment_folder(study.folder, name), experiment.plan
    wanted = _needed_snapshots(study.settings, name)
    if _is_finished(folder, plan):
        _complete_finished(study, name, experiment, wanted)
        yield StudyEvent(name, plan.rounds, (), _read_best_results(study, folder))
        return
    run = study.start(name, _warm_started(study, name, experiment))
    _save_snapshots(folder, run, wanted)
    try:
        for records in run:
            _save_snapshots(folder, run, wanted)
            seconds = {"round": records[0].round_index, "seconds": records[0].seconds}
            append_rows(folder / "timing.jsonl", [seconds])
            yield StudyEvent(name, plan.rounds, tuple(records), [])
    except DivergedError as error:
        error.experiment = name
        raise
    run.finish()
    yield StudyEvent(name, plan.rounds, (), _read_best_results(study, folder))


def _complete_finished(
    study: StudyRun, name: str, experiment: Experiment, wanted: set[WarmStart]
) -> None:
    """What a finished experiment may still lack: it was stopped, or another one was added since."""
    folder = experiment_folder(study.folder, name)
    missing = any(not _snapshot(folder, start).exists() for start in wanted)
    run = study.start(name, experiment)
    checkpoint = run.checkpoint
    assert checkpoint is not None
    if missing and (last := checkpoint.read()):
        _save_snapshots_of(folder, experiment, last, wanted)
    if study.settings.run.save == "metrics":  # a run may stop between the results and this
        checkpoint.drop_tensors()


def _read_best_results(study: StudyRun, folder: Path) -> list[Json]:
    return best_restarts(read_json(folder / "result.json", list), study.settings)


def _is_finished(folder: Path, plan: Plan) -> bool:
    path = folder / "result.json"
    return path.exists() and bool(read_json(path, list)[0].get("rounds") == plan.total_rounds)


def _warm_started(study: StudyRun, name: str, experiment: Experiment) -> Experiment:
    """The experiment with the params and the traffic of its warm start, if it has one."""
    own, group = study.settings.experiments[name], experiment.groups[0]
    if own.start_from is None:
        return experiment
    earlier_folder = experiment_folder(study.folder, own.start_from)
    path = _snapshot(earlier_folder, _warm_start(study.settings, own))
    tensors, about = read_tensors(path)
    earlier = parts_of(study.settings.experiments[own.start_from], study.parts).seeds
    params: list[Params] = []
    ledgers: list[Ledger] = []
    for tree, seed in zip(group.params, experiment.seeds, strict=True):
        index = earlier.index(seed)
        known = {key: tensors[f"{index}/{key}"] for key in tree if f"{index}/{key}" in tensors}
        params.append({**tree, **known})
        ledgers.append(Ledger.from_dict(about["ledgers"][index]))
    started = replace(group, params=tuple(params), spent=tuple(ledgers))
    return replace(experiment, groups=(started,))


def _save_snapshots(folder: Path, run: Run, wanted: set[WarmStart]) -> None:
    """Save the models that later experiments start from."""
    _save_snapshots_of(folder, run.experiment, run.progress, wanted)


def _save_snapshots_of(
    folder: Path, experiment: Experiment, progress: RunProgress, wanted: set[WarmStart]
) -> None:
    done = experiment.plan.first_round + progress.done
    for start in sorted(wanted):
        if start.round_index == done and not _snapshot(folder, start).exists():
            tensors: Params = {}
            for index, state in enumerate(_start_states(progress, start)):
                model = warm_start_params(experiment.algorithm, state.group())
                own = trees.pick(model, params_of(experiment.algorithm.task.model))
                tensors |= trees.with_prefix(f"{index}/", own)
            ledgers = [own[0].as_dict() for own in progress.ledgers]
            write_tensors(_snapshot(folder, start), tensors, {"ledgers": ledgers})


def _start_states(progress: RunProgress, start: WarmStart) -> list[TrainingState]:
    """The state of each seed to start from: the best so far, or the last."""
    if start.model == "last":
        return list(progress.states)
    return [
        best[0].state if best[0] else state
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
        "last" if experiment.start_model == "last" and settings.run.select != "last" else "best",
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
    if experiment.start_model == "best" and settings.run.select == "last":
        raise InputError(
            f"{where}, but run.select is '{settings.run.select}', so no round is selected; "
            "set run.select to 'best' too"
        )
