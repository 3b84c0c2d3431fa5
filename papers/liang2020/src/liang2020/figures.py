"""The figures of the MNIST and CIFAR-10 studies: our results as lines, the paper's as markers."""

from collections.abc import Mapping, Sequence
from math import log
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Sheet
from matplotlib.ticker import MaxNLocator

from glocal.report.comparison import SweepPoint, published_score, seeds_of, sweep_points
from glocal.report.drawing import Drawing, new_axes, new_figure, plot_mean_and_range
from glocal.report.formatting import BILLION, PERCENT
from glocal.report.styles import (
    COLOURS,
    HOLLOW_MARKER,
    LineStyle,
    hollow_sample,
    legend,
    line_sample,
)
from glocal.studies.findings import Findings
from glocal.studies.study import MEASURES, Measurement, Score
from liang2020.images import ENDS, lg_rows, shares_of

_FEDAVG, _ALONE, _LG = (
    LineStyle(COLOURS[1], (6, 2), "s"),
    LineStyle(COLOURS[2], (2, 1.6), "^"),
    LineStyle(COLOURS[0], (), "o"),
)
_ENDS = dict(
    zip(
        ENDS,
        (LineStyle(COLOURS[0], (), "o"), LineStyle(COLOURS[3], (6, 2), "D")),
        strict=True,
    )
)
_SHARES = (0.002, 0.01, 0.05, 0.2, 0.5, 0.8, 0.95, 0.99, 0.998)
_BEYOND = 7.5  # position of "all" on the axis of shares, -7.5 of "none"; 0.2 % is at -6.2
_HOLLOW = "Hollow markers are the paper’s means, whiskers its standard deviations."


def draw_variance(findings: Findings) -> Drawing | None:
    """The paper's Figure 2(c): Local Test by classes per client."""
    protocol, parts = _protocol(findings)
    rows = {"Local only": _ALONE, "FedAvg": _FEDAVG, _starts(findings)[-1]: _LG}
    if not any(findings.experiment(part, row) for part in parts for row in rows):
        return None
    figure, axes = new_axes(3.6)
    for row, line_style in rows.items():
        values = [findings.values(Measurement(part, row, "local")) for part in parts]
        by_position = {float(position): of_part for position, of_part in enumerate(values)}
        _line(axes, by_position, line_style, label=row)
        for position, part in enumerate(parts):
            published = findings.study.parts[part].published.get(row)
            score = published_score(findings.study, published, "local")
            _hollow(axes, position, score, line_style)
    axes.set_xticks(range(len(parts)), [_classes(findings, part) for part in parts])
    axes.set(xlabel="classes per client", ylabel="Local Test, %")
    caption = (
        "As the paper’s Figure 2(c): the fewer classes a client has, the more clients differ. "
        f"Protocol `{protocol}`. {_over_seeds(findings)} {_HOLLOW}"
    )
    return Drawing(figure, "Local Test by classes per client", caption, _legend(rows))


def draw_traffic(findings: Findings) -> Drawing | None:
    """Accuracy of LG-FedAvg from every start by parameters sent (the paper's count), and FedAvg."""
    protocol, parts = _protocol(findings)
    rows = _starts(findings)
    measured = [part for part in parts if any(findings.experiment(part, row) for row in rows)]
    if not measured:
        return None
    part = measured[0]
    figure, panels = _two_panels()
    for axes, measure in zip(panels, MEASURES, strict=True):
        _costs(axes, findings, part, measure)
    panels[-1].set(xlabel="parameters sent, billions (the paper’s count)")
    first, last = rows[0], rows[-1]
    caption = (
        f"Accuracy by communication, {findings.study.parts[part].title}, protocol `{protocol}`: "
        f"LG-FedAvg from its earliest start ({first}) to its latest ({last}). The line across is "
        f"the FedAvg that it starts from. {_over_seeds(findings)} {_HOLLOW}"
    )
    return Drawing(
        figure,
        "Local and New Test by parameters sent",
        caption,
        _legend({"FedAvg": _FEDAVG, "LG-FedAvg": _LG}),
    )


def draw_splits(findings: Findings) -> Drawing | None:
    """Local and New Test by the share of the model that is sent, for lower and for upper layers."""
    part = next((name for name in findings.study.parts if sweep_points(findings, name)), None)
    if part is None:
        return None
    figure, panels = _two_panels()
    for axes, measure in zip(panels, MEASURES, strict=True):
        _sweep(axes, findings, part, measure)
    ticks = {_stretched(share): f"{PERCENT * share:g}" for share in _SHARES}
    panels[-1].set_xticks([-_BEYOND, *ticks, _BEYOND], ["none", *ticks.values(), "all"])
    panels[-1].set(xlabel="share of the model that is sent each round, %")
    about = findings.study.parts[part]
    caption = (
        f"How much to share, {about.title}, protocol `{about.protocol}`: every split of the layers "
        "into a shared and a local part, from none shared (fine-tuning) to all shared (FedAvg "
        "continues). All start from the same FedAvg model. The axis is stretched near both ends. "
        f"{_over_seeds(findings)} The hollow marker is the paper’s number for its own split."
    )
    key = _legend({_end_words(end): line_style for end, line_style in _ENDS.items()})
    return Drawing(figure, "Local and New Test by share of the model", caption, key)


