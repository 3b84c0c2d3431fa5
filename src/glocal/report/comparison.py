"""A study's results beside the paper's published numbers: rows, tables and splits as values."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

from glocal.core import trees
from glocal.core.files import Json
from glocal.core.modules import params_of
from glocal.studies.build import build_split, default_model, named_split
from glocal.studies.findings import OF_THE_METRIC, Findings
from glocal.studies.run import resolve
from glocal.studies.study import (
    MEASURES,
    Claim,
    Measurement,
    PublishedRow,
    ReportFunction,
    Score,
    Study,
    StudyPart,
)
from glocal.studies.user_functions import import_function


class ScorePair(NamedTuple):
    """A published score and ours; None if it is missing. `lower`: less is better."""

    paper: Score | None
    ours: Score | None
    lower_is_better: bool = False

    @property
    def difference(self) -> float | None:
        """Ours less the paper's, in points."""
        return (
            None
            if self.paper is None or self.ours is None
            else round(self.ours.mean - self.paper.mean, 2)
        )

    @property
    def shortfall(self) -> float:
        """How much worse ours is than the paper's mean less its deviation, in points; or 0."""
        if self.paper is None or self.difference is None:
            return 0.0
        worse = self.difference if self.lower_is_better else -self.difference
        return max(0.0, round(worse - (self.paper.std or 0.0), 2))


class SentTotals(NamedTuple):
    """What was sent: the paper's number, ours by its count and in its digits, and the true bytes.

    `join_bytes` is what a new client's joining alone has cost, in bytes.
    """

    paper: str | None
    ours: str | None = None
    parameters: int = 0
    bytes: int = 0
    join_bytes: int = 0

    @property
    def agrees(self) -> bool:
        """Whether the two printed numbers are the same; true if one of them is missing."""
        return self.paper is None or self.ours is None or self.paper == self.ours


class Row(NamedTuple):
    """A row of one part: its scores, and what it sent.

    `choice` is what distinguishes its experiment from the row's other candidates, such as "lr
    0.05".
    """

    name: str
    choice: str
    scores: Mapping[str, ScorePair]
    sent: SentTotals

    @property
    def measured(self) -> bool:
        """Whether there is anything of ours in it."""
        return self.sent.ours is not None


class ComparisonTable(NamedTuple):
    """A table with the protocols side by side: published and measured values of every row."""

    title: str
    measures: Mapping[str, str]
    lower_is_better: frozenset[str]
    protocols: tuple[str, ...]
    rows: Mapping[str, Mapping[str, Row]]
    note: str = ""
    reference_protocol: str = "paper"
    is_fraction: bool = True

    def unit(self, measure: str) -> str:
        """What a head says after the words of a measure."""
        return ", %" if self.is_fraction or measure not in OF_THE_METRIC else ""

    @property
    def counts(self) -> bool:
        """Whether the paper reports what its rows send."""
        return any(row.sent.paper for row in self._all())

    @property
    def has_new_clients(self) -> bool:
        """Whether new clients have come."""
        return any(row.sent.join_bytes for row in self._all())

    def published(self, measure: str) -> bool:
        """Whether the paper prints a measure of any row."""
        return any(row.scores[measure].paper for row in self._all())

    def _all(self) -> list[Row]:
        return [row for of in self.rows.values() for row in of.values()]


class SweepPoint(NamedTuple):
    """A split of the sweep: what it shares, how many parameters, and its values, one per seed."""

    shares: str
    parameters: int
    whole: int
    figures: Mapping[str, Sequence[float]]


def score(values: Sequence[float]) -> Score | None:
    """Figures over seeds, fractions in percent; None without any.

    >>> print(score([98.0, 99.0]))
    98.50 ± 0.71
    """
    if not values:
        return None
    return Score(round(fmean(values), 2), round(stdev(values), 2) if len(values) > 1 else None)


def published_score(study: Study, row: PublishedRow | None, measure: str) -> Score | None:
    """The paper's number of a row for a measure of the study; None if it has none."""
    return row.by_measure(study.measures).get(measure) if row else None


