"""The cost of hiding protected attributes: a figure of accuracy by the AUC of fresh attackers."""

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from glocal.report.comparison import seeds_of
from glocal.report.drawing import Drawing, new_figure
from glocal.report.styles import LineStyle, legend, line_sample, nth_line_style
from glocal.studies.findings import Findings
from glocal.studies.study import MEASURES, Measurement
from liang2020.fair import BOTTLENECKS, Bottleneck

_CHANCE_AUC = 50.0
# Where the numbers of a line stand. Lines rise to the right, so the first two places are above and
# below such a line; the other two are beside a steep one.
_SIDES: tuple[dict[str, Any], ...] = (
    {"xytext": (-4, 3), "ha": "right", "va": "bottom"},
    {"xytext": (4, -3), "ha": "left", "va": "top"},
    {"xytext": (-7, 0), "ha": "right", "va": "center"},
    {"xytext": (7, 0), "ha": "left", "va": "center"},
)


class Point(NamedTuple):
    """An experiment: the AUC of the best fresh attacker, and the accuracy; percent, per seed."""

    attacker_auc: list[float]
    accuracy: list[float]

    def means(self) -> tuple[float, float]:
        """Its position in the figure."""
        return fmean(self.attacker_auc), fmean(self.accuracy)


TradeoffLines = dict[int, dict[float, Point]]  # by width of the bottleneck, then by strength


def draw_adult(findings: Findings) -> Drawing | None:
    """The trade-off of the Adult study."""
    return draw_tradeoff(findings, BOTTLENECKS)


def draw_tradeoff(findings: Findings, bottlenecks: Mapping[str, Bottleneck]) -> Drawing | None:
    """One line for each width of the bottleneck, through its strengths.

    There is one panel for each part, or one for all parts if no two of them share a width.
    """
    parts: dict[str, TradeoffLines] = {}
    by_width: TradeoffLines = {}
    for name in findings.parts:
        lines = _lines(findings, name, bottlenecks)
        if lines:
            parts[findings.study.parts[name].title] = lines
            by_width |= lines
    if not parts:
        return None
    if len(by_width) == sum(map(len, parts.values())):
        parts = {"": by_width}
    widths = sorted(by_width)
    line_styles = {width: nth_line_style(number) for number, width in enumerate(widths)}
    figure = new_figure(0.6 + 3.1 * len(parts))
    panels = figure.subplots(len(parts), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (title, lines) in zip(panels, parts.items(), strict=True):
        _panel(axes, lines, line_styles)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set(ylabel=f"{findings.study.measures.get('local', MEASURES['local'])}, %")
    panels[-1].set(xlabel="what the best fresh attacker reads, AUC in %")
    key = legend(
        (line_sample(line_style), _words(width)) for width, line_style in line_styles.items()
    )
    return Drawing(figure, "Accuracy by what attackers read", _caption(findings), key)


def _lines(findings: Findings, part: str, bottlenecks: Mapping[str, Bottleneck]) -> TradeoffLines:
    """The audited experiments of a part, widths and strengths in ascending order."""
    lines: TradeoffLines = {}
    for experiment in findings.parts[part]["experiments"]:
        bottleneck = bottlenecks.get(experiment)
        if bottleneck is None:
            continue
        attacker_auc = findings.values(Measurement(part, experiment, "fresh"))
        accuracy = findings.values(Measurement(part, experiment, "local"))
        if attacker_auc and accuracy:
            points = lines.setdefault(bottleneck.width, {})
            points[bottleneck.strength] = Point(attacker_auc, accuracy)
    return {width: dict(sorted(points.items())) for width, points in sorted(lines.items())}


def _panel(axes: Axes, lines: TradeoffLines, line_styles: Mapping[int, LineStyle]) -> None:
    widths = [*line_styles]
    for width, points in lines.items():
        _line(axes, points, line_styles[width], label=_words(width))
        side = _SIDES[widths.index(width) % len(_SIDES)]
        _numbers(axes, points, line_styles[width], side)
    axes.axvline(
        _CHANCE_AUC, color=axes.xaxis.label.get_color(), linestyle=(0, (2, 2)), linewidth=1
    )
    axes.annotate(
        "guessing",
        (_CHANCE_AUC, 0),
        (3, 3),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        fontsize=8,
    )
    axes.margins(0.08, 0.16)
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))


def _line(axes: Axes, points: Mapping[float, Point], line_style: LineStyle, *, label: str) -> None:
    """Means over seeds, with faint whiskers."""
    for point in points.values():
        across, up = map(_deviation, point)
        axes.errorbar(
            *point.means(),
            up,
            across,
            fmt="none",
            ecolor=line_style.colour,
            elinewidth=1,
            alpha=0.35,
        )
    means = [point.means() for point in points.values()]
    attacker_auc, accuracy = zip(*means, strict=True)
    dashes = (0, line_style.dash) if line_style.dash else "solid"
    axes.plot(
        attacker_auc,
        accuracy,
        line_style.marker,
        color=line_style.colour,
        linestyle=dashes,
        linewidth=1.8,
        markersize=5.5,
        label=label,
    )


def _numbers(
    axes: Axes, points: Mapping[float, Point], line_style: LineStyle, side: dict[str, Any]
) -> None:
    """Each strength beside its marker."""
    for strength, point in points.items():
        axes.annotate(
            f"{strength:g}",
            point.means(),
            **side,
            textcoords="offset points",
            fontsize=8.5,
            color=line_style.colour,
        )


def _deviation(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def _words(width: int) -> str:
    return f"width {width}"


def _caption(findings: Findings) -> str:
    many = any(seeds_of(findings, part) > 1 for part in findings.parts)
    spread = (
        "Markers are means over seeds, whiskers reach one standard deviation to either side."
        if many
        else "One seed was run."
    )
    return (
        "The cost of hiding protected attributes. Models further left leak less, models further "
        "up are more accurate. A line is one width of the bottleneck, its numbers are strengths of "
        "the adversary. The AUC is that of the best attacker trained afterwards, over all "
        f"attributes and all kinds of attack data. {spread}"
    )
