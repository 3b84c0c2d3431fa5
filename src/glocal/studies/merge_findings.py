"""What several runs of one study found, made one: other parts, or of one part other seeds and other cases."""

import json
from collections.abc import Sequence
from statistics import fmean

from glocal.core.errors import InputError
from glocal.core.files import Json
from glocal.studies.findings import Findings, seeds_of

_IGNORED = {
    "plan": ("seed", "seeds"),
    "run": ("engine", "chunk_size"),
}  # what may differ between runs of one part


def merge_findings(findings: Sequence[Findings]) -> Findings:
    """All parts, in the study's order; seeds and cases of a part that several have run stand side by side."""
    first = findings[0]
    parts: dict[str, Json] = {}
    for other in findings:
        if other.study.name != first.study.name:
            raise InputError(
                f"report: {first.study.name} and {other.study.name} are two studies; report them one by one"
            )
        for name, part in other.parts.items():
            parts[name] = _merge_part(name, parts[name], part) if name in parts else part
    for key in ("machine", "version"):
        told = dict.fromkeys(json.dumps(other.about.get(key)) for other in findings)
        if len(told) > 1:
            raise InputError(
                f"report: these runs are of different {key}s ({' and '.join(told)}); report them one by one"
            )
    commands = list(
        dict.fromkeys(
            command for other in findings for command in _as_list(other.about.get("command"))
        )
    )
    ordered = {name: parts[name] for name in first.study.parts if name in parts}
    return Findings(first.study, {**first.about, "command": commands}, ordered)


def _as_list(command: str | list[str] | None) -> list[str]:
    return [command] if isinstance(command, str) else command or []


def _merge_part(name: str, part: Json, other: Json) -> Json:
    """Two runs of a part: all seeds of all cases; what both have run must be alike."""
    both = (part, other)
    if _experiment_seeds(other) <= _experiment_seeds(part):
        raise InputError(f"report: part '{name}' was given twice; leave one of the two out")
    _require_alike(name, *(_compared_settings(each["settings"]) for each in both))
    experiments = {
        experiment: _merge_seeds(
            f"part '{name}', {experiment}",
            [each["experiments"][experiment] for each in both if experiment in each["experiments"]],
        )
        for experiment in dict.fromkeys(experiment for each in both for experiment in each["experiments"])
    }
    seeds = {seed for experiment in experiments.values() for seed in experiment["seeds"]}
    plan = {**part["settings"]["plan"], "seed": min(seeds), "seeds": len(seeds)}
    told = {
        experiment: about
        for each in both
        for experiment, about in each["settings"]["experiments"].items()
    }
    seconds = round(sum(each["seconds"] for each in both), 1)
    return {
        "seconds": seconds,
        "settings": {**part["settings"], "plan": plan, "experiments": told},
        "experiments": experiments,
    }


def _experiment_seeds(part: Json) -> set[tuple[str, int]]:
    return {
        (experiment, seed)
        for experiment, figures in part["experiments"].items()
        for seed in seeds_of(figures, figures["validation"])
    }


def _require_alike(name: str, one: Json, other: Json) -> None:
    """Refuse runs with other settings; a case may be in one of them only."""
    for key in sorted(one.keys() | other.keys()):
        if one.get(key) != other.get(key) and (
            key.partition(".")[0] != "experiments" or (key in one and key in other)
        ):
            raise InputError(
                f"report: part '{name}' was run with two settings of {key}; report them one by one"
            )


def _compared_settings(settings: Json) -> Json:
    """Settings by name, such as plan.rounds and experiments.FedAvg, but for what changes nothing or is made one."""
    return {
        f"{table}.{key}": value
        for table, values in settings.items()
        for key, value in (values.items() if isinstance(values, dict) else [("", values)])
        if key not in _IGNORED.get(table, ())
    }


def _merge_seeds(words: str, runs: Sequence[Json]) -> Json:
    """A case's figures with the seeds of all runs, each once; traffic is the mean over them."""
    by_seed: dict[int, Json] = {}
    for run in runs:
        for seed, figures in _by_seed(run).items():
            if by_seed.setdefault(seed, figures) != figures:
                raise InputError(
                    f"report: {words}: two runs of seed {seed} have other figures; leave one of the two out"
                )
    seeds = sorted(by_seed)
    lists = {
        key: [by_seed[seed][key] for seed in seeds] for key in by_seed[seeds[0]] if key != "validation_curve"
    }
    sent = {
        key: round(fmean(run[key] for run in runs for _ in seeds_of(run, run["validation"])))
        for key, value in runs[0].items()
        if isinstance(value, int | float)
    }
    courses = (
        {"validation_curve": [row for seed in seeds for row in by_seed[seed]["validation_curve"]]}
        if any("validation_curve" in run for run in runs)
        else {}
    )
    return {"seeds": seeds, **lists, **sent, **courses}


def _by_seed(run: Json) -> dict[int, Json]:
    """Figures of a case that differ from seed to seed, and its course."""
    lists = {
        key: values
        for key, values in run.items()
        if isinstance(values, list) and key not in ("seeds", "validation_curve")
    }
    found = {
        seed: {key: values[place] for key, values in lists.items()}
        for place, seed in enumerate(seeds_of(run, run["validation"]))
    }
    for seed, figures in found.items():
        figures["validation_curve"] = [row for row in run.get("validation_curve", []) if row["seed"] == seed]
    return found
