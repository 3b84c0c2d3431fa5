"""The cost at which each row of a part reaches the goal: a table, and accuracy by round."""

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

GOAL_HEADS = (
    "Method",
    "Rounds",
    "Parameters sent",
    "Of those of the goal’s row",
    "With one seed left out",
    "On the wire",
    "Highest",
    "In the end",
)
_FEWEST = 3  # seeds, of which one can be left out
_STYLES = (
    LineStyle(COLOURS[1], (6, 2), "s"),
    LineStyle(COLOURS[0], (), "o"),
    *map(nth_line_style, range(2, 7)),
)
_MARKS = 12  # on a line
_BELOW = 1.5  # points below the goal, where the lower panel begins


class GoalRow(NamedTuple):
    """A row's cost to reach the goal; None if it never does.

    `share` is relative to the parameters of the row that sets the goal. `shares` are those with
    each seed left out, goal and costs computed again; infinite if the row never reaches it.
    `highest` and `end` are validation accuracies, means over seeds.
    """

    row: str
    way: GoalCost | None
    share: float
    highest: float
    end: float
    shares: tuple[float, ...] = ()


def goal_text(findings: Findings, part: str) -> str:
    """What the goal is."""
    aim, row = goal(findings, part), findings.study.parts[part].goal
    return (
        f"The goal is {PERCENT * aim:.1f} % on validation data: the best mean over seeds that "
        f"{row} reaches. Parameters are by the paper’s count, until a row’s mean over seeds "
        "reaches the goal. With one seed left out: the smallest and the largest value when each "
        "seed in turn is left out, with a new goal each time. Highest and in the end: the mean "
        "validation accuracy over seeds, in the best round and in the last."
    )


def goal(findings: Findings, part: str) -> float:
    """The goal of a part, a share; 0 where its row was not measured."""
    return goal_accuracy(
        (findings.experiment(part, findings.study.parts[part].goal) or {}).get(
            "validation_curve", []
        )
    )


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
    ways = _ways(sending, of.goal)
    fewer = [
        _ways({row: without_seed(curve, seed) for row, curve in sending.items()}, of.goal)
        for seed in seeds
    ]
    without_each_seed = fewer if len(seeds) >= _FEWEST else []
    heights = {
        row: [point["validation"] for point in mean_over_seeds(curve)]
        for row, curve in sending.items()
    }
    return [
        GoalRow(
            row,
            *ways[row],
            max(heights[row]),
            heights[row][-1],
            tuple(other[row][1] for other in without_each_seed),
        )
        for row in sending
    ]


def _ways(
    curves: Mapping[str, Sequence[Json]], by: str
) -> dict[str, tuple[GoalCost | None, float]]:
    """The cost of each row to reach the best of one of them, and its relative parameters."""
    aim = goal_accuracy(curves[by])
    cells = {row: goal_cost(curve, aim) for row, curve in curves.items()}
    first = cells[by]
    return {
        row: (way, way.parameters / first.parameters if way and first else math.inf)
        for row, way in cells.items()
    }


def goal_cells(row_cost: GoalRow) -> tuple[str, ...]:
    """A row of the table."""
    spread, heights = (
        _spread(row_cost.shares),
        [f"{PERCENT * height:.2f} %" for height in (row_cost.highest, row_cost.end)],
    )
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
    """Accuracy by round of every row that sends anything and, near the goal, by what it has sent.

    Of the last part with a goal and published numbers, or without these.
    """
    parts = [part for part in findings.study.parts if ways_to_goal(findings, part)]
    if not parts:
        return None
    part = max(
        parts, key=lambda name: (bool(findings.study.parts[name].published), parts.index(name))
    )
    about, aim = findings.study.parts[part], PERCENT * goal(findings, part)
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
        accuracies = [[PERCENT * point["validation"]] for point in own]
        every = max(1, len(own) // _MARKS)
        plot_mean_and_range(
            whole,
            [point["round"] for point in own],
            accuracies,
            line_style,
            label=row,
            markevery=every,
        )
        plot_mean_and_range(
            near,
            [point["parameters"] / BILLION for point in own],
            accuracies,
            line_style,
            markevery=every,
        )
    for axes, xlabel in (
        (whole, "round"),
        (near, "parameters sent by the paper’s count, billions"),
    ):
        axes.axhline(aim, color=COLOURS[7], linestyle=":", linewidth=1.4)
        axes.set(xlabel=xlabel, ylabel="validation accuracy, %")
    low, high = aim - _BELOW, max(accuracy for line in near.lines for accuracy in line.get_ydata())
    near.set_ylim(low, high + 0.1 * (high - low))
    near.set_xlim(
        left=min(point["parameters"] for point in first if PERCENT * point["validation"] >= low)
        / BILLION
    )
    caption = (
        f"Accuracy on validation data, {about.title}, protocol `{about.protocol}`: above by round, "
        "as in the paper’s figure, below "
        "near the goal, by what was sent until then. The dotted line is the goal. Rows that go on "
        "from FedAvg begin where they "
        "leave it. A line is the mean over seeds."
    )
    return Drawing(
        figure,
        "Accuracy by round",
        caption,
        legend((line_sample(line_style), row) for row, line_style in styles.items()),
    )