def _costs(axes: Axes, findings: Findings, part: str, measure: str) -> None:
    """One panel of the figure of parameters sent."""
    _level(axes, findings, Measurement(part, "FedAvg", measure))
    starts = _starts(findings)
    counted = {
        _sent(findings, part, row): findings.values(Measurement(part, row, measure))
        for row in starts
    }
    _line(axes, counted, _LG, label="LG-FedAvg")
    published = findings.study.parts[part].published
    for row, line_style in {"FedAvg": _FEDAVG, **dict.fromkeys(starts, _LG)}.items():
        _hollow(
            axes,
            (published[row].parameters or 0) / BILLION,
            published_score(findings.study, published[row], measure),
            line_style,
        )


def _sweep(axes: Axes, findings: Findings, part: str, measure: str) -> None:
    """One panel of the figure of shares; the paper's own split is the row of its last start."""
    about, row = findings.study.parts[part], _starts(findings)[-1]
    score = published_score(findings.study, about.published[row], measure)
    points = sweep_points(findings, part)
    for end, line_style in _ENDS.items():
        on_line = {"none", *shares_of(about.settings.data.source, end), "all"}
        line = [split for split in points if split.shares in on_line]
        by_position = {_position(split): split.figures[measure] for split in line}
        _line(axes, by_position, line_style, label=_end_words(end))
        for split in line:
            if about.splits[split.shares] == row:
                _hollow(axes, _position(split), score, line_style)


def _end_words(end: str) -> str:
    return f"{end} layers shared"


def _protocol(findings: Findings) -> tuple[str, list[str]]:
    """The first protocol with measurements, and its parts in ascending order of classes."""
    parts: dict[str, list[str]] = {}
    for name, part in findings.study.parts.items():
        if "FedAvg" in part.published and not part.candidates:
            parts.setdefault(part.protocol, []).append(name)
    for protocol, names in parts.items():
        if findings.parts.keys() & set(names):
            return protocol, names
    return "", []


def _starts(findings: Findings) -> list[str]:
    """The rows of LG-FedAvg, the earliest start first."""
    first = next(iter(findings.study.parts.values()))
    return [row for row in lg_rows(first.settings.data.source) if row in first.published]


def _sent(findings: Findings, part: str, row: str) -> float:
    """Billions of parameters, as the paper counts."""
    experiment = findings.experiment(part, row)
    return experiment["paper_parameters"] / BILLION if experiment else 0.0


def _over_seeds(findings: Findings) -> str:
    many = any(seeds_of(findings, part) > 1 for part in findings.parts)
    return (
        "A line is our mean over seeds, its band reaches from the lowest to the highest."
        if many
        else "One seed was run."
    )


def _two_panels() -> tuple[Sheet, tuple[Axes, Axes]]:
    """Local Test above New Test."""
    figure = new_figure(5.2)
    upper, lower = figure.subplots(2, 1, sharex=True)
    for axes, words in ((upper, MEASURES["local"]), (lower, MEASURES["new"])):
        axes.set(ylabel=f"{words}, %")
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    return figure, (upper, lower)


def _line(
    axes: Axes, values: Mapping[float, Sequence[float]], line_style: LineStyle, *, label: str
) -> None:
    """Mean and range by position."""
    measured = {position: values[position] for position in sorted(values) if values[position]}
    if measured:
        plot_mean_and_range(axes, list(measured), list(measured.values()), line_style, label=label)


def _level(axes: Axes, findings: Findings, measurement: Measurement) -> None:
    """A row as a marker at what it sent, and as a line and a band through the whole panel."""
    values = findings.values(measurement)
    if not values:
        return
    sent = _sent(findings, measurement.part, measurement.experiment)
    _line(axes, {sent: values}, _FEDAVG, label=measurement.experiment)
    axes.axhspan(min(values), max(values), color=_FEDAVG.colour, alpha=0.16, linewidth=0)
    axes.axhline(fmean(values), color=_FEDAVG.colour, linestyle=(0, _FEDAVG.dash), linewidth=1.8)


def _hollow(axes: Axes, position: float, score: Score | None, line_style: LineStyle) -> None:
    """A published number, with its standard deviation."""
    if score is None:
        return
    spread = score.std or 0.0
    axes.plot(
        [position, position],
        [score.mean - spread, score.mean + spread],
        color=line_style.colour,
        linewidth=1.2,
    )
    axes.plot(
        position, score.mean, line_style.marker, **HOLLOW_MARKER, markeredgecolor=line_style.colour
    )


def _position(split: SweepPoint) -> float:
    """The position of a split on the axis of shares."""
    if split.parameters in (0, split.whole):
        return _BEYOND if split.parameters else -_BEYOND
    return _stretched(split.parameters / split.whole)


def _stretched(share: float) -> float:
    """The log odds, which spread out shares near none and near all."""
    return log(share / (1 - share))


def _classes(findings: Findings, part: str) -> str:
    return str(findings.study.parts[part].settings.data.classes_per_client)


def _legend(styles: Mapping[str, LineStyle]) -> str:
    ours = [(line_sample(line_style), words) for words, line_style in styles.items()]
    return legend([*ours, (hollow_sample(_LG), "published")])
