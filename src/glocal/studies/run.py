"""Run a study case by case in a folder of its own, from wherever the folder left off."""

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
from glocal.federate.result import Result
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
    """Where a case takes over from another: after which round, with the model of that round ("last") or the "best" until then.

    Where no round is chosen on validation data the two are one, called "best".
    """

    round_index: int
    model: str


class StudyEvent(NamedTuple):
    """What a study's caller sees: a case's next round, or (moment None) its final results, one per seed."""

    experiment: str
    rounds: int
    moment: Moment | None
    results: list[Json]


@dataclass(frozen=True)
class StudyRun:
    """Settings, the parts made of them, and the folder they run in; a scenario, if devices come, go or change."""

    settings: Settings
    parts: Components
    options: Options
    folder: Path
    scenario: Scenario | None = None

    def training(self, experiment: Case) -> "Steady | Story":
        """How a case trains."""
        if self.scenario is None:
            return Steady(experiment, self.options)
        return Story(
            replace(experiment, federations=self.scenario.chapters[0].federations),
            self.scenario,
            self.options,
        )


@dataclass(frozen=True)
class Steady:
    """A case in which all devices are there all the time: what a `Story` can do, the plain way."""

    case: Case
    options: Options
    also: Afterwards | None = None

    def require(self) -> None:
        """Refuse what could not run to its end."""
        for federation in self.case.federations:
            require_trainable(self.case, federation, self.options)

    def move_to_device(self) -> "Steady":
        """The same with data and weights on the computing device."""
        return replace(self, case=move_to_device(self.case, self.options))

    def fingerprint(self) -> Json:
        """What must be the same for a run to be continued."""
        return fingerprint(self.case, self.options)

    def start_or_resume(self, folder: Path) -> Progress:
        """Where to start."""
        return start_or_resume(self.case, self.options, folder)

    def train(self, progress: Progress, folder: Path) -> Iterator[Moment]:
        """Rounds as they happen."""
        return train(self.case, self.options, progress, folder)

    def finish(self, progress: Progress, folder: Path) -> list[Result]:
        """The final tests."""
        return finish(self.case, self.options, progress, folder, also=self.also)


def run_study(
    settings: Settings, folder: Path, *, report: datasets.ProgressCallback = no_progress
) -> Iterator[StudyEvent]:
    """All cases in order; what the folder has finished is not done again.

    What cannot run is refused before anything is written; so is a folder that is being run already.
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
    for place, (name, experiment) in enumerate(experiments.items()):
        of_ones_own = ":" in settings.experiments[name].algorithm  # it may have a loss of its own
        if place == 0 or of_ones_own or settings.experiments[name].pretext is not None:
            study.training(experiment).require()
    study.options.torch_device()
    if study.scenario is not None and any(
        experiment.pretraining for experiment in experiments.values()
    ):
        raise InputError(
            "settings: a case has `learns.pretrain`, and there are groups that arrive; use one of the two"
        )
    if study.scenario is not None and any(
        experiment.skip_seeds for experiment in settings.experiments.values()
    ):
        raise InputError(
            "settings: a case has `without`, and there are groups that arrive; leave no seeds out there"
        )
    if settings.ordinal is not None:
        require_ordinal(settings.ordinal, study.parts.federations[0])
    if settings.audit is not None:
        require_audit(settings.audit, next(iter(experiments.values())), study.parts.federations[0])
    for name, experiment in experiments.items():
        if settings.experiments[name].join_plan is not None:
            if study.scenario is not None:
                raise InputError(
                    f"settings: experiments.{name} has a welcome, and there are groups that arrive; use one of the two"
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
    """Baselines, one per deal of the data, if the study has any and they are not there yet."""
    ordinal, path = study.settings.ordinal, study.folder / "baselines.json"
    if ordinal is None or not ordinal.bag_of_words:
        return
    deals = {
        run.data_seed: place
        for place, run in reversed([*enumerate(restarts_of(study.settings.plan))])
    }
    if path.exists() and [
        row["seed"] for row in next(iter(read_json(path, dict).values()))
    ] == sorted(deals):
        return
    found = {
        deal: baseline_metrics(study.parts.federations[place], ordinal)
        for deal, place in sorted(deals.items())
    }
    names = next(iter(found.values()))
    write_json(
        path, {name: [{"seed": deal, **of[name]} for deal, of in found.items()] for name in names}
    )


def _scenario(settings: Settings, parts: Components) -> Scenario | None:
    """What happens while the cases train, if groups are named; it lasts as long as the longest of them."""
    rounds = max(plan.total_rounds for plan in plans_of(settings).values())
    return build_scenario(settings.groups, parts.federations, rounds) if settings.groups else None


def resolve(settings: Settings) -> Settings:
    """The same settings with every case's start written out, so that a longer run starts its later cases where it did before."""
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
    """A case before its start is known: initial weights, nothing sent."""
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
    spent, params, pretext = (
        tuple(Ledger() for _ in parts.seeds),
        parts.params,
        settings.experiments[name].pretext,
    )
    if pretext is not None:
        extra = [build_auxiliary(settings, pretext, parts, seed)[1].params for seed in parts.seeds]
        params = tuple({**own, **more} for own, more in zip(parts.params, extra, strict=True))
        about |= {"pretext": plain["experiments"][name]["pretext"]}
    if settings.audit is not None:
        about |= {"audit": plain["audit"]}
    if settings.experiments[name].start_from is not None:
        about |= {
            "start_from": settings.experiments[name].start_from,
            "start_model": _warm_start(settings, settings.experiments[name]).model,
        }
    before = build_pretraining(settings, settings.experiments[name], parts)
    plan = plans_of(settings)[name]
    return Case(
        algorithm,
        parts.model,
        plan,
        parts.seeds,
        params,
        parts.federations,
        spent,
        about,
        pretraining=before,
        metric=parts.metric,
    )


