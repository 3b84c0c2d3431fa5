"""The findings of a study: every measure per seed, small enough to commit, and its verdicts."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from glocal.core.errors import InputError, describe_error
from glocal.core.files import FORMAT, Json, read_json, read_rows, require_format, write_json
from glocal.evaluate.intervals import ConfidenceInterval, confidence_interval
from glocal.studies.goal_cost import validation_curve
from glocal.studies.metric_format import ACCURACY, MetricFormat, new_test_of
from glocal.studies.registry import find_study
from glocal.studies.run import is_run, read_results, read_settings, slug
from glocal.studies.study import Claim, Measurement, Study, StudyPart

_PERCENT = 100.0
OF_THE_METRIC = frozenset(
    {
        "local",
        "worst_tenth",
        "new",
        "new_by_votes",
        "new_by_weights",
        "normal",
        "normal_local",
        "rotated",
        "rotated_before",
        "validation",
    }
)  # measures that are figures of the task's first metric; others are fractions


class Verdict(NamedTuple):
    """A claim, its lead in points, paired over seeds, and whether it holds, fails or is open."""

    claim: Claim
    lead: ConfidenceInterval
    status: str


@dataclass(frozen=True)
class Findings:
    """The study, how it was run, and per part its seconds and its experiments' values per seed."""

    study: Study
    about: Json
    parts: dict[str, Json]

    def values(self, figure: Measurement) -> list[float]:
        """A measure, fractions in percent, one value for each seed that has one."""
        return [*self._by_seed(figure).values()]

    def _by_seed(self, figure: Measurement) -> dict[int, float]:
        experiment = self.experiment(figure.part, figure.experiment)
        if experiment is None:
            return {}
        values = experiment.get(figure.measure, [])
        scale = _PERCENT
        metric = metric_of(experiment)
        if figure.measure in OF_THE_METRIC or figure.measure == metric.name:
            scale = metric.scale
        pairs = zip(seeds_of(experiment, values), values, strict=True)
        return {seed: scale * value for seed, value in pairs if value is not None}

    @property
    def metric(self) -> MetricFormat:
        """The metric of the tests; all parts of a study have the same."""
        for part in self.parts.values():
            for experiment in part.get("experiments", {}).values():
                return metric_of(experiment)
        return ACCURACY

    def experiment(self, part: str, row: str) -> Json | None:
        """The values of a row: its experiment's, or those of the best of its candidates.

        The best is the one with the best figure on validation data among those within the row's
        leak limit; where none is within the limit, the one that leaks least stands for the row. A
        candidate that diverged in some seeds does not stand for a row if another did not.
        """
        experiments = self.parts.get(part, {}).get("experiments", {})
        names = self.study.parts[part].candidates.get(row, (row,))
        limit = self.study.parts[part].leak_limits.get(row, inf)
        rows: list[Json] = [experiments[name] for name in names if name in experiments]
        most_seeds = max((len(each["validation"]) for each in rows), default=0)
        rows = [each for each in rows if len(each["validation"]) == most_seeds]
        within = [each for each in rows if _leak(each) <= limit]
        if within:
            sign = 1 if metric_of(within[0]).higher_is_better else -1
            return max(within, key=lambda each: sign * _mean(each["validation"]))
        return min(rows, key=_leak, default=None)

    def name_of(self, part: str, row: str) -> str:
        """The experiment that stands for a row."""
        experiments = self.parts.get(part, {}).get("experiments", {})
        chosen = self.experiment(part, row)
        return next((name for name, each in experiments.items() if each is chosen), row)

    def verdicts(self) -> list[Verdict]:
        """Every claim whose measurements are all there."""
        verdicts = [self._verdict(claim) for claim in self.study.claims]
        return [verdict for verdict in verdicts if verdict is not None]

    def _verdict(self, claim: Claim) -> Verdict | None:
        more = [self._by_seed(measurement) for measurement in claim.more]
        less = [self._by_seed(measurement) for measurement in claim.less]
        seeds = sorted(set.intersection(*map(set, more + less)))
        if not seeds:
            return None
        leads = []
        for seed in seeds:
            above = [values[seed] for values in more]
            below = [-values[seed] for values in less]
            leads.append(sum(above + below) - claim.level)
        interval = confidence_interval(leads)
        status = "open"
        if interval.low > -claim.margin:
            status = "holds"
        elif interval.high <= -claim.margin:
            status = "fails"
        return Verdict(claim, interval, status)

    def as_dict(self) -> Json:
        """As JSON."""
        return {"format": FORMAT, "study": self.study.name, **self.about, "parts": self.parts}


