"""How soon a goal is reached: a case's accuracy on validation data by round, and what it had sent by then."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from glocal.core.files import Json, read_rows
from glocal.studies.run import experiment_folder, read_settings

_PER_MILLE = 1000  # of a percent


class GoalCost(NamedTuple):
    """When the goal was first reached: rounds done, parameters by the paper's count, and bytes on the wire."""

    rounds: int
    parameters: float
    bytes: float


def validation_curve(folder: Path, name: str) -> list[Json]:
    """Every validated round of a case, seed by seed, those of the case that it goes on from before its own."""
    experiment = read_settings(folder).experiments[name]
    before = (
        [
            row
            for row in validation_curve(folder, experiment.start_from)
            if row["round"] <= (experiment.start_round or 0)
        ]
        if experiment.start_from
        else []
    )
    rows = [
        row
        for row in read_rows(experiment_folder(folder, name) / "rows.jsonl")
        if row.get("validation") is not None
    ]
    return before + [
        {
            "seed": row["seed"],
            "round": row["round"] + 1,
            "validation": round(row["validation"], 6),
            "parameters": row["paper_parameters"],
            "bytes": row["bytes"],
        }
        for row in rows
    ]


def mean_over_seeds(rows: Sequence[Json]) -> list[Json]:
    """A course's rounds in order, each with its mean over seeds."""
    by_round: dict[int, list[Json]] = {}
    for row in rows:
        by_round.setdefault(row["round"], []).append(row)
    return [
        # a mean of thousandths may come out a hair below one, and would then miss a goal of its own
        {
            "round": number,
            **{
                key: round(fmean(row[key] for row in of), 9)
                for key in ("validation", "parameters", "bytes")
            },
        }
        for number, of in sorted(by_round.items())
    ]


def without_seed(rows: Sequence[Json], seed: int) -> list[Json]:
    """A course as the other seeds have it."""
    return [row for row in rows if row["seed"] != seed]


def goal_accuracy(rows: Sequence[Json]) -> float:
    """The best that a course reaches, its mean over seeds, to a tenth of a percent; a share.

    >>> row = {"round": 1, "parameters": 8, "bytes": 32}
    >>> goal_accuracy([{**row, "seed": 0, "validation": 0.4156}, {**row, "seed": 1, "validation": 0.42}])
    0.417
    """
    best = max((row["validation"] for row in mean_over_seeds(rows)), default=0.0)
    return math.floor(round(_PER_MILLE * best, 6)) / _PER_MILLE  # 1000 * 0.29 is 289.99999999999994


def goal_cost(rows: Sequence[Json], goal: float) -> GoalCost | None:
    """When a course's mean over seeds first is at the goal; None where it never is."""
    for row in mean_over_seeds(rows):
        if row["validation"] >= goal:
            return GoalCost(row["round"], row["parameters"], row["bytes"])
    return None
