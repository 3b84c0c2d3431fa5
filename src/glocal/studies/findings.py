"""What a study has found so far: every figure seed by seed, small enough to be committed, and what follows from it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from glocal.core.errors import InputError, describe_error
from glocal.core.files import FORMAT, Json, read_json, read_rows, require_format, write_json
from glocal.evaluate.intervals import ConfidenceInterval, confidence_interval
from glocal.studies.goal_cost import validation_curve
from glocal.studies.registry import find_study
from glocal.studies.run import is_run, read_results, read_settings, slug
from glocal.studies.study import Claim, Measurement, Study, StudyPart

_PERCENT = 100.0


class Verdict(NamedTuple):
    """A claim and how far ahead it is, in points, paired over seeds; `word` is holds, fails, or open where seeds do not decide."""

    claim: Claim
    lead: ConfidenceInterval
    status: str


@dataclass(frozen=True)
class Findings:
    """The study, how it was run, and `parts`: for each part its seconds and its cases' figures, one per seed."""

    study: Study
    about: Json
    parts: dict[str, Json]

    def values(self, figure: Measurement) -> list[float]:
        """A measure in percent, one for each seed that has one; none if it was not measured."""
        return [*self._by_seed(figure).values()]

    def _by_seed(self, figure: Measurement) -> dict[int, float]:
        experiment = self.experiment(figure.part, figure.experiment)
        values = [] if experiment is None else experiment.get(figure.measure, [])
        seeds = [] if experiment is None else seeds_of(experiment, values)
        return {
            seed: _PERCENT * value
            for seed, value in zip(seeds, values, strict=True)
            if value is not None
        }

    def experiment(self, part: str, row: str) -> Json | None:
        """The figures of a row: its case's, or of several those of the one that was best on validation data within the limit.

        One that diverged in some seeds does not stand for a row if another did not. Where none is within the limit, the one that
        gives least away does.
        """
        experiments, of = self.parts.get(part, {}).get("experiments", {}), self.study.parts[part]
        found: list[Json] = [
            experiments[name] for name in of.candidates.get(row, (row,)) if name in experiments
        ]
        most = max((len(experiment["validation"]) for experiment in found), default=0)
        found = [experiment for experiment in found if len(experiment["validation"]) == most]
        within = [
            experiment
            for experiment in found
            if row not in of.leak_limits or _leak(experiment) <= of.leak_limits[row]
        ]
        if within:
            return max(within, key=lambda experiment: _mean(experiment["validation"]))
        return min(found, key=_leak, default=None)

    def name_of(self, part: str, row: str) -> str:
        """The case that stands for a row."""
        found, experiments = (
            self.experiment(part, row),
            self.parts.get(part, {}).get("experiments", {}),
        )
        return next((name for name, experiment in experiments.items() if experiment is found), row)

    def verdicts(self) -> list[Verdict]:
        """Every claim of which all figures were measured."""
        return [
            verdict for claim in self.study.claims if (verdict := self._verdict(claim)) is not None
        ]

    def _verdict(self, claim: Claim) -> Verdict | None:
        figures = [
            (sign, self._by_seed(figure))
            for sign, side in ((1, claim.more), (-1, claim.less))
            for figure in side
        ]
        seeds = sorted(set.intersection(*({*values} for _, values in figures)))
        if not seeds:
            return None
        lead = confidence_interval(
            [sum(sign * values[seed] for sign, values in figures) - claim.level for seed in seeds]
        )
        word = (
            "holds"
            if lead.low > -claim.margin
            else "fails"
            if lead.high <= -claim.margin
            else "open"
        )
        return Verdict(claim, lead, word)

    def as_dict(self) -> Json:
        """For JSON."""
        return {"format": FORMAT, "study": self.study.name, **self.about, "parts": self.parts}


def seeds_of(experiment: Json, values: Sequence[float | None]) -> list[int]:
    """The seeds of some of a case's figures, one each; those from 0 on where an earlier version left them out."""
    return list(experiment.get("seeds", range(len(values)))) if values else []


def part_folder(folder: Path, part: str) -> Path:
    """Where a part of a study runs: an ordinary run folder."""
    return folder / "parts" / slug(part)


def read_findings(path: Path) -> Findings:
    """From the folder of a study, or from a file that was written of one."""
    try:
        found = _from_file(path) if path.is_file() else _from_folder(path)
        for part in found.parts.values():
            for experiment in part["experiments"].values():
                read = (*found.study.measures, "validation_leak", "fresh")
                told = (
                    *experiment["validation"],
                    *(value for measure in read for value in experiment.get(measure, ())),
                )
                sum(value or 0.0 for value in told)  # numbers, or an error
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise InputError(
            f"report: {path} does not hold the findings of a study ({describe_error(error)}); give the folder of a run, or its findings.json"
        ) from error
    return found


def _from_folder(path: Path) -> Findings:
    file = path / "study.json"
    about = require_format(read_json(file, dict), file)
    study = find_study(about["study"])
    parts = {
        name: found
        for name, part in study.parts.items()
        if (found := _part(part_folder(path, name), path, name, part))
    }
    return Findings(
        study, {key: about[key] for key in ("command", "version", "machine") if key in about}, parts
    )


def write_findings(findings: Findings, path: Path) -> None:
    """Keep them as one JSON file."""
    write_json(path, findings.as_dict())


def _from_file(path: Path) -> Findings:
    data = require_format(read_json(path, dict), path)
    study = find_study(data["study"])
    about = {key: value for key, value in data.items() if key not in ("study", "parts")}
    return Findings(
        study, about, {name: part for name, part in data["parts"].items() if name in study.parts}
    )


