"""Mood by the share of the model that stays local, after the paper's Figure 2(d)."""

from collections.abc import Mapping
from statistics import fmean, stdev
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from glocal.report.comparison import seeds_of
from glocal.report.drawing import Drawing, new_figure
from glocal.report.formatting import PERCENT
from glocal.report.styles import COLOURS, LineStyle, legend, line_sample
from glocal.studies.findings import Findings
from glocal.studies.study import Measurement
from liang2020.mood import BASELINES, FINE_TUNED, SHARES, SHARES_BY_DIRECTION

_LINES = dict(
    zip(
        SHARES_BY_DIRECTION,
        (LineStyle(COLOURS[0], (), "o"), LineStyle(COLOURS[1], (6, 2), "s")),
        strict=True,
    )
)
_POINTS = {FINE_TUNED: (SHARES["head local, all of it"], LineStyle(COLOURS[2], (2, 1.6), "D"))}
_LEVELS = {
    "Majority per person": LineStyle(COLOURS[7], (2, 1.6), "v"),
    "Bag of words, per person": LineStyle(COLOURS[4], (7, 2, 2, 2), "^"),
    BASELINES[-1]: LineStyle(COLOURS[3], (10, 3), "P"),
}
_SHORTER = {BASELINES[-1]: "Bag of words and person"}
_ENDS = {"FedAvg": 0.0, "Local only": 1.0}


class Panel(NamedTuple):
    """One of the four panels: what it shows, its title and its label."""

    measure: str
    title: str
    label: str


_PANELS = (
    Panel("accuracy", "everybody", "accuracy, %"),
    Panel("accuracy_rest", "without one-class people", ""),
    Panel("error", "", "mean absolute error, % of a class"),
    Panel("error_rest", "", ""),
)


def draw_14_people(findings: Findings) -> Drawing | None:
    """The figure of the people with most texts."""
    return draw_mood(findings, "14-people")


def draw_all_people(findings: Findings) -> Drawing | None:
    """The figure of everybody."""
    return draw_mood(findings, "all-people")


def draw_mood(findings: Findings, part: str) -> Drawing | None:
    """Accuracy above error, for everybody and without one-class people; None without splits."""
    if part not in findings.parts or not any(findings.experiment(part, name) for name in SHARES):
        return None
    figure = new_figure(6.2)
    panels = figure.subplots(2, 2, sharex=True, sharey="row")
    for axes, panel in zip(panels.flat, _PANELS, strict=True):
        _fill(axes, findings, part, panel.measure)
        axes.set_title(panel.title, fontsize=10, loc="left")
        axes.set(ylabel=panel.label)
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    for axes in panels[-1]:
        axes.set(xlabel="parameters that stay local, %")
    points = {name: line_style for name, (_, line_style) in _POINTS.items()}
    line_styles = {**_LINES, **points, **_LEVELS}
    key = legend(
        (line_sample(line_style), _SHORTER.get(words, words))
        for words, line_style in line_styles.items()
    )
    title = f"Mood by share that stays local, {findings.study.parts[part].title}"
    return Drawing(figure, title, _caption(findings, part), key)


def _fill(axes: Axes, findings: Findings, part: str, measure: str) -> None:
    for direction, line_style in _LINES.items():
        by_share = _by_share(findings, part, direction, measure)
        _line(axes, by_share, line_style, label=direction)
    for name, (share, line_style) in _POINTS.items():
        values = findings.values(Measurement(part, name, measure))
        _line(axes, {share: values}, line_style, label=name)
    for name, line_style in _LEVELS.items():
        values = findings.values(Measurement(part, name, measure))
        if values:
            axes.axhline(
                fmean(values),
                color=line_style.colour,
                linestyle=(0, line_style.dash),
                linewidth=1.4,
                label=_SHORTER.get(name, name),
            )


def _by_share(
    findings: Findings, part: str, direction: str, measure: str
) -> dict[float, list[float]]:
    """Values of every split of a direction by the local share, from FedAvg to local only."""
    shares = {**_ENDS, **SHARES_BY_DIRECTION[direction]}
    return {
        share: findings.values(Measurement(part, name, measure)) for name, share in shares.items()
    }


def _line(
    axes: Axes, by_share: Mapping[float, list[float]], line_style: LineStyle, *, label: str
) -> None:
    """Means with whiskers of one standard deviation over splits."""
    measured = {PERCENT * share: by_share[share] for share in sorted(by_share) if by_share[share]}
    if not measured:
        return
    means = [fmean(values) for values in measured.values()]
    spread = [stdev(values) if len(values) > 1 else 0.0 for values in measured.values()]
    dashes = (0, line_style.dash) if line_style.dash else "solid"
    axes.errorbar(
        [*measured],
        means,
        spread,
        fmt="none",
        ecolor=line_style.colour,
        elinewidth=1,
        alpha=0.45,
    )
    axes.plot(
        [*measured],
        means,
        line_style.marker,
        color=line_style.colour,
        linestyle=dashes,
        linewidth=1.8,
        markersize=5.5,
        label=label,
    )


def _caption(findings: Findings, part: str) -> str:
    seeds = seeds_of(findings, part)
    spread = (
        f"Means over {seeds} splits of the texts, whiskers of one standard deviation."
        if seeds > 1
        else "One split was run."
    )
    return (
        "How much of the network should stay local, from FedAvg (nothing) to local only "
        "(everything)? Either the layers nearest the input or those nearest the output are local. "
        "All models have the same number of parameters and of rounds. "
        f"{spread} Horizontal lines are baselines without a network. Higher accuracy is better, "
        "and so is a lower error."
    )
