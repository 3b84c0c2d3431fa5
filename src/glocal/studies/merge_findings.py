"""Merge the findings of several runs of one study: other parts, other seeds, other experiments."""

import json
from collections.abc import Sequence
from itertools import chain
from statistics import fmean

from glocal.core.errors import InputError
from glocal.core.files import Json
from glocal.studies.findings import Findings, seeds_of

_IGNORED = {
    "plan": ("seed", "seeds"),
    "run": ("engine", "chunk_size"),
}  # what may differ between runs of one part


def merge_findings(findings: Sequence[Findings]) -> Findings:
    """All parts, in the study's order, each with the seeds and experiments of all runs."""
    first = findings[0]
    parts: dict[str, Json] = {}
    for other in findings:
        if other.study.name != first.study.name:
            raise InputError(
                f"report: {first.study.name} and {other.study.name} are two studies; "
                "report them one by one"
            )
        for name, part in other.parts.items():
            parts[name] = _merge_part(name, parts[name], part) if name in parts else part
    for key in ("machine", "version"):
        values = dict.fromkeys(json.dumps(other.about.get(key)) for other in findings)
        if len(values) > 1:
            raise InputError(
                f"report: these runs are of different {key}s ({' and '.join(values)}); "
                "report them one by one"
            )
    commands: list[str] = []
    for other in findings:
        commands += _as_list(other.about.get("command"))
    ordered = {name: parts[name] for name in first.study.parts if name in parts}
    return Findings(first.study, {**first.about, "command": [*dict.fromkeys(commands)]}, ordered)


def _as_list(command: str | list[str] | None) -> list[str]:
    return [command] if isinstance(command, str) else command or []


def _merge_part(name: str, part: Json, other: Json) -> Json:
    """Two runs of a part: all seeds of all experiments; what both have run must be the same."""
    if _experiment_seeds(other) <= _experiment_seeds(part):
        raise InputError(f"report: part '{name}' was given twice; leave one of the two out")
    _require_alike(
        name, _compared_settings(part["settings"]), _compared_settings(other["settings"])
    )
    experiments: dict[str, Json] = {}
    for experiment in {**part["experiments"], **other["experiments"]}:
        runs = [
            each["experiments"][experiment]
            for each in (part, other)
            if experiment in each["experiments"]
        ]
        experiments[experiment] = _merge_seeds(f"part '{name}', {experiment}", runs)
    seeds: set[int] = set().union(*(each["seeds"] for each in experiments.values()))
    plan = {**part["settings"]["plan"], "seed": min(seeds), "seeds": len(seeds)}
    settings = {**part["settings"]["experiments"], **other["settings"]["experiments"]}
    return {
        "seconds": round(part["seconds"] + other["seconds"], 1),
        "settings": {**part["settings"], "plan": plan, "experiments": settings},
        "experiments": experiments,
    }


def _experiment_seeds(part: Json) -> set[tuple[str, int]]:
    return {
        (experiment, seed)
        for experiment, run in part["experiments"].items()
        for seed in seeds_of(run, run["validation"])
    }


def _require_alike(name: str, one: Json, other: Json) -> None:
    """Refuse runs with different settings; an experiment may be in one of them only."""
    for key in sorted(one.keys() | other.keys()):
        if one.get(key) != other.get(key) and (
            key.partition(".")[0] != "experiments" or (key in one and key in other)
        ):
            raise InputError(
                f"report: part '{name}' was run with two settings of {key}; report them one by one"
            )


def _compared_settings(settings: Json) -> Json:
    """Settings by name, such as plan.rounds, without those that may differ between runs."""
    compared: Json = {}
    for table, values in settings.items():
        entries = values if isinstance(values, dict) else {"": values}
        ignored = _IGNORED.get(table, ())
        compared |= {f"{table}.{key}": entries[key] for key in entries if key not in ignored}
    return compared


def _merge_seeds(title: str, runs: Sequence[Json]) -> Json:
    """An experiment's values with the seeds of all runs, each once; traffic is their mean."""
    by_seed: dict[int, Json] = {}
    weights = [len(seeds_of(run, run["validation"])) for run in runs]
    for run in runs:
        for seed, values in _by_seed(run).items():
            if by_seed.setdefault(seed, values) != values:
                raise InputError(
                    f"report: {title}: two runs of seed {seed} have different values; "
                    "leave one of the two out"
                )
    seeds = sorted(by_seed)
    merged: Json = {"seeds": seeds}
    for key in by_seed[seeds[0]]:
        if key != "validation_curve":
            merged[key] = [by_seed[seed][key] for seed in seeds]
    for key, value in runs[0].items():
        if isinstance(value, int | float):
            merged[key] = round(fmean([run[key] for run in runs], weights))
        elif isinstance(value, dict):  # the metric, which all runs have in common
            merged[key] = value
    if any("validation_curve" in run for run in runs):
        curves = [by_seed[seed]["validation_curve"] for seed in seeds]
        merged["validation_curve"] = list(chain.from_iterable(curves))
    return merged


def _by_seed(run: Json) -> dict[int, Json]:
    """The values of an experiment that differ between seeds, and its validation curve."""
    rows: dict[int, Json] = {}
    for index, seed in enumerate(seeds_of(run, run["validation"])):
        row: Json = {}
        for key, values in run.items():
            if isinstance(values, list) and key not in ("seeds", "validation_curve"):
                row[key] = values[index]
        curve = run.get("validation_curve", [])
        row["validation_curve"] = [point for point in curve if point["seed"] == seed]
        rows[seed] = row
    return rows
