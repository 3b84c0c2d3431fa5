"""Clients that joined, left and drifted: each group's metric by round, and forgetting."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from glocal.evaluate.forgetting import Forgetting, MetricHistory
from glocal.federate.phases import subgroup_history
from glocal.report.drawing import FOREGROUND, Drawing, new_axes
from glocal.report.run_data import ExperimentRecord, RunData
from glocal.report.styles import LineStyle, legend, line_sample, nth_line_style
from glocal.report.tables import boxed_table
from glocal.studies.groups import drift_start
from glocal.studies.metric_format import MetricFormat
from glocal.studies.settings import GroupSettings

_FIRST_GROUP_STYLE = 4  # colours of groups begin where those of a few experiments end
_LETTER = 0.017  # of the width of a panel
_ARRIVES, _LEAVES, _DRIFTS = "+", "−", "↻"


class Mark(NamedTuple):
    """Something that happens to a group before a round."""

    round_index: int
    words: str


def draw_groups(run: RunData) -> list[Drawing]:
    """A panel per experiment with evaluations by group, all on the same axes."""
    drawn = [
        (record, histories) for record in run.records if (histories := group_histories(run, record))
    ]
    last = max((run.plan(record).total_rounds for record, _ in drawn), default=0)
    return [_drawing(run, record, histories, last) for record, histories in drawn]


def groups_table(run: RunData) -> str:
    """One row per experiment and group: the metric at first, at best and at last; forgetting."""
    label = run.metric.label
    heads = [f"{label}: after the first round", "best", "last", f"forgetting{_points(run)}"]
    words = "".join(f'<th scope="col" class="name">{name}</th>' for name in ("Experiment", "Group"))
    columns = "".join(f'<th scope="col">{name}</th>' for name in heads)
    rows = (
        _row(run, record, name, histories)
        for record in run.records
        for name, histories in group_histories(run, record).items()
    )
    return boxed_table(f"<tr>{words}{columns}</tr>", rows, "Groups by experiment")


def groups_note(run: RunData) -> str:
    """What the columns mean."""
    return (
        f"Mean over a group’s clients of the {run.metric.name} of their own models on their own "
        "current test data. After the first round: the first evaluation of a group, one round "
        "after it joined. Forgetting: how much worse the last evaluation is than the best earlier "
        f"one{_points(run)}; below 0 a group is still improving. A group that left is tested as if "
        "it came back: the current shared part with the private part of each client when it left. "
        "“Best” is the best of many evaluations, so a little forgetting is noise."
    )


def _points(run: RunData) -> str:
    return ", points" if run.metric.is_fraction else ""


def group_histories(run: RunData, record: ExperimentRecord) -> dict[str, list[MetricHistory]]:
    """Each group's figures over the rounds, one history per seed, where it was evaluated."""
    seeds = sorted({row["seed"] for row in record.rows})
    summaries = {
        name: [subgroup_history(record.rows, name, seed) for seed in seeds]
        for name in run.settings.groups
    }
    return {
        name: seen
        for name, histories in summaries.items()
        if (seen := [each for each in histories if each.rounds])
    }


def _row(
    run: RunData, record: ExperimentRecord, name: str, histories: Sequence[MetricHistory]
) -> str:
    summaries: list[Forgetting] = []
    for history in histories:
        summary = history.summary(higher_is_better=run.metric.higher_is_better)
        if summary is not None:
            summaries.append(summary)
    cells = "".join(f"<td>{cell}</td>" for cell in _cells(run.metric, summaries))
    group = f'<td class="name">{line_sample(_line_style(run, name))}{escape(name)}</td>'
    return f'<tr><th scope="row" class="name">{escape(record.name)}</th>{group}{cells}</tr>'


def _cells(metric: MetricFormat, summaries: Sequence[Forgetting]) -> Iterable[str]:
    for column in ("first", "best", "last", "forgetting"):
        values = [getattr(each, column) for each in summaries]
        yield metric.mean_std(values).replace("-", "−")


def _line_style(run: RunData, name: str) -> LineStyle:
    """A colour and a marker; the line is solid, because dotted lines are of groups that left."""
    return nth_line_style(_FIRST_GROUP_STYLE + [*run.settings.groups].index(name))._replace(dash=())


