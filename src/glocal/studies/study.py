"""A paper's study as a value: its claims, the settings to run, and the published numbers."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from glocal.core.errors import InputError, suggest_name
from glocal.studies.settings import Settings

MEASURES = {"local": "Local Test", "new": "New Test"}
# of a study's findings, what its report shows; as a function, or as "module:function"
ReportFunction = Callable[..., Any] | str


class Score(NamedTuple):
    """Mean and sample standard deviation, fractions in percent, printed with two decimals.

    One seed has no deviation.
    """

    mean: float
    std: float | None

    def __str__(self) -> str:
        return f"{self.mean:.2f}" + ("" if self.std is None else f" ± {self.std:.2f}")


class PublishedRow(NamedTuple):
    """A row of a paper's table.

    `scores` are those of the study's first measures; `parameters` is how many are sent, if the
    paper gives it. It prints them as a multiple of a power of ten with this `exponent`, with so
    many `decimals`.

    >>> row = PublishedRow((), parameters=12.7e9, exponent=9)
    >>> row.parameters_text, row.parameters_printed(2.34e9)
    ('12.7e9', '2.3e9')
    """

    scores: tuple[Score, ...]
    parameters: float | None = None
    exponent: int = 0
    decimals: int = 1

    def by_measure(self, measures: Iterable[str]) -> dict[str, Score]:
        """The scores by measure; measures beyond the published ones have none."""
        return dict(zip([*measures][: len(self.scores)], self.scores, strict=True))

    @property
    def parameters_text(self) -> str:
        """The number of parameters as the paper prints it; empty if it gives none."""
        return "" if self.parameters is None else self.parameters_printed(self.parameters)

    def parameters_printed(self, counted: float) -> str:
        """A count with as many digits as the paper's own, such as 2.9e10 or 12.7e9."""
        if not self.parameters:
            return f"{counted:.1e}".replace("e+", "e") if counted else "0"
        return f"{counted / 10**self.exponent:.{self.decimals}f}e{self.exponent}"


@dataclass(frozen=True)
class StudyPart:
    """One block of a table: experiments on the same partition of the data per seed.

    - `candidates` maps a row to experiments that differ in a few settings. The row shows the one
      that is best on validation data among those whose leakage on validation data is at most the
      row's `leak_limits` (an AUC, such as 0.55).
    - `choices` describes a candidate in a few words, such as "lr 0.05"; the default is its name.
    - `splits` maps experiments that differ only in their split to a description of what they share.
    - `baselines` are rows without federated training.
    - `goal` is the row whose figure on validation data the others should reach.
    - With a `control`, the rows go into the table of the part with the same title and protocol, and
      this text is appended to their names.
    """

    title: str
    protocol: str
    settings: Settings
    published: Mapping[str, PublishedRow] = field(default_factory=dict)
    candidates: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    choices: Mapping[str, str] = field(default_factory=dict)
    splits: Mapping[str, str] = field(default_factory=dict)
    leak_limits: Mapping[str, float] = field(default_factory=dict)
    baselines: tuple[str, ...] = ()
    goal: str = ""
    control: str = ""
    sweep_only: tuple[str, ...] = ()
    in_tables: bool = True

    def published_for(self, experiment: str) -> PublishedRow | None:
        """What was published for an experiment, or for the row that it may stand for."""
        row = next(
            (row for row, experiments in self.candidates.items() if experiment in experiments),
            experiment,
        )
        return self.published.get(row)


class Measurement(NamedTuple):
    """One measure, such as "local", of an experiment of a part; it has a value per seed."""

    part: str
    experiment: str
    measure: str


@dataclass(frozen=True)
class Claim:
    """The sum of `more` is above that of `less`, or at most `margin` points below.

    It is tested over paired seeds. With a `level`, the sum is that many points above; so one
    measurement alone can be compared with a level.
    """

    statement: str
    more: tuple[Measurement, ...]
    less: tuple[Measurement, ...]
    margin: float = 0.0
    level: float = 0.0


@dataclass(frozen=True)
class Study:
    """A study of a paper; its parts run one after the other, each in its own folder.

    `measures` maps the columns of its tables to their headings. In those in `lower_is_better`, a
    smaller value is better. `protocols` maps the name of a protocol to its description.
    """

    name: str
    title: str
    source: str
    statement: str
    parts: Mapping[str, StudyPart]
    claims: tuple[Claim, ...] = ()
    measures: Mapping[str, str] = field(default_factory=lambda: MEASURES)
    protocols: Mapping[str, str] = field(default_factory=dict)
    caption: str = (
        "Local Test: each client’s own model on its own test data. New Test: the ensemble of all "
        "trained clients (averaged outputs) on all clients’ test data. Parameters sent, published "
        "and ours: by the paper’s count, as if every client received in every round. On the wire: "
        "what is really sent, evaluation included, in the first protocol that was run."
    )
    lower_is_better: frozenset[str] = frozenset()
    reference_protocol: str = "paper"
    figures: Mapping[str, ReportFunction] = field(default_factory=dict)
    lead_figure: str = ""
    tables: Mapping[str, ReportFunction] = field(default_factory=dict)

    def select_parts(self, patterns: tuple[str, ...]) -> dict[str, StudyPart]:
        """The parts that match a pattern, such as "paper-2" or "paper-*"; without patterns, all."""
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in self.parts):
                raise InputError(
                    f"study: {self.name} has no part '{pattern}'; "
                    f"{suggest_name(pattern, self.parts)}"
                )
        if not patterns:
            return dict(self.parts)
        selected: dict[str, StudyPart] = {}
        for name, part in self.parts.items():
            if any(fnmatchcase(name, pattern) for pattern in patterns):
                selected[name] = part
        return selected
