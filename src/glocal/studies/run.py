"""Run a study case by case in a folder of its own, from wherever the folder left off."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from glocal import datasets
from glocal.core.errors import DivergedError, InputError, nearest
from glocal.core.files import Json, alone, append_rows, read_json, read_tensors, write_json, write_tensors
from glocal.core.sampling import Plan, choose_cohort
from glocal.core.store import State
from glocal.core.trees import Params
from glocal.datasets.federated import Federation
from glocal.datasets.fetch import unreported
from glocal.federate.checkpoint import Checkpoint, Progress
from glocal.federate.fitting import (
    Afterwards,
    Case,
    Moment,
    Options,
    beginning,
    fingerprint,
    finish,
    placed,
    require_fit,
    train,
    warm_params,
)
from glocal.federate.result import Result
from glocal.federate.scenario import Scenario, Story
from glocal.studies.arrival import arrive, require_newcomer
from glocal.studies.audit import audited, require_audit
from glocal.studies.build import Parts, build_algorithm, build_auxiliary, build_critic, build_parts, build_pretraining
from glocal.studies.groups import build_scenario
from glocal.studies.ordinal import compared, measured, require_ordinal
from glocal.studies.settings import CaseSettings, Settings, from_dict
from glocal.studies.tries import best_tries, tries_of
from glocal.wire import Ledger


class Start(NamedTuple):
    """Where a case takes over from another: after which round, with the model of that round ("last") or the "best" until then.

    Where no round is chosen on validation data the two are one, called "best".
    """

    round_index: int
    model: str


class Step(NamedTuple):
    """What a study's caller sees: a case's next round, or (moment None) its final results, one per seed."""

    case: str
    rounds: int
    moment: Moment | None
    results: list[Json]


@dataclass(frozen=True)
class Study:
    """Settings, the parts made of them, and the folder they run in; a scenario, if devices come, go or change."""

    settings: Settings
    parts: Parts
    options: Options
    folder: Path
    scenario: Scenario | None = None

    def training(self, case: Case) -> "Steady | Story":
        """How a case trains."""
        if self.scenario is None:
            return Steady(case, self.options)
        return Story(replace(case, federations=self.scenario.chapters[0].federations), self.scenario, self.options)


@dataclass(frozen=True)
class Steady:
    """A case in which all devices are there all the time: what a `Story` can do, the plain way."""

    case: Case
    options: Options
    also: Afterwards | None = None

    def require(self) -> None:
        """Refuse what could not run to its end."""
        for federation in self.case.federations:
            require_fit(self.case, federation, self.options)

    def placed(self) -> "Steady":
        """The same with data and weights on the computing device."""
        return replace(self, case=placed(self.case, self.options))

    def fingerprint(self) -> Json:
        """What must be the same for a run to be continued."""
        return fingerprint(self.case, self.options)

    def beginning(self, folder: Path) -> Progress:
        """Where to start."""
        return beginning(self.case, self.options, folder)

    def train(self, progress: Progress, folder: Path) -> Iterator[Moment]:
        """Rounds as they happen."""
        return train(self.case, self.options, progress, folder)

    def finish(self, progress: Progress, folder: Path) -> list[Result]:
        """The final tests."""
        return finish(self.case, self.options, progress, folder, also=self.also)


def run_study(settings: Settings, folder: Path, *, report: datasets.Report = unreported) -> Iterator[Step]:
    """All cases in order; what the folder has finished is not done again.

    What cannot run is refused before anything is written; so is a folder that is being run already.
    """
    with alone(folder):
        yield from _run_alone(settings, folder, report)


def _run_alone(settings: Settings, folder: Path, report: datasets.Report) -> Iterator[Step]:
    settings = resolved(settings)
    parts = build_parts(settings, report)
    study = Study(settings, parts, settings.run, folder, _scenario(settings, parts))
    cases = {name: initial_case(settings, name, study.parts) for name in settings.cases}
    for place, (name, case) in enumerate(cases.items()):
        of_ones_own = ":" in settings.cases[name].algorithm  # it may have a loss of its own
        if place == 0 or of_ones_own or settings.cases[name].learns is not None:
            study.training(case).require()
    study.options.computing_device()
    if study.scenario is not None and any(case.pretraining for case in cases.values()):
        raise InputError("settings: a case has `learns.pretrain`, and there are groups that arrive; use one of the two")
    if study.scenario is not None and any(case.without for case in settings.cases.values()):
        raise InputError("settings: a case has `without`, and there are groups that arrive; leave no seeds out there")
    if settings.ordinal is not None:
        require_ordinal(settings.ordinal, study.parts.federations[0])
    if settings.audit is not None:
        require_audit(settings.audit, next(iter(cases.values())), study.parts.federations[0])
    for name, case in cases.items():
        if settings.cases[name].welcome is not None:
            if study.scenario is not None:
                raise InputError(f"settings: cases.{name} has a welcome, and there are groups that arrive; use one of the two")
            require_newcomer(settings.newcomer, study.parts.federations[0], name)
        choose_cohort(case.plan, study.parts.federations[0].devices, case.plan.first_round)
        _require_continuable(study, name, case)
    write_json(folder / "settings.json", settings.as_dict())
    write_json(folder / "federation.json", _who_has_what(study.parts.federations[0]))
    _compare(study)
    for name, case in cases.items():
        yield from _run_case(study, name, case)
    write_json(folder / "results.json", read_results(folder))


def _compare(study: Study) -> None:
    """Baselines, one per deal of the data, if the study has any and they are not there yet."""
    ordinal, path = study.settings.ordinal, study.folder / "baselines.json"
    if ordinal is None or not ordinal.bag_of_words:
        return
    deals = {run.deal: place for place, run in reversed([*enumerate(tries_of(study.settings.plan))])}
    if path.exists() and [row["seed"] for row in next(iter(read_json(path, dict).values()))] == sorted(deals):
        return
    found = {deal: compared(study.parts.federations[place], ordinal) for deal, place in sorted(deals.items())}
    names = next(iter(found.values()))
    write_json(path, {name: [{"seed": deal, **of[name]} for deal, of in found.items()] for name in names})


def _scenario(settings: Settings, parts: Parts) -> Scenario | None:
    """What happens while the cases train, if groups are named; it lasts as long as the longest of them."""
    rounds = max(plan.last_round for plan in plans_of(settings).values())
    return build_scenario(settings.groups, parts.federations, rounds) if settings.groups else None


def resolved(settings: Settings) -> Settings:
    """The same settings with every case's start written out, so that a longer run starts its later cases where it did before."""
    _check_cases(settings)
    starts = {name: _start_of(settings, case).round_index for name, case in settings.cases.items() if case.after is not None}
    return replace(settings, cases={name: replace(case, after_round=starts.get(name)) for name, case in settings.cases.items()})


