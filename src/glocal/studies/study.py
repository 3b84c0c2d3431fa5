"""A study of a paper as a value: what is claimed and where, the settings that are run, and the numbers that were published."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

from glocal.core.errors import InputError, suggest_name
from glocal.studies.settings import Settings

MEASURES = {"local": "Local Test", "new": "New Test"}


class Score(NamedTuple):
    """Mean and sample standard deviation in percent, with two decimals; one seed has no deviation."""

    mean: float
    std: float | None

    def __str__(self) -> str:
        return f"{self.mean:.2f}" + ("" if self.std is None else f" ± {self.std:.2f}")


class PublishedRow(NamedTuple):
    """A row of a paper's table: scores of the first so many of the study's measures, and parameters sent, if told, as printed."""

    scores: tuple[Score, ...]
    parameters: float = 0.0
    parameters_text: str = ""

    def by_measure(self, measures: Iterable[str]) -> dict[str, Score]:
        """The scores by the study's measures; those beyond have none."""
        return dict(zip([*measures][: len(self.scores)], self.scores, strict=True))

    def parameters_printed(self, counted: float) -> str:
        """A count in the digits in which the paper prints its own, such as 2.9e10 or 12.7e9."""
        if not self.parameters:
            return f"{counted:.1e}".replace("e+", "e") if counted else "0"
        digits, _, exponent = self.parameters_text.partition("e")
        return f"{counted / 10 ** int(exponent):.{len(digits.partition('.')[2])}f}e{exponent}"


@dataclass(frozen=True)
class StudyPart:
    """One block of a table: what runs together, on one deal of the data per seed.

    `candidates` names for a row the cases that differ in a few settings only; the one that is best on validation data stands for it,
    among those from whose representations attackers read no more there than the row's of `leak_limits` (an AUC, such as 0.55).
    `splits` names the cases that differ in what is shared only, from nothing to everything, by what they share. `baselines` are
    rows that no federation has trained. `goal` is the row whose accuracy on validation data the others are to reach as soon as
    they can. The rows of a `control` stand in the table of the part whose title and protocol it has, with this behind their names.
    """

    title: str
    protocol: str
    settings: Settings
    published: Mapping[str, PublishedRow] = field(default_factory=dict)
    candidates: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    splits: Mapping[str, str] = field(default_factory=dict)
    leak_limits: Mapping[str, float] = field(default_factory=dict)
    baselines: tuple[str, ...] = ()
    goal: str = ""
    control: str = ""

    def published_for(self, experiment: str) -> PublishedRow | None:
        """What was published of a case, or of the row that it may stand for."""
        row = next(
            (row for row, experiments in self.candidates.items() if experiment in experiments),
            experiment,
        )
        return self.published.get(row)


class Measurement(NamedTuple):
    """One measured figure, seed by seed: a measure, such as "local", of a case of a part."""

    part: str
    experiment: str
    measure: str


@dataclass(frozen=True)
class Claim:
    """The sum of some figures is above the sum of others, or not more than `margin` points below; tested seed by seed.

    With a `level`, it is so many points above; so a figure alone can be held against a level.
    """

    statement: str
    more: tuple[Measurement, ...]
    less: tuple[Measurement, ...]
    margin: float = 0.0
    level: float = 0.0


@dataclass(frozen=True)
class Study:
    """All of it; parts run one after the other, each in a folder of its own.

    `measures` are what its tables tell of every row, `lower` are those of which less is better, and `columns` says what they are.
    `protocols` says what a protocol means here, where that is not the usual thing.
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
        "Local Test: each device’s own model on its own test data. New Test: the ensemble of all trained devices (averaged logits) "
        "on everyone’s test data. Parameters sent, published and ours: by the paper’s count, as if every device received in every "
        "round. On the wire: what really crosses, evaluation included, in the first protocol that was run."
    )
    lower_is_better: frozenset[str] = frozenset()

    def select_parts(self, patterns: tuple[str, ...]) -> dict[str, StudyPart]:
        """Parts whose names fit one of the patterns, such as "paper-2" or "paper-*"; all of them without a pattern."""
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in self.parts):
                raise InputError(
                    f"study: {self.name} has no part '{pattern}'; {suggest_name(pattern, self.parts)}"
                )
        return {
            n: part
            for n, part in self.parts.items()
            if not patterns or any(fnmatchcase(n, p) for p in patterns)
        }
