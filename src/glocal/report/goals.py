"""The cost at which each row of a part reaches the goal: a table, and the metric by round."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from glocal.core.files import Json
from glocal.report.comparison import row_names
from glocal.report.drawing import Drawing, new_figure, plot_mean_and_range
from glocal.report.formatting import BILLION, PERCENT, size
from glocal.report.styles import COLOURS, LineStyle, legend, line_sample, nth_line_style
from glocal.studies.findings import Findings
from glocal.studies.goal_cost import (
    GoalCost,
    goal_accuracy,
    goal_cost,
    mean_over_seeds,
    without_seed,
)
from glocal.studies.metric_format import MetricFormat

GOAL_HEADS = (
    "Method",
    "Rounds",
    "Parameters sent",
    "Of those of the goal’s row",
    "With one seed left out",
    "On the wire",
    "Best",
    "In the end",
)
_FEWEST = 3  # seeds, of which one can be left out
_STYLES = (
    LineStyle(COLOURS[1], (6, 2), "s"),
    LineStyle(COLOURS[0], (), "o"),
    *map(nth_line_style, range(2, 7)),
)
_MARKS = 12  # on a line
_BELOW = 0.015  # of a fraction or of the goal itself: how far before it the lower panel begins


class GoalRow(NamedTuple):
    """A row's cost to reach the goal; None if it never does.

    `share` is relative to the parameters of the row that sets the goal. `shares` are those with
    each seed left out, goal and costs computed again; infinite if the row never reaches it.
    `best` and `end` are figures on validation data, means over seeds, as texts.
    """

    row: str
    way: GoalCost | None
    share: float
    best: str
    end: str
    shares: tuple[float, ...] = ()


def goal_text(findings: Findings, part: str) -> str:
    """What the goal is."""
    aim, row, metric = goal(findings, part), findings.study.parts[part].goal, findings.metric
    return (
        f"The goal is {metric.text(aim)} on validation data: the best mean over seeds that "
        f"{row} reaches. Parameters are by the paper’s count, until a row’s mean over seeds "
        "reaches the goal. With one seed left out: the smallest and the largest value when each "
        "seed in turn is left out, with a new goal each time. Best and in the end: the mean "
        f"validation {metric.name} over seeds, in the best round and in the last."
    )


def goal(findings: Findings, part: str) -> float:
    """The goal of a part, a figure; 0 where its row was not measured."""
    experiment = findings.experiment(part, findings.study.parts[part].goal) or {}
    return goal_accuracy(experiment.get("validation_curve", []), findings.metric)


def ways_to_goal(findings: Findings, part: str) -> list[GoalRow]:
    """Every row of a part that sends anything; none without a goal that was measured."""
    of = findings.study.parts[part]
    if not of.goal or not goal(findings, part) or part not in findings.parts:
        return []
    curves = {
        row: (findings.experiment(part, row) or {}).get("validation_curve", [])
        for row in row_names(of)
    }
    sending = {
        row: curve for row, curve in curves.items() if any(point["parameters"] for point in curve)
    }
    if of.goal not in sending:
        return []
    seeds = sorted({point["seed"] for point in sending[of.goal]})
    metric = findings.metric
    ways = _ways(sending, of.goal, metric)
    fewer: list[dict[str, tuple[GoalCost | None, float]]] = []
    for seed in seeds:
        others = {row: without_seed(curve, seed) for row, curve in sending.items()}
        fewer.append(_ways(others, of.goal, metric))
    without_each_seed = fewer if len(seeds) >= _FEWEST else []
    heights = {
        row: [point["validation"] for point in mean_over_seeds(curve)]
        for row, curve in sending.items()
    }
    return [
        GoalRow(
            row,
            *ways[row],
            metric.text(metric.best(heights[row]), 2),
            metric.text(heights[row][-1], 2),
            tuple(other[row][1] for other in without_each_seed),
        )
        for row in sending
    ]


def _ways(
    curves: Mapping[str, Sequence[Json]], by: str, metric: MetricFormat
) -> dict[str, tuple[GoalCost | None, float]]:
    """The cost of each row to reach the best of one of them, and its relative parameters."""
    aim = goal_accuracy(curves[by], metric)
    cells = {row: goal_cost(curve, aim, metric) for row, curve in curves.items()}
    first = cells[by]
    return {
        row: (way, way.parameters / first.parameters if way and first else math.inf)
        for row, way in cells.items()
    }


def goal_cells(row_cost: GoalRow) -> tuple[str, ...]:
    """A row of the table."""
    spread, heights = _spread(row_cost.shares), (row_cost.best, row_cost.end)
    if row_cost.way is None:
        return row_cost.row, "never", "-", "-", spread, "-", *heights
    sent = f"{row_cost.way.parameters:.2e}".replace("e+", "e")
    return (
        row_cost.row,
        str(row_cost.way.rounds),
        sent,
        _percent(row_cost.share),
        spread,
        size(row_cost.way.bytes),
        *heights,
    )


def _spread(shares: Sequence[float]) -> str:
    """The least and the most of them, in words."""
    if not shares or min(shares) == max(shares):
        return _percent(shares[0]) if shares else "-"
    return f"{_percent(min(shares))} to {_percent(max(shares))}"


def _percent(share: float) -> str:
    return "never" if math.isinf(share) else f"{PERCENT * share:.1f} %"


def draw_goal(findings: Findings) -> Drawing | None:
    """The metric by round of every row that sends anything and, near the goal, by what it has sent.

    Of the last part with a goal and published numbers, or without these.
    """
    parts = [part for part in findings.study.parts if ways_to_goal(findings, part)]
    if not parts:
        return None
    part = max(
        parts, key=lambda name: (bool(findings.study.parts[name].published), parts.index(name))
    )
    about, metric = findings.study.parts[part], findings.metric
    aim = metric.scale * goal(findings, part)
    styles = dict(
        zip((row_cost.row for row_cost in ways_to_goal(findings, part)), _STYLES, strict=False)
    )
    first = mean_over_seeds((findings.experiment(part, about.goal) or {})["validation_curve"])
    figure = new_figure(6.2)
    whole, near = figure.subplots(2, 1)
    for row, line_style in styles.items():
        curve = mean_over_seeds((findings.experiment(part, row) or {})["validation_curve"])
        common = 0 if row == about.goal else sum(point in first for point in curve)
        own = curve[max(common - 1, 0) :]
        figures = [[metric.scale * point["validation"]] for point in own]
        every = max(1, len(own) // _MARKS)
        plot_mean_and_range(
            whole,
            [point["round"] for point in own],
            figures,
            line_style,
            label=row,
            markevery=every,
        )
        plot_mean_and_range(
            near,
            [point["parameters"] / BILLION for point in own],
            figures,
            line_style,
            markevery=every,
        )
    for axes, xlabel in (
        (whole, "round"),
        (near, "parameters sent by the paper’s count, billions"),
    ):
        axes.axhline(aim, color=COLOURS[7], linestyle=":", linewidth=1.4)
        axes.set(xlabel=xlabel, ylabel=f"validation {metric.label}")
    start = aim - metric.scale * _BELOW
    if not metric.is_fraction:
        start = aim - _BELOW * abs(aim) if metric.higher_is_better else aim + _BELOW * abs(aim)
    end = metric.best(figure for line in near.lines for figure in line.get_ydata())
    end += 0.1 * (end - start)
    near.set_ylim(min(start, end), max(start, end))
    reached = [
        point["parameters"]
        for point in first
        if not metric.is_better(start, metric.scale * point["validation"])
    ]
    near.set_xlim(left=min(reached) / BILLION)
    caption = (
        f"{metric.name.capitalize()} on validation data, {about.title}, protocol "
        f"`{about.protocol}`: above by round, as in the paper’s figure, below "
        "near the goal, by what was sent until then. The dotted line is the goal. Rows that go on "
        "from FedAvg begin where they "
        "leave it. A line is the mean over seeds."
    )
    return Drawing(
        figure,
        f"{metric.name.capitalize()} by round",
        caption,
        legend((line_sample(line_style), row) for row, line_style in styles.items()),
    )
