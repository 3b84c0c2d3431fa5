"""Mood by share of the model that stays local, as the paper's Figure 2(d): both directions, and what needs no network."""

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
from liang2020.mood import BASELINES, DIRECTIONS, FINE_TUNED, SHARES

_LINES = dict(
    zip(
        DIRECTIONS,
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
    """What one of the four panels shows, and its words."""

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
    """Accuracy above error, everybody beside all but one-class people; None where no split was measured."""
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
    looks = {**_LINES, **{name: line_style for name, (_, line_style) in _POINTS.items()}, **_LEVELS}
    key = legend(
        (line_sample(line_style), _SHORTER.get(words, words)) for words, line_style in looks.items()
    )
    title = f"Mood by share that stays local, {findings.study.parts[part].title}"
    return Drawing(figure, title, _caption(findings, part), key)


def _fill(axes: Axes, findings: Findings, part: str, measure: str) -> None:
    for direction, line_style in _LINES.items():
        _line(axes, _places(findings, part, direction, measure), line_style, label=direction)
    for name, (share, line_style) in _POINTS.items():
        _line(
            axes, {share: findings.values(Measurement(part, name, measure))}, line_style, label=name
        )
    for name, line_style in _LEVELS.items():
        if values := findings.values(Measurement(part, name, measure)):
            axes.axhline(
                fmean(values),
                color=line_style.colour,
                linestyle=(0, line_style.dash),
                linewidth=1.4,
                label=_SHORTER.get(name, name),
            )


def _places(
    findings: Findings, part: str, direction: str, measure: str
) -> dict[float, list[float]]:
    """Figures of every split of a direction by what is local, from FedAvg to local only."""
    shares = {
        **_ENDS,
        **{name: share for name, share in SHARES.items() if name.startswith(direction)},
    }
    return {
        share: findings.values(Measurement(part, name, measure)) for name, share in shares.items()
    }


def _line(
    axes: Axes, places: Mapping[float, list[float]], line_style: LineStyle, *, label: str
) -> None:
    """Means with whiskers of one standard deviation over splits."""
    measured = {PERCENT * place: places[place] for place in sorted(places) if places[place]}
    if not measured:
        return
    spread = [stdev(values) if len(values) > 1 else 0.0 for values in measured.values()]
    dashes = (0, line_style.dash) if line_style.dash else "solid"
    axes.errorbar(
        [*measured],
        [*map(fmean, measured.values())],
        spread,
        fmt="none",
        ecolor=line_style.colour,
        elinewidth=1,
        alpha=0.45,
    )
    axes.plot(
        [*measured],
        [*map(fmean, measured.values())],
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
        "How much of the network should stay with a person? From FedAvg (nothing) to local only (everything), with the layers "
        "nearest the text local, or those nearest the answer; all with the same number of parameters and of rounds. "
        f"{spread} Level lines are what needs no network. Up is better above, down is better below."
    )
