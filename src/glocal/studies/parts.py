"""Run the parts of a study one after the other, each in a folder of its own, from wherever they left off."""

import platform
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from glocal import __version__, data
from glocal.data.fetch import unreported
from glocal.errors import DivergedError, GlocalWarning, InputError
from glocal.keep import append_rows, read_json, write_json
from glocal.studies.findings import part_folder
from glocal.studies.run import Step, resolved, run_study
from glocal.studies.settings import Settings, changed, from_dict
from glocal.studies.study import Study


class PartStep(NamedTuple):
    """What the caller sees: the part, its place among how many, and its next step."""

    part: str
    place: int
    of: int
    step: Step


def prepare(study: Study, patterns: Sequence[str], changes: Sequence[str], folder: Path, command: str) -> None:
    """Write down what is to run in a folder: some parts or all, each with the same changes of its settings."""
    settings = {name: resolved(changed(part.settings, changes)) for name, part in study.chosen(tuple(patterns)).items()}
    devices = {chosen.run.computing_device().type for chosen in settings.values()}
    about = {"study": study.name, "command": command, "version": __version__, "machine": _machine(devices)}
    write_json(folder / "study.json", {**about, "parts": {name: chosen.as_dict() for name, chosen in settings.items()}})


def holds_study(folder: Path) -> bool:
    """Whether a folder is that of a study in parts."""
    return (folder / "study.json").exists()


def read_parts(folder: Path) -> dict[str, Settings]:
    """The settings of every part that is to run in a folder."""
    written = read_json(folder / "study.json", dict)
    if not isinstance(written.get("parts"), dict):
        raise InputError(f"run: {folder / 'study.json'} does not hold what glocal writes there; start the study anew")
    return {name: from_dict(settings) for name, settings in written["parts"].items()}


def run_parts(parts: Mapping[str, Settings], folder: Path, *, report: data.Report = unreported) -> Iterator[PartStep]:
    """Every part in order; what is finished is not done again, a part that diverges is left. Every sitting's seconds are kept."""
    for place, (name, settings) in enumerate(parts.items(), start=1):
        started = time.perf_counter()
        try:
            for step in run_study(settings, part_folder(folder, name), report=report):
                yield PartStep(name, place, len(parts), step)
        except DivergedError as error:
            warnings.warn(f"part {name} stays unfinished: {error}", GlocalWarning, stacklevel=2)
        finally:
            append_rows(folder / "timing.jsonl", [{"part": name, "seconds": time.perf_counter() - started}])


def _machine(devices: set[str]) -> dict[str, str]:
    """What it runs on, without telling whose it is."""
    gpu = torch.cuda.get_device_name() if "cuda" in devices else None
    return {"device": gpu or platform.machine(), "torch": torch.__version__, "python": platform.python_version()}