def _drawing(
    run: RunData,
    record: ExperimentRecord,
    histories: Mapping[str, list[MetricHistory]],
    last: int,
) -> Drawing:
    figure, axes = new_axes()
    metric = run.metric
    axes.set(xlabel="round", ylabel=f"Local Test: {metric.label}", xlim=(0, last))
    if metric.is_fraction:
        axes.set_ylim(0, 102)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    _mark(
        axes,
        [mark for name, group in run.settings.groups.items() for mark in _marks(name, group)],
        last,
    )
    for name, seeds in histories.items():
        _follow(axes, seeds, _line_style(run, name), metric.scale)
    caption = (
        f"{metric.name.capitalize()} of each group’s own models on its own test data. {_ARRIVES} a "
        f"group arrives, {_LEAVES} it leaves, {_DRIFTS} its images begin to rotate. The thin "
        f"dotted line is the {metric.name} that clients that left would have if they came back. "
        f"{_over_seeds(run)}"
    )
    key = legend((line_sample(_line_style(run, name)), name) for name in histories)
    title = f"{escape(record.name)}: {metric.name} by group"
    return Drawing(figure, title, caption, key)


def _over_seeds(run: RunData) -> str:
    seeds = run.settings.plan.seeds
    return (
        f"A line is the mean over {seeds} seeds; the table has the standard deviation."
        if seeds > 1
        else "One seed was run."
    )


def _marks(name: str, group: GroupSettings) -> Iterable[Mark]:
    if group.join_round:
        yield Mark(group.join_round, f"{_ARRIVES} {name}")
    if group.leave_round is not None:
        yield Mark(group.leave_round, f"{_LEAVES} {name}")
    if group.drift:
        yield Mark(drift_start(group), f"{_DRIFTS} {name}")


def _mark(axes: Axes, marks: Sequence[Mark], last: int) -> None:
    """A vertical line for each mark, its words above, on as many lines as they need."""
    ends: list[float] = []
    for mark in sorted(mark for mark in marks if mark.round_index < last):
        start = mark.round_index / last
        flipped = start > 0.7  # words that would run out of the panel go to the left of their line
        width = _LETTER * (len(mark.words) + 1)
        left, right = (start - width, start) if flipped else (start, start + width)
        level = next((level for level, end in enumerate(ends) if end <= left), len(ends))
        ends[level:] = [right, *ends[level + 1 :]]
        axes.axvline(mark.round_index, color=FOREGROUND, alpha=0.45, linewidth=0.8, zorder=1)
        axes.annotate(
            mark.words,
            (mark.round_index, 1),
            (0, 2 + 11 * level),
            xycoords=axes.get_xaxis_transform(),
            textcoords="offset points",
            ha="right" if flipped else "left",
            fontsize=8.5,
        )


def _follow(
    axes: Axes, seeds: Sequence[MetricHistory], line_style: LineStyle, scale: float
) -> None:
    """A group's mean over seeds: with markers while it is there, dotted once it has left."""
    shortest = min(
        len(each.rounds) for each in seeds
    )  # a run that goes on may have looked at some seeds only
    rounds, present = seeds[0].rounds[:shortest], seeds[0].present[:shortest]
    means = [
        scale * fmean(summaries)
        for summaries in zip(*(each.values[:shortest] for each in seeds), strict=True)
    ]
    marked: dict[str, Any] = {
        "marker": line_style.marker,
        "markevery": max(1, shortest // 8),
        "markersize": 5.5,
        "linewidth": 1.8,
    }
    for stretch in _stretches(present):
        drawn = marked if present[stretch[-1]] else {"linestyle": ":", "linewidth": 1.4}
        axes.plot(
            [rounds[place] for place in stretch],
            [means[place] for place in stretch],
            color=line_style.colour,
            **drawn,
        )


def _stretches(present: Sequence[int]) -> list[list[int]]:
    """Consecutive evaluations while a group is present, or after it left.

    Each stretch begins where the one before ended.
    """
    changes = [
        place
        for place, (before, after) in enumerate(pairwise(present), start=1)
        if bool(before) != bool(after)
    ]
    edges = [0, *changes, len(present)]
    return [[*range(max(0, start - 1), end)] for start, end in pairwise(edges)]