def initial_case(settings: Settings, name: str, parts: Parts) -> Case:
    """A case before its start is known: initial weights, nothing sent."""
    plain, parts = settings.as_dict(), parts_of(settings.cases[name], parts)
    algorithm = build_algorithm(settings, settings.cases[name], parts)
    about = {f"{part} settings": plain[part] for part in ("data", "model", "optimiser")} | parts.about
    if "welcome" in plain["cases"][name]:
        about |= {"welcome": plain["cases"][name]["welcome"], "newcomer": plain.get("newcomer")}
    spent, params, learns = tuple(Ledger() for _ in parts.seeds), parts.params, settings.cases[name].learns
    if learns is not None:
        extra = [build_auxiliary(settings, learns, parts, seed)[1].params for seed in parts.seeds]
        params = tuple({**own, **more} for own, more in zip(parts.params, extra, strict=True))
        about |= {"learns": plain["cases"][name]["learns"]}
    if settings.audit is not None:
        about |= {"audit": plain["audit"]}
    if settings.cases[name].after is not None:
        about |= {"after": settings.cases[name].after, "after_model": _start_of(settings, settings.cases[name]).model}
    before = build_pretraining(settings, settings.cases[name], parts)
    plan = plans_of(settings)[name]
    return Case(
        algorithm, parts.model, plan, parts.seeds, params, parts.federations, spent, about, pretraining=before, credit=parts.credit
    )


def parts_of(case: CaseSettings, parts: Parts) -> Parts:
    """What a case runs with: all seeds but those that it leaves out."""
    return parts.leaving_out(case.without or ())


def _require_continuable(study: Study, name: str, case: Case) -> None:
    """Refuse to go on with something else than the folder holds, or to go back."""
    folder = case_folder(study.folder, name)
    checkpoint = Checkpoint(folder, study.training(case).fingerprint())
    done = checkpoint.done()
    if done < case.plan.rounds:
        checkpoint.require_tensors()
    if done > case.plan.rounds:
        raise InputError(f"resume: {folder} has done {done} rounds, and plan.rounds is {case.plan.rounds}; choose {done} or more")
    missing = [start for start in _snapshots_wanted(study.settings, name) if not _snapshot(folder, start).exists()]
    for start in sorted(missing):
        if start.round_index < case.plan.first_round + done:
            of = f"the {start.model} model" if study.options.select == "best" else "the model"
            raise InputError(
                f"resume: {folder} is past round {start.round_index} and has not kept {of} of it; start a new run for that"
            )
    if missing and _already_tested(folder, case.plan):
        checkpoint.require_tensors()


