"""A finished experiment, read from its folder; reading it changes nothing there."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from glocal import datasets
from glocal.core.errors import InputError, suggest_name
from glocal.core.files import Json
from glocal.core.store import TrainingState
from glocal.datasets.federated import FederatedData
from glocal.datasets.fetch import no_progress
from glocal.federate.checkpoint import RunProgress
from glocal.federate.options import Options
from glocal.personalize.onboarding import TrainedFederation
from glocal.studies.build import build_components
from glocal.studies.run import StudyRun, initial_experiment, read_results, read_settings
from glocal.studies.settings import Settings


class SavedExperiment(NamedTuple):
    """A trained federation, its data, and its settings."""

    experiment: str
    trained_federation: TrainedFederation
    federation: FederatedData
    settings: Settings

    @property
    def options(self) -> Options:
        """How it was run."""
        return self.settings.run.options()


def open_experiment(
    folder: Path,
    experiment: str | None = None,
    *,
    seed: int | None = None,
    report: datasets.ProgressCallback = no_progress,
) -> SavedExperiment:
    """One seed of a finished experiment: the named one, or the last with two sides to its split.

    That is the last with a local part that can be adapted and a shared part, or else just the last.
    """
    if (folder / "study.json").exists():
        raise InputError(
            f"run: {folder} is a study in parts; "
            f"give the folder of one, such as {_example_part(folder)}"
        )
    settings, results = read_settings(folder), read_results(folder)
    if settings.groups:
        raise InputError(
            f"run: {folder} is a scenario, whose clients join and leave; give a run without groups"
        )
    _require_finished(results, experiment)
    if settings.run.save == "metrics":
        raise InputError(
            f"run: {folder} saved its metrics only; "
            "run the study with run.save = 'everything' for this"
        )
    study = StudyRun(settings, build_components(settings, report), folder)
    name = experiment or _last_with_split(study, [*results])
    whole, index = initial_experiment(study, name), _seed_index(results[name], seed)
    checkpoint = study.start(name, whole).checkpoint
    assert checkpoint is not None
    progress = checkpoint.read()
    if progress is None:
        raise InputError(
            f"run: {folder} has no checkpoint of {name} any more; "
            "run the study again, or choose another experiment"
        )
    result = results[name][index]
    index = result.get("index", index)  # of several restarts, the best one's
    plan = replace(whole.plans()[index], rounds=progress.done)
    if result["rounds"] != plan.total_rounds:
        raise InputError(
            f"run: {name} was resumed after its test; finish it with `glocal resume {folder}`"
        )
    state = _tested_state(progress, index, result["selected_round"] - plan.first_round)
    device, federation = settings.run.options().torch_device(), whole.groups[0].data_of(index)
    trained_federation = TrainedFederation(
        whole.algorithm,
        plan,
        state.to(device, state).group(),
        federation.num_clients,
        whole.uplink,
    )
    return SavedExperiment(name, trained_federation, federation, settings)


def _example_part(folder: Path) -> Path:
    return next(
        (path for path in sorted((folder / "parts").glob("*")) if path.is_dir()),
        folder / "parts" / "NAME",
    )


def _require_finished(results: dict[str, list[Json]], name: str | None) -> None:
    if not results:
        raise InputError(
            "run: no experiment is finished yet; wait for one, or continue with `glocal resume`"
        )
    if name is not None and name not in results:
        raise InputError(
            f"run: there is no finished experiment '{name}'; {suggest_name(name, results)}"
        )


def _last_with_split(study: StudyRun, finished: list[str]) -> str:
    """The last experiment with a shared part and a local one that can adapt, or just the last."""
    for name in reversed(finished):
        group = initial_experiment(study, name).groups[0]
        state = group.algorithm.init(group.initial_params(0))
        if state.shared and state.private and group.algorithm.takes_new_clients:
            return name
    return finished[-1]


def _seed_index(results: list[Json], seed: int | None) -> int:
    seeds = [result["seed"] for result in results]
    if seed is not None and seed not in seeds:
        raise InputError(f"run: there is no seed {seed}; this run has {', '.join(map(str, seeds))}")
    return 0 if seed is None else seeds.index(seed)


def _tested_state(progress: RunProgress, index: int, rounds: int) -> TrainingState:
    """The state that was tested: the last one, or the best on validation data."""
    best = progress.best[index][0]
    is_best = best is not None and best.done == rounds
    return best.state if best is not None and is_best else progress.states[index]