def parts_of(experiment: ExperimentSettings, parts: Components) -> Components:
    """What a case runs with: all seeds but those that it leaves out."""
    return parts.without_seeds(experiment.skip_seeds or ())


def _require_resumable(study: StudyRun, name: str, experiment: Case) -> None:
    """Refuse to go on with something else than the folder holds, or to go back."""
    folder = experiment_folder(study.folder, name)
    checkpoint = Checkpoint(folder, study.training(experiment).fingerprint())
    rounds_done = checkpoint.rounds_done()
    if rounds_done < experiment.plan.rounds:
        checkpoint.require_tensors()
    if rounds_done > experiment.plan.rounds:
        raise InputError(
            f"resume: {folder} has done {rounds_done} rounds, and plan.rounds is {experiment.plan.rounds}; choose {rounds_done} or more"
        )
    missing = [
        start
        for start in _needed_snapshots(study.settings, name)
        if not _snapshot(folder, start).exists()
    ]
    for start in sorted(missing):
        if start.round_index < experiment.plan.first_round + rounds_done:
            of = f"the {start.model} model" if study.options.select == "best" else "the model"
            raise InputError(
                f"resume: {folder} is past round {start.round_index} and has not kept {of} of it; start a new run for that"
            )
    if missing and _is_finished(folder, experiment.plan):
        checkpoint.require_tensors()


def _class_counts(federation: FederatedData) -> Json:
    """How many examples of each class every device of the first seed holds."""
    classes = int(federation.train.examples.y.max()) + 1
    counts = {
        part: datasets.class_counts(getattr(federation, part), classes).tolist()
        for part in ("train", "test")
    }
    return {"classes": classes, **counts}


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run which was begun."""
    return (folder / "settings.json").exists()


def read_settings(folder: Path) -> Settings:
    """The settings that a run was started with."""
    path = folder / "settings.json"
    return from_dict(require_format(read_json(path, dict), path))


def read_results(folder: Path) -> dict[str, list[Json]]:
    """Every finished case's results, one per seed."""
    settings = read_settings(folder)
    paths = {name: experiment_folder(folder, name) / "result.json" for name in settings.experiments}
    return {
        name: best_restarts(read_json(path, list), settings.plan)
        for name, path in paths.items()
        if path.exists()
    }


def experiment_folder(folder: Path, name: str) -> Path:
    """Where a case lives: its name in small letters and dashes."""
    return folder / "experiments" / slug(name)


def slug(name: str) -> str:
    """A name as a folder: small letters, figures and dashes.

    >>> slug("LG-FedAvg, 2 classes")
    'lg-fedavg-2-classes'
    """
    made = re.sub(r"\W+", "-", name.lower()).strip("-")
    if not made:
        raise InputError(f"settings: '{name}' is no name; use letters or figures")
    return made


def _run_experiment(study: StudyRun, name: str, experiment: Case) -> Iterator[StudyEvent]:
    folder, plan = experiment_folder(study.folder, name), experiment.plan
    wanted = _needed_snapshots(study.settings, name)
    if _is_finished(folder, plan):
        checkpoint = Checkpoint(folder, study.training(experiment).fingerprint())
        if any(not _snapshot(folder, start).exists() for start in wanted) and (
            last := checkpoint.read()
        ):
            _save_snapshot(folder, experiment, last, wanted)  # for a case that has been added since
        if study.options.save == "metrics":  # a stop may have come between the figures and this
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
    """Once a case is tested, a newcomer is taken in if it has a welcome, and it is audited or measured as the study says."""
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

    def also(results: Sequence[Result]) -> list[Json]:
        told: list[Json] = [{} for _ in results]
        if join_plan is not None and new_client is not None:
            met = join_new_clients(
                training.case, results, study.options, new_client=new_client, join_plan=join_plan
            )
            told = [{**row, "new_client": arrival} for row, arrival in zip(told, met, strict=True)]
        if audit is not None:
            read = audit_experiment(
                training.case,
                results,
                audit,
                build_adversary(experiment.pretext, parts_of(experiment, study.parts)),
            )
            told = [{**row, "audit": found} for row, found in zip(told, read, strict=True)]
        if ordinal is not None:
            off = measure_ordinal(training.case, results, study.options, ordinal)
            told = [{**row, "ordinal": found} for row, found in zip(told, off, strict=True)]
        return told

    return replace(training, also=also)