def _who_has_what(federation: Federation) -> Json:
    """How many examples of each class every device of the first seed holds."""
    classes = int(federation.train.examples.y.max()) + 1
    counts = {part: datasets.class_counts(getattr(federation, part), classes).tolist() for part in ("train", "test")}
    return {"classes": classes, **counts}


def holds_run(folder: Path) -> bool:
    """Whether a folder is that of a run which was begun."""
    return (folder / "settings.json").exists()


def read_settings(folder: Path) -> Settings:
    """The settings that a run was started with."""
    return from_dict(read_json(folder / "settings.json", dict))


def read_results(folder: Path) -> dict[str, list[Json]]:
    """Every finished case's results, one per seed."""
    settings = read_settings(folder)
    paths = {name: case_folder(folder, name) / "result.json" for name in settings.cases}
    return {name: best_tries(read_json(path, list), settings.plan) for name, path in paths.items() if path.exists()}


def case_folder(folder: Path, name: str) -> Path:
    """Where a case lives: its name in small letters and dashes."""
    return folder / "cases" / slug(name)


def slug(name: str) -> str:
    """A name as a folder: small letters, figures and dashes.

    >>> slug("LG-FedAvg, 2 classes")
    'lg-fedavg-2-classes'
    """
    made = re.sub(r"\W+", "-", name.lower()).strip("-")
    if not made:
        raise InputError(f"settings: '{name}' is no name; use letters or figures")
    return made


def _run_case(study: Study, name: str, case: Case) -> Iterator[Step]:
    folder, plan = case_folder(study.folder, name), case.plan
    wanted = _snapshots_wanted(study.settings, name)
    if _already_tested(folder, plan):
        checkpoint = Checkpoint(folder, study.training(case).fingerprint())
        if any(not _snapshot(folder, start).exists() for start in wanted) and (last := checkpoint.read()):
            _keep_snapshot(folder, case, last, wanted)  # for a case that has been added since
        if study.options.keep == "figures":  # a stop may have come between the figures and this
            checkpoint.lighten()
        yield Step(name, plan.rounds, None, _tested(study, folder))
        return
    start, spent = _start(study, study.settings.cases[name])
    params = tuple({**own, **known} for own, known in zip(case.params, start, strict=True))
    training = study.training(replace(case, params=params, spent=spent)).placed()
    progress = training.beginning(folder)
    _keep_snapshot(folder, case, progress, wanted)
    try:
        for moment in training.train(progress, folder):
            progress = moment.progress
            _keep_snapshot(folder, case, progress, wanted)
            append_rows(folder / "timing.jsonl", [{"round": moment.rows[0]["round"], "seconds": moment.seconds}])
            yield Step(name, plan.rounds, moment, [])
    except DivergedError as error:
        error.case = name
        raise
    _afterwards(study, name, training).finish(progress, folder)
    yield Step(name, plan.rounds, None, _tested(study, folder))


def _tested(study: Study, folder: Path) -> list[Json]:
    return best_tries(read_json(folder / "result.json", list), study.settings.plan)


def _afterwards(study: Study, name: str, training: Steady | Story) -> Steady | Story:
    """Once a case is tested, a newcomer is taken in if it has a welcome, and it is audited or measured as the study says."""
    settings, case = study.settings, study.settings.cases[name]
    welcome, newcomer, audit, ordinal = case.welcome, settings.newcomer, settings.audit, settings.ordinal
    if not isinstance(training, Steady) or (welcome is None and audit is None and ordinal is None):
        return training

    def also(results: Sequence[Result]) -> list[Json]:
        told: list[Json] = [{} for _ in results]
        if welcome is not None and newcomer is not None:
            met = arrive(training.case, results, study.options, newcomer=newcomer, welcome=welcome)
            told = [{**row, "arrival": arrival} for row, arrival in zip(told, met, strict=True)]
        if audit is not None:
            read = audited(training.case, results, audit, build_critic(case.learns, parts_of(case, study.parts)))
            told = [{**row, "audit": found} for row, found in zip(told, read, strict=True)]
        if ordinal is not None:
            off = measured(training.case, results, study.options, ordinal)
            told = [{**row, "ordinal": found} for row, found in zip(told, off, strict=True)]
        return told

    return replace(training, also=also)


def _already_tested(folder: Path, plan: Plan) -> bool:
    path = folder / "result.json"
    return path.exists() and bool(read_json(path, list)[0].get("rounds") == plan.last_round)