def _part(folder: Path, study: Path, name: str, of: StudyPart) -> Json | None:
    """What a part has finished so far; None if nothing."""
    if not is_run(folder) or not (results := read_results(folder)):
        return None
    seconds = sum(
        row.get("seconds", 0.0)
        for row in read_rows(study / "timing.jsonl")
        if row.get("part") == name
    )
    experiments = {experiment: _experiment(seeds) for experiment, seeds in results.items()}
    if (folder / "baselines.json").exists():
        experiments |= {
            name: _baseline(rows)
            for name, rows in read_json(folder / "baselines.json", dict).items()
        }
    if of.goal:
        experiments = {
            experiment: {**figures, "validation_curve": validation_curve(folder, experiment)}
            for experiment, figures in experiments.items()
        }
    return {
        "seconds": round(seconds, 1),
        "settings": read_settings(folder).as_dict(),
        "experiments": experiments,
    }


def _experiment(results: Sequence[Json]) -> Json:
    """One case's figures, seed by seed; traffic is the same for all seeds but for the ensemble, so its mean is kept."""
    ledgers = [result["ledger"] for result in results]
    return {
        "seeds": [result["seed"] for result in results],
        "local": [_round(result["local_test"]["mean"]) for result in results],
        "worst_tenth": [_round(result["local_test"]["worst_tenth"]) for result in results],
        **{
            key: [_round((result["new_test"] or {}).get(way)) for result in results]
            for key, way in _WAYS.items()
        },
        **_new_client_metrics(
            [result["new_client"] for result in results if "new_client" in result]
        ),
        **_audit_metrics([result["audit"] for result in results if "audit" in result]),
        **_ordinal_metrics([result["ordinal"] for result in results if "ordinal" in result]),
        "validation": [_round(result["validation"]["mean"]) for result in results],
        "selected_round": [result["selected_round"] for result in results],
        "never_sampled": [result["never_sampled"] for result in results],
        "paper_parameters": round(fmean(ledger["paper"]["parameters"] for ledger in ledgers)),
        "parameters": round(fmean(ledger["total"]["parameters"] for ledger in ledgers)),
        "bytes": round(fmean(ledger["total"]["bytes"] for ledger in ledgers)),
    }


def _baseline(rows: Sequence[Json]) -> Json:
    """A row that nobody has trained in rounds, and that sends nothing."""
    return {
        "seeds": [row["seed"] for row in rows],
        **_ordinal_metrics([row["ordinal"] for row in rows]),
        "validation": [_round(row["validation"]["pooled"]) for row in rows],
        **dict.fromkeys(("paper_parameters", "parameters", "bytes"), 0),
    }


def _ordinal_metrics(rows: Sequence[Json]) -> Json:
    """How right and how far off guesses are, seed by seed; nothing where classes have no order."""
    return {key: [_round(row[key]) for row in rows] for key in _ORDINAL} if rows else {}


def _new_client_metrics(arrivals: Sequence[Json]) -> Json:
    """What a newcomer's arrival came to, seed by seed, and what it cost; nothing if none arrived."""
    if not arrivals:
        return {}
    scores = {
        key: [_round(row[key]) for row in arrivals]
        for key in ("normal", "normal_local", "rotated", "rotated_before")
    }
    return {
        **scores,
        "join_bytes": round(fmean(row["ledger"]["total"]["bytes"] for row in arrivals)),
    }


def _audit_metrics(audits: Sequence[Json]) -> Json:
    """What predictions are worth and what representations give away, seed by seed, as AUC; nothing if there was no audit.

    "adversary" is the one that was trained along, the mean over attributes; "own_0" and the like are the best fresh attackers by
    what they know and by attribute, and "fresh" is the best of all these.
    """
    if not audits:
        return {}
    attributes = [audit["attributes"] for audit in audits]
    views = [(place, view) for place in range(len(attributes[0])) for view in _VIEWS]
    return {
        "accuracy": [_round(audit["accuracy"]) for audit in audits],
        "auc": [_round(audit["auc"]) for audit in audits],
        "adversary": [
            _round(_aggregate_known(fmean, [each["joint"] for each in of])) for of in attributes
        ],
        **{
            f"{view}_{place}": [_round(of[place][view]) for of in attributes]
            for place, view in views
        },
        "fresh": [
            _round(_aggregate_known(max, [of[place][view] for place, view in views]))
            for of in attributes
        ],
        "validation_auc": [_round(audit["validation"]["auc"]) for audit in audits],
        "validation_leak": [_round(audit["validation"]["leak"]) for audit in audits],
    }


_ORDINAL = ("accuracy", "error", "accuracy_rest", "error_rest")
_VIEWS = ("own", "pooled", "strong")
_WAYS = {"new": "logits", "new_by_votes": "votes", "new_by_weights": "weights"}


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def _mean(values: Iterable[float | None]) -> float:
    return fmean(value or 0.0 for value in values)


def _aggregate_known(
    of: Callable[[Sequence[float]], float], values: Iterable[float | None]
) -> float | None:
    """The mean, the largest or the like of what is known; None where nothing is."""
    known = [value for value in values if value is not None]
    return of(known) if known else None


def _leak(experiment: Json) -> float:
    """What attackers read from a case's representations of validation data; nothing where there was no audit."""
    return _aggregate_known(fmean, experiment.get("validation_leak", ())) or 0.0