def metric_of(experiment: Json) -> MetricFormat:
    """The metric of an experiment's tests; baselines and old findings have accuracy."""
    about = experiment.get("metric")
    return MetricFormat(**about) if about else ACCURACY


def seeds_of(experiment: Json, values: Sequence[float | None]) -> list[int]:
    """The seeds of some of an experiment's values; findings without seeds have those from 0 on."""
    return list(experiment.get("seeds", range(len(values)))) if values else []


def part_folder(folder: Path, part: str) -> Path:
    """The folder of a part of a study: an ordinary run folder."""
    return folder / "parts" / slug(part)


def read_findings(path: Path) -> Findings:
    """The findings in a study's folder, or in a findings file."""
    try:
        findings = _from_file(path) if path.is_file() else _from_folder(path)
        for part in findings.parts.values():
            for experiment in part["experiments"].values():
                values = [*experiment["validation"]]
                for measure in (*findings.study.measures, "validation_leak", "fresh"):
                    values += experiment.get(measure, ())
                sum(value or 0.0 for value in values)  # numbers, or an error
    except InputError:  # it says more than the line below
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise InputError(
            f"report: {path} does not hold the findings of a study ({describe_error(error)}); "
            "give the folder of a run, or its findings.json"
        ) from error
    return findings


def _from_folder(path: Path) -> Findings:
    file = path / "study.json"
    about = require_format(read_json(file, dict), file)
    study = find_study(about["study"])
    parts = {
        name: findings
        for name, part in study.parts.items()
        if (findings := _part(part_folder(path, name), path, name, part))
    }
    return Findings(
        study, {key: about[key] for key in ("command", "version", "machine") if key in about}, parts
    )


def write_findings(findings: Findings, path: Path) -> None:
    """Write the findings as one JSON file."""
    write_json(path, findings.as_dict())


def _from_file(path: Path) -> Findings:
    data = require_format(read_json(path, dict), path)
    study = find_study(data["study"])
    about = {key: value for key, value in data.items() if key not in ("study", "parts")}
    return Findings(
        study, about, {name: part for name, part in data["parts"].items() if name in study.parts}
    )


def _part(folder: Path, study: Path, name: str, of: StudyPart) -> Json | None:
    """What a part has finished so far, or None."""
    if not is_run(folder) or not (results := read_results(folder)):
        return None
    sessions = [row for row in read_rows(study / "timing.jsonl") if row.get("part") == name]
    seconds = sum(row.get("seconds", 0.0) for row in sessions)
    experiments = {experiment: _experiment(seeds) for experiment, seeds in results.items()}
    if (folder / "baselines.json").exists():
        experiments |= {
            name: _baseline(rows)
            for name, rows in read_json(folder / "baselines.json", dict).items()
        }
    if of.goal:
        for experiment, values in experiments.items():
            values["validation_curve"] = validation_curve(folder, experiment)
    return {
        "seconds": round(seconds, 1),
        "settings": read_settings(folder).as_dict(),
        "experiments": experiments,
    }