def _start(study: Study, case: CaseSettings) -> tuple[tuple[Params, ...], tuple[Ledger, ...]]:
    """Initial parameters and traffic so far: fresh, or as an earlier case had them."""
    parts = parts_of(case, study.parts)
    if case.after is None:
        return parts.params, tuple(Ledger() for _ in parts.seeds)
    tensors, about = read_tensors(_snapshot(case_folder(study.folder, case.after), _start_of(study.settings, case)))
    earlier = parts_of(study.settings.cases[case.after], study.parts).seeds
    places = [earlier.index(seed) for seed in parts.seeds]
    params = tuple({name: tensors[f"{place}/{name}"] for name in parts.params[0]} for place in places)
    return params, tuple(Ledger.from_dict(about["ledgers"][place]) for place in places)


def _keep_snapshot(folder: Path, case: Case, progress: Progress, wanted: set[Start]) -> None:
    """Keep the models that later cases start from."""
    done = case.plan.first_round + progress.done
    for start in sorted(wanted):
        if start.round_index == done and not _snapshot(folder, start).exists():
            models = [warm_params(case.algorithm, state) for state in _chosen(progress, start)]
            tensors = {f"{place}/{name}": tensor for place, model in enumerate(models) for name, tensor in model.items()}
            write_tensors(_snapshot(folder, start), tensors, {"ledgers": [ledger.as_dict() for ledger in progress.ledgers]})


def _chosen(progress: Progress, start: Start) -> list[State]:
    """Each seed's state to start from; there is a best one where rounds are chosen on validation data."""
    if start.model == "last":
        return progress.states
    return [best[2] if best else state for best, state in zip(progress.best, progress.states, strict=True)]


def _snapshot(folder: Path, start: Start) -> Path:
    of = "-last" if start.model == "last" else ""
    return folder / "snapshots" / f"round-{start.round_index:05d}{of}.safetensors"


def _snapshots_wanted(settings: Settings, name: str) -> set[Start]:
    return {_start_of(settings, case) for case in settings.cases.values() if case.after == name}


def _start_of(settings: Settings, case: CaseSettings) -> Start:
    assert case.after is not None
    plan = plans_of(settings)[case.after]
    start = plan.last_round if case.after_round is None else case.after_round
    if not plan.first_round < start <= plan.last_round:
        done = f"{plan.first_round + 1} to {plan.last_round} rounds done"
        raise InputError(f"settings: after_round is {start}, but one can go on from {case.after} with {done}; choose one of those")
    return Start(start, "last" if case.after_model == "last" and settings.run.select == "best" else "best")


def plans_of(settings: Settings) -> dict[str, Plan]:
    """Each case's plan; a case that starts after another continues its numbering."""
    common = settings.plan
    plans: dict[str, Plan] = {}
    for name, case in settings.cases.items():
        rounds = common.rounds if case.rounds is None else case.rounds
        cohort = common.cohort if case.cohort is None else case.cohort
        plans[name] = Plan(rounds, cohort, common.epochs, common.batch, common.seed, tokens=common.tokens)
        if case.after is not None:
            start = plans[case.after].last_round if case.after_round is None else case.after_round
            plans[name] = replace(plans[name], first_round=start)
    return plans


def _check_cases(settings: Settings) -> None:
    """Refuse a study that could not run to its end, before it starts."""
    if not settings.cases:
        raise InputError("settings: there are no cases; add a table such as [cases.LG] with algorithm = 'lg_fedavg'")
    seen: dict[Path, str] = {}
    for name, case in settings.cases.items():
        if case.after is not None and case.after not in seen.values():
            raise InputError(
                f"settings: cases.{name}.after is '{case.after}', which is no earlier case; {nearest(case.after, seen.values())}"
            )
        missing = {*(settings.cases[case.after].without or ())} - {*(case.without or ())} if case.after else set()
        if missing:
            raise InputError(
                f"settings: cases.{name} starts from {case.after}, which runs without seed {min(missing)}; leave it out too"
            )
        twin = seen.setdefault(case_folder(Path(), name), name)
        if twin != name:
            raise InputError(f"settings: the cases '{twin}' and '{name}' would share a folder; rename one")
    plans_of(settings)
    for name, case in settings.cases.items():
        _require_model(settings, name)
        if case.after is not None:
            _start_of(settings, case)


def _require_model(settings: Settings, name: str) -> None:
    """Refuse an `after_model` that is none, or that nothing would read."""
    case, where = settings.cases[name], f"settings: cases.{name}.after_model is '{settings.cases[name].after_model}'"
    if case.after_model not in (None, "best", "last"):
        raise InputError(f"{where}; it must be 'best' (until then, on validation data) or 'last'")
    if case.after_model and case.after is None:
        raise InputError(f"{where}, and it starts from no other case; name one with `after`")
    if case.after_model == "best" and settings.run.select != "best":
        raise InputError(f"{where}, and run.select is '{settings.run.select}', so that no round is chosen; let that be 'best' too")