def rows_of(findings: Findings, part: str) -> list[Row]:
    """The published rows of a part in the paper's order, then those that the paper lacks."""
    published = findings.study.parts[part].published
    return [
        comparison_row(findings, part, name, published.get(name))
        for name in row_names(findings.study.parts[part])
    ]


def row_names(part: StudyPart) -> list[str]:
    """Published rows first; without experiments of the sweep and those without a new client."""
    new_client = part.settings.new_client
    experiments = {
        name: experiment
        for name, experiment in part.settings.experiments.items()
        if new_client is None or experiment.join_plan
    }
    in_table = [name for name in experiments if name not in part.sweep_only]
    names = [*(part.candidates or in_table), *part.baselines]
    return [
        *(name for name in part.published if name in names),
        *(name for name in names if name not in part.published),
    ]


def tables_of(findings: Findings) -> list[ComparisonTable]:
    """One table for each split of the data of which something was measured."""
    columns: dict[str, dict[str, list[Row]]] = {}
    for name, part in findings.study.parts.items():
        if name in findings.parts and part.in_tables:
            behind = f", {part.control}" if part.control else ""
            rows = [row._replace(name=f"{row.name}{behind}") for row in rows_of(findings, name)]
            columns.setdefault(part.title, {}).setdefault(part.protocol, []).extend(rows)
    tables = [side_by_side(title, findings.study, of) for title, of in columns.items()]
    return [table._replace(is_fraction=findings.metric.is_fraction) for table in tables]


def all_tables(findings: Findings) -> list[ComparisonTable]:
    """The study's own tables, then one for each split of the data."""
    functions = findings.study.tables.items()
    tables = [load_report_function(of, f"tables.{name}")(findings) for name, of in functions]
    return [table for table in [*tables, *tables_of(findings)] if table is not None]


def load_report_function(function: ReportFunction, where: str) -> Callable[..., Any]:
    """The function itself, imported if it is named by "module:function"."""
    return import_function(function, where) if isinstance(function, str) else function


def sweep_points(findings: Findings, part: str) -> list[SweepPoint]:
    """The measured splits of a part, from nothing shared to everything.

    How much is shared is counted on the study's model.
    """
    of, measured = findings.study.parts[part], findings.parts.get(part)
    if not measured or not of.splits:
        return []
    if measured["settings"]["model"] != of.settings.as_dict()["model"]:
        return []  # the sizes of another model are not known here
    sizes = _sizes(of)
    return [
        SweepPoint(
            shares,
            sizes[shares],
            sizes["all"],
            {
                measure: findings.values(Measurement(part, experiment, measure))
                for measure in MEASURES
            },
        )
        for shares, experiment in of.splits.items()
        if findings.experiment(part, experiment)
    ]


def published_lead(findings: Findings, claim: Claim) -> float | None:
    """The lead of a claim by the paper's own means, in points; None if one is missing."""
    lead = -claim.level
    for sign, side in ((1, claim.more), (-1, claim.less)):
        for figure in side:
            row = published_score(
                findings.study,
                findings.study.parts[figure.part].published.get(figure.experiment),
                figure.measure,
            )
            if row is None:
                return None
            lead += sign * row.mean
    return round(lead, 2)


def seeds_of(findings: Findings, part: str) -> int:
    """How many seeds a part has been run with."""
    return max(
        (
            len(experiment["validation"])
            for experiment in findings.parts[part]["experiments"].values()
        ),
        default=0,
    )


def changes_of(findings: Findings, part: str) -> list[str]:
    """Settings with which a part was run that are not the study's, such as "plan.seeds = 2"."""
    run = findings.parts[part]["settings"]
    planned = resolve(findings.study.parts[part].settings).as_dict()
    unused = ("alpha", "classes_per_client") if run["data"]["partition"] == "iid" else ()
    changes: list[str] = []
    for table in _COMPARED_TABLES:
        for key, value in run.get(table, {}).items():
            ignored = table == "run" and key not in _DECIDING
            if ignored or key in unused or value == planned.get(table, {}).get(key):
                continue
            changes.append(f"{table}.{key} = {value}")
    for name, experiment in run["experiments"].items():
        before = planned["experiments"].get(name, {})
        for key, value in experiment.items():
            if key != "skip_seeds" and value != before.get(key):
                changes.append(f"experiments.{name}.{key} = {value}")
        for key, value in before.items():
            if key not in experiment:
                changes.append(f"experiments.{name} without {key} = {value}")
    return changes