def _experiment(results: Sequence[Json]) -> Json:
    """One experiment's values, seed by seed; traffic is the mean over seeds.

    Traffic differs between seeds only in the ensemble.
    """
    ledgers = [result["ledger"] for result in results]
    new_tests = [result["new_test"] or {} for result in results]
    return {
        "seeds": [result["seed"] for result in results],
        "metric": MetricFormat.of_result(results[0])._asdict(),
        "local": [_round(result["local_test"]["mean"]) for result in results],
        "worst_tenth": [_round(result["local_test"]["worst_tenth"]) for result in results],
        "new": [_round(new_test_of(result)) for result in results],
        "new_by_votes": [_round(each.get("votes")) for each in new_tests],
        "new_by_weights": [_round(each.get("weights")) for each in new_tests],
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
    """A row that was not trained in rounds and sends nothing."""
    return {
        "seeds": [row["seed"] for row in rows],
        **_ordinal_metrics([row["ordinal"] for row in rows]),
        "validation": [_round(row["validation"]["pooled"]) for row in rows],
        **dict.fromkeys(("paper_parameters", "parameters", "bytes"), 0),
    }


def _ordinal_metrics(rows: Sequence[Json]) -> Json:
    """Accuracy and mean absolute error per seed; nothing where classes have no order."""
    return _by_key(rows, _ORDINAL) if rows else {}


def _by_key(rows: Sequence[Json], keys: Iterable[str]) -> Json:
    """The values of some keys, seed by seed."""
    columns: Json = {}
    for key in keys:
        columns[key] = [_round(row[key]) for row in rows]
    return columns


def _new_client_metrics(trials: Sequence[Json]) -> Json:
    """How the new client did, seed by seed, and the bytes sent; nothing where none joined."""
    if not trials:
        return {}
    return {
        **_by_key(trials, ("normal", "normal_local", "rotated", "rotated_before")),
        "join_bytes": round(fmean(row["ledger"]["total"]["bytes"] for row in trials)),
    }


def _audit_metrics(audits: Sequence[Json]) -> Json:
    """The audit's AUCs, and the metric by its own name, seed by seed; nothing without an audit.

    "adversary" is the one that was trained along, the mean over attributes. "own_0" and the like
    are the best attackers trained afterwards, by what they know and by attribute; "fresh" is the
    best of these.
    """
    if not audits:
        return {}
    metrics: Json = {
        audits[0]["metric"]: [_round(audit["figure"]) for audit in audits],
        "auc": [_round(audit["auc"]) for audit in audits],
        "adversary": [],
    }
    for audit in audits:
        joint = [attribute["joint"] for attribute in audit["attributes"]]
        metrics["adversary"].append(_round(_aggregate_known(fmean, joint)))
    views = []
    for index in range(len(audits[0]["attributes"])):
        for view in _VIEWS:
            views.append(f"{view}_{index}")
            metrics[views[-1]] = [_round(audit["attributes"][index][view]) for audit in audits]
    by_seed = zip(*(metrics[view] for view in views), strict=True)
    metrics["fresh"] = [_aggregate_known(max, aucs) for aucs in by_seed]
    metrics["validation_auc"] = [_round(audit["validation"]["auc"]) for audit in audits]
    metrics["validation_leak"] = [_round(audit["validation"]["leak"]) for audit in audits]
    return metrics


_ORDINAL = ("accuracy", "error", "accuracy_rest", "error_rest")
_VIEWS = ("own", "pooled", "strong")


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def _mean(values: Iterable[float | None]) -> float:
    return fmean(value or 0.0 for value in values)


def _aggregate_known(
    aggregate: Callable[[Sequence[float]], float], values: Iterable[float | None]
) -> float | None:
    """The mean, the maximum or the like of the values that are not None; None without any."""
    known = [value for value in values if value is not None]
    return aggregate(known) if known else None


def _leak(experiment: Json) -> float:
    """The AUC of attackers on representations of validation data; 0 without an audit."""
    return _aggregate_known(fmean, experiment.get("validation_leak", ())) or 0.0
