"""The cost of reaching a goal: validation figures by round, and what was sent until then."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from glocal.core.files import Json, read_rows
from glocal.studies.metric_format import ACCURACY, MetricFormat
from glocal.studies.run import experiment_folder, read_settings

_PER_MILLE = 1000  # of a percent
_DIGITS = 3  # of a figure that is no fraction


class GoalCost(NamedTuple):
    """Rounds until the goal was first reached, parameters by the paper's count, and bytes sent."""

    rounds: int
    parameters: float
    bytes: float


def validation_curve(folder: Path, name: str) -> list[Json]:
    """Every validated round of an experiment, seed by seed, a warm start's rounds included."""
    experiment = read_settings(folder).experiments[name]
    curve: list[Json] = []
    if experiment.start_from:
        earlier = validation_curve(folder, experiment.start_from)
        curve += [row for row in earlier if row["round"] <= (experiment.start_round or 0)]
    for row in read_rows(experiment_folder(folder, name) / "rows.jsonl"):
        if row.get("validation") is None:
            continue
        curve.append(
            {
                "seed": row["seed"],
                "round": row["round"] + 1,
                "validation": round(row["validation"], 6),
                "parameters": row["paper_parameters"],
                "bytes": row["bytes"],
            }
        )
    return curve


def mean_over_seeds(rows: Sequence[Json]) -> list[Json]:
    """A curve's rounds in order, each with its mean over seeds."""
    by_round: dict[int, list[Json]] = {}
    for row in rows:
        by_round.setdefault(row["round"], []).append(row)
    means: list[Json] = []
    for number, seeds in sorted(by_round.items()):
        mean: Json = {"round": number}
        for key in ("validation", "parameters", "bytes"):
            # rounded: a mean of thousandths may be a hair below one, and miss its own goal
            mean[key] = round(fmean([row[key] for row in seeds]), 9)
        means.append(mean)
    return means


def without_seed(rows: Sequence[Json], seed: int) -> list[Json]:
    """A curve without one of its seeds."""
    return [row for row in rows if row["seed"] != seed]


def goal_accuracy(rows: Sequence[Json], metric: MetricFormat = ACCURACY) -> float:
    """The best mean over seeds of a curve, to a tenth of a percent; a fraction.

    Figures of other metrics have three digits. It is rounded to the side where it is reached.

    >>> row = {"round": 1, "parameters": 8, "bytes": 32}
    >>> curve = [{**row, "seed": 0, "validation": 0.4156}, {**row, "seed": 1, "validation": 0.42}]
    >>> goal_accuracy(curve), goal_accuracy(curve, MetricFormat("mae", higher_is_better=False))
    (0.417, 0.418)
    """
    means = [row["validation"] for row in mean_over_seeds(rows)]
    best = metric.best(means) if means else 0.0
    steps = _PER_MILLE if metric.is_fraction else _steps(best)
    # 1000 * 0.29 is 289.99999999999994
    towards = math.floor if metric.higher_is_better else math.ceil
    return towards(round(steps * best, 6)) / steps


def _steps(value: float) -> float:
    """How many steps of the last of its digits a unit has."""
    return 10.0 ** (_DIGITS - 1 - math.floor(math.log10(abs(value)))) if value else 1.0


def goal_cost(
    rows: Sequence[Json], goal: float, metric: MetricFormat = ACCURACY
) -> GoalCost | None:
    """When a curve's mean over seeds first reaches the goal; None if it never does."""
    for row in mean_over_seeds(rows):
        if not metric.is_better(goal, row["validation"]):
            return GoalCost(row["round"], row["parameters"], row["bytes"])
    return None