# nothing else under "run" changes a result
_DECIDING = (
    "select",
    "precision",
    "validate_every",
    "validate_clients",
    "tests",
    "new_test_members",
)
_COMPARED_TABLES = (
    "data",
    "model",
    "task",
    "split",
    "optimizer",
    "plan",
    "run",
    "new_client",
    "audit",
    "ordinal",
)


def missing_experiments(findings: Findings, part: str) -> list[str]:
    """Experiments of a part that have not been finished."""
    return [
        experiment
        for experiment in findings.parts[part]["settings"]["experiments"]
        if experiment not in findings.parts[part]["experiments"]
    ]


def left_out(findings: Findings, part: str) -> dict[str, list[int]]:
    """The seeds that experiments of a part skip; an empty list means all seeds."""
    run: dict[str, Json] = findings.parts[part]["settings"]["experiments"]
    some = {
        name: [*experiment["skip_seeds"]]
        for name, experiment in run.items()
        if experiment.get("skip_seeds")
    }
    return some | {
        name: [] for name in findings.study.parts[part].settings.experiments if name not in run
    }


def comparison_row(findings: Findings, part: str, name: str, published: PublishedRow | None) -> Row:
    """A row of a part: what was measured, beside what was published."""
    study = findings.study
    ours = {
        measure: score(findings.values(Measurement(part, name, measure)))
        for measure in study.measures
    }
    scores = {
        measure: ScorePair(
            published_score(study, published, measure), mine, measure in study.lower_is_better
        )
        for measure, mine in ours.items()
    }
    return Row(name, _choice(findings, part, name), scores, _sent(findings, part, name, published))


def _choice(findings: Findings, part: str, name: str) -> str:
    """What distinguishes the experiment that stands for a row; empty if it is the row's own."""
    experiment = findings.name_of(part, name)
    if experiment == name:
        return ""
    return findings.study.parts[part].choices.get(experiment, experiment)


def _sent(findings: Findings, part: str, name: str, published: PublishedRow | None) -> SentTotals:
    """Counts of a row; one that the paper lacks has as many digits as the table's other rows."""
    experiment, paper = (
        findings.experiment(part, name),
        published.parameters_text if published else None,
    )
    if experiment is None:
        return SentTotals(paper)
    published_rows = [
        row for row in findings.study.parts[part].published.values() if row.parameters
    ]
    if not published_rows:
        return SentTotals(
            None,
            "",
            experiment["parameters"],
            experiment["bytes"],
            experiment.get("join_bytes", 0),
        )
    digits = published or published_rows[0]
    return SentTotals(
        paper,
        digits.parameters_printed(experiment["paper_parameters"]),
        experiment["parameters"],
        experiment["bytes"],
    )


def side_by_side(title: str, study: Study, columns: Mapping[str, Iterable[Row]]) -> ComparisonTable:
    """A table of rows by protocol."""
    rows: dict[str, dict[str, Row]] = {}
    for protocol, of in columns.items():
        for row in of:
            rows.setdefault(row.name, {})[protocol] = row
    return ComparisonTable(
        title,
        study.measures,
        study.lower_is_better,
        tuple(columns),
        rows,
        reference_protocol=study.reference_protocol,
    )


def _sizes(part: StudyPart) -> dict[str, int]:
    """How many parameters each split of a part shares."""
    model = default_model(part.settings.model.name)
    params = params_of(model)
    sizes = {"none": 0, "all": trees.numel(params)}
    for shares, experiment in part.splits.items():
        if shares not in sizes:
            sides = named_split(part.settings, part.settings.experiments[experiment])
            split = build_split(sides, model)
            sizes[shares] = trees.numel(split.take_shared(params))
    return sizes
