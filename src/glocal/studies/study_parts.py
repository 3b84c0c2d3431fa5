"""Run the parts of a study one after the other, each in its own folder; it can be resumed."""

import platform
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from glocal import __version__, datasets
from glocal.core.errors import DivergedError, GlocalWarning, InputError
from glocal.core.files import (
    FORMAT,
    Json,
    append_rows,
    read_json,
    read_rows,
    require_format,
    write_json,
)
from glocal.datasets.fetch import no_progress
from glocal.studies.findings import part_folder
from glocal.studies.restarts import restarts_of
from glocal.studies.run import StudyEvent, experiment_folder, resolve, run_study
from glocal.studies.settings import Settings, from_dict, with_overrides
from glocal.studies.study import Study


class PartEvent(NamedTuple):
    """A part's next event, and the part's position among all parts."""

    part: str
    position: int
    of: int
    step: StudyEvent


def write_study(
    study: Study, folder: Path, *, patterns: Sequence[str] = (), changes: Sequence[str] = ()
) -> dict[str, Settings]:
    """Write what is to run into a folder: some parts or all, with the same changes to each."""
    settings = {
        name: resolve(with_overrides(part.settings, changes))
        for name, part in study.select_parts(tuple(patterns)).items()
    }
    for chosen in settings.values():
        chosen.run.options().torch_device()
    about: Json = {
        "format": FORMAT,
        "study": study.name,
        "command": [],
        "version": __version__,
        "machine": None,
    }
    write_json(
        folder / "study.json",
        {**about, "parts": {name: chosen.as_dict() for name, chosen in settings.items()}},
    )
    return settings


def is_study(folder: Path) -> bool:
    """Whether the folder holds a study in parts."""
    return (folder / "study.json").exists()


def read_parts(folder: Path) -> dict[str, Settings]:
    """The settings of every part in a folder."""
    return {name: from_dict(settings) for name, settings in _read(folder)["parts"].items()}


def _read(folder: Path) -> Json:
    path = folder / "study.json"
    written = {"format": FORMAT, **require_format(read_json(path, dict), path)}
    parts = written.get("parts")
    if not isinstance(parts, dict) or not parts or not isinstance(written.get("command"), list):
        raise InputError(f"run: {path} is not in glocal's format; start the study again")
    return written


def record_session(folder: Path, parts: Mapping[str, Settings], command: str) -> None:
    """Record the command and the machine; a study that moved lists every machine."""
    about = _read(folder)
    now, before = (
        _machine({settings.run.options().torch_device().type for settings in parts.values()}),
        about["machine"],
    )
    devices = dict.fromkeys([*(before["device"].split("; ") if before else []), now["device"]])
    write_json(
        folder / "study.json",
        {
            **about,
            "command": [*about["command"], command],
            "machine": {**now, "device": "; ".join(devices)},
        },
    )


def remove_unstarted(folder: Path) -> None:
    """Remove what was written for a study that was refused before its first part started."""
    if not (folder / "parts").exists():
        (folder / "study.json").unlink(missing_ok=True)
        with suppress(OSError):  # not empty: it holds files of the user
            folder.rmdir()


def run_parts(
    parts: Mapping[str, Settings], folder: Path, *, report: datasets.ProgressCallback = no_progress
) -> Iterator[PartEvent]:
    """Run every part in order; finished ones are not run again.

    Every session's seconds are recorded.
    """
    for place, (name, settings) in enumerate(parts.items(), start=1):
        started, started_any = time.perf_counter(), False
        try:
            for step in _steps(name, settings, folder, report):
                if not started_any:
                    _save_settings(folder, name, settings)
                started_any = True
                yield PartEvent(name, place, len(parts), step)
        finally:
            if started_any:
                append_rows(
                    folder / "timing.jsonl",
                    [{"part": name, "seconds": time.perf_counter() - started}],
                )


def _steps(
    part: str, settings: Settings, folder: Path, report: datasets.ProgressCallback
) -> Iterator[StudyEvent]:
    """A part's events.

    A seed of an experiment that diverges is recorded, and skipped there and in all that start from
    it.
    """
    place = part_folder(folder, part)
    while True:
        rows = [row for row in read_rows(folder / "diverged.jsonl") if row.get("part") == part]
        try:
            yield from run_study(_without_diverged(settings, rows), place, report=report)
            return
        except DivergedError as error:
            warnings.warn(
                f"{part}, {error.experiment}: {error}; seed {error.seed} is skipped",
                GlocalWarning,
                stacklevel=2,
            )
            _move_aside(experiment_folder(place, error.experiment), error.seed)
            row = {
                "part": part,
                "experiment": error.experiment,
                "seed": error.seed,
                "reason": str(error),
            }
            append_rows(folder / "diverged.jsonl", [row])


def _move_aside(experiment: Path, seed: int) -> None:
    """Rename the folder of an experiment with a seed that diverged; its other seeds start again."""
    if experiment.exists():
        experiment.rename(experiment.with_name(f"{experiment.name}.diverged-{seed}"))


def _without_diverged(settings: Settings, diverged: Sequence[Json]) -> Settings:
    """The settings without the seeds that diverged, and without experiments that have none left."""
    seeds = {run.seed for run in restarts_of(settings.plan)}
    skipped: dict[str, set[int]] = {}
    for name, experiment in settings.experiments.items():
        own = {row["seed"] for row in diverged if row["experiment"] == name}
        skipped[name] = (
            own | {*(experiment.skip_seeds or ())} | skipped.get(experiment.start_from or "", set())
        )
    experiments = {
        name: replace(experiment, skip_seeds=tuple(sorted(skipped[name])) or None)
        for name, experiment in settings.experiments.items()
    }
    left = {name: experiment for name, experiment in experiments.items() if seeds - skipped[name]}
    if not left:
        raise InputError(
            f"study: every experiment of {settings.name} diverged; lower the learning rate"
        )
    return replace(settings, experiments=left)


def _save_settings(folder: Path, part: str, settings: Settings) -> None:
    """Save a part's settings once they are accepted, for the next session."""
    written = _read(folder)
    if written["parts"].get(part) != settings.as_dict():
        write_json(
            folder / "study.json",
            {**written, "parts": {**written["parts"], part: settings.as_dict()}},
        )


def _machine(devices: set[str]) -> dict[str, str]:
    """The hardware and versions, without the machine's name."""
    gpu = torch.cuda.get_device_name() if "cuda" in devices else None
    return {
        "device": gpu or platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