def _is_finished(folder: Path, plan: Plan) -> bool:
    path = folder / "result.json"
    return path.exists() and bool(read_json(path, list)[0].get("rounds") == plan.total_rounds)


def _initial_params(
    study: StudyRun, experiment: ExperimentSettings
) -> tuple[tuple[Params, ...], tuple[Ledger, ...]]:
    """Initial parameters and traffic so far: fresh, or as an earlier case had them."""
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
    places = [earlier.index(seed) for seed in parts.seeds]
    params = tuple(
        {name: tensors[f"{place}/{name}"] for name in parts.params[0]} for place in places
    )
    return params, tuple(Ledger.from_dict(about["ledgers"][place]) for place in places)


def _save_snapshot(
    folder: Path, experiment: Case, progress: Progress, wanted: set[WarmStart]
) -> None:
    """Keep the models that later cases start from."""
    done = experiment.plan.first_round + progress.done
    for start in sorted(wanted):
        if start.round_index == done and not _snapshot(folder, start).exists():
            models = [
                warm_start_params(experiment.algorithm, state)
                for state in _start_states(progress, start)
            ]
            tensors = {
                f"{place}/{name}": tensor
                for place, model in enumerate(models)
                for name, tensor in model.items()
            }
            write_tensors(
                _snapshot(folder, start),
                tensors,
                {"ledgers": [ledger.as_dict() for ledger in progress.ledgers]},
            )


def _start_states(progress: Progress, start: WarmStart) -> list[State]:
    """Each seed's state to start from; there is a best one where rounds are chosen on validation data."""
    if start.model == "last":
        return progress.states
    return [
        best[2] if best else state
        for best, state in zip(progress.best, progress.states, strict=True)
    ]


def _snapshot(folder: Path, start: WarmStart) -> Path:
    of = "-last" if start.model == "last" else ""
    return folder / "snapshots" / f"round-{start.round_index:05d}{of}.safetensors"


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
        done = f"{plan.first_round + 1} to {plan.total_rounds} rounds done"
        raise InputError(
            f"settings: start_round is {start}, but one can go on from {experiment.start_from} with {done}; choose one of those"
        )
    return WarmStart(
        start,
        "last" if experiment.start_model == "last" and settings.run.select == "best" else "best",
    )


def plans_of(settings: Settings) -> dict[str, Plan]:
    """Each case's plan; a case that starts after another continues its numbering."""
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
            "settings: there are no cases; add a table such as [experiments.LG] with algorithm = 'lg_fedavg'"
        )
    seen: dict[Path, str] = {}
    for name, experiment in settings.experiments.items():
        if experiment.start_from is not None and experiment.start_from not in seen.values():
            raise InputError(
                f"settings: experiments.{name}.start_from is '{experiment.start_from}', which is no earlier case; {suggest_name(experiment.start_from, seen.values())}"
            )
        missing = (
            {*(settings.experiments[experiment.start_from].skip_seeds or ())}
            - {*(experiment.skip_seeds or ())}
            if experiment.start_from
            else set()
        )
        if missing:
            raise InputError(
                f"settings: experiments.{name} starts from {experiment.start_from}, which runs without seed {min(missing)}; leave it out too"
            )
        twin = seen.setdefault(experiment_folder(Path(), name), name)
        if twin != name:
            raise InputError(
                f"settings: the cases '{twin}' and '{name}' would share a folder; rename one"
            )
    plans_of(settings)
    for name, experiment in settings.experiments.items():
        _require_start_model(settings, name)
        if experiment.start_from is not None:
            _warm_start(settings, experiment)


def _require_start_model(settings: Settings, name: str) -> None:
    """Refuse an `start_model` that is none, or that nothing would read."""
    experiment, where = (
        settings.experiments[name],
        f"settings: experiments.{name}.start_model is '{settings.experiments[name].start_model}'",
    )
    if experiment.start_model not in (None, "best", "last"):
        raise InputError(f"{where}; it must be 'best' (until then, on validation data) or 'last'")
    if experiment.start_model and experiment.start_from is None:
        raise InputError(f"{where}, and it starts from no other case; name one with `after`")
    if experiment.start_model == "best" and settings.run.select != "best":
        raise InputError(
            f"{where}, and run.select is '{settings.run.select}', so that no round is chosen; let that be 'best' too"
        )
