"""Figures of final results: one row per experiment, the first on top."""

from collections.abc import Sequence
from statistics import fmean, stdev

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from glocal.report.drawing import BACKGROUND, Drawing, new_axes
from glocal.report.formatting import unit_of
from glocal.report.run_data import ExperimentRecord, RunData
from glocal.report.styles import COLOURS, BarStyle, LineStyle, bar_sample, legend, line_sample

_LOCAL, _NEW = LineStyle(COLOURS[0], (), "o"), LineStyle(COLOURS[1], (), "D")
_PURPOSES = {
    "download": BarStyle(COLOURS[0], "", ""),
    "upload": BarStyle(COLOURS[1], "///", "M2 12L14 0M10 12L22 0M18 12L30 0"),
    "evaluation": BarStyle(COLOURS[2], "|||", "M3 0v12M9 0v12M15 0v12M21 0v12M27 0v12"),
    "ensemble": BarStyle(
        COLOURS[3], "xxx", "M0 12L12 0M9 12L21 0M18 12L30 0M0 0L12 12M9 0L21 12M18 0L30 12"
    ),
}


def draw_tests(run: RunData) -> Drawing | None:
    """Local Test and New Test side by side."""
    metric, address = run.metric, ("metrics", run.metric.name, "new_test")
    records = [
        record
        for record in run.records
        if record.measured("local_test", "mean") or record.measured(*address)
    ]
    if not records:
        return None
    figure, axes = _new_dot_plot(records)
    for place, record in enumerate(records):
        local_tests, new_tests = record.measured("local_test", "mean"), record.measured(*address)
        _dot(axes, place - 0.12, [metric.scale * value for value in local_tests], _LOCAL)
        _dot(axes, place + 0.12, [metric.scale * value for value in new_tests], _NEW)
    axes.set(xlabel=metric.label)
    seeds = run.settings.plan.seeds
    bars = (
        f" Marks are means over {seeds} seeds, bars reach one standard deviation to either side."
        if seeds > 1
        else ""
    )
    caption = (
        f"{metric.name.capitalize()} for existing clients and for unseen ones. Local Test is each "
        "client’s own model on its own test data; New Test is the ensemble of all trained clients "
        f"on everyone’s test data.{bars}"
    )
    key = legend([(line_sample(_LOCAL), "Local Test"), (line_sample(_NEW), "New Test")])
    return Drawing(figure, "Local Test and New Test", caption, key)


def draw_clients(run: RunData) -> Drawing | None:
    """Every client of the first seed as a point, over a box of the middle half."""
    records = [record for record in run.records if record.results and _by_client(record)]
    if not records:
        return None
    metric, (figure, axes) = run.metric, _new_dot_plot(records)
    for place, record in enumerate(records):
        values = metric.scale * np.array(_by_client(record))
        _box(axes, place, values, record.line_style)
    axes.use_sticky_edges = False  # else points at 100 % are cut in half
    axes.set(xlabel=f"Local Test of one client: {metric.label}")
    caption = (
        f"One point for each client of seed {records[0].results[0]['seed']}: the {metric.name} of "
        "its own model on its own test data. The box holds the middle half of the clients; the "
        "line in it is the median."
    )
    return Drawing(figure, "Local Test over clients", caption)


def draw_bytes_by_purpose(run: RunData) -> Drawing | None:
    """Bytes by purpose, as parts of one bar."""
    records = [record for record in run.records if record.results]
    if not records:
        return None
    figure, axes = _new_dot_plot(records)
    unit, name = unit_of(
        max(fmean(record.measured("ledger", "total", "bytes")) for record in records)
    )
    left = np.zeros(len(records))
    for purpose, hatching in _PURPOSES.items():
        width = np.array(
            [fmean(record.measured("ledger", purpose, "bytes")) / unit for record in records]
        )
        axes.barh(
            range(len(records)),
            width,
            left=left,
            height=0.58,
            color=hatching.colour,
            hatch=hatching.pattern,
            linewidth=0,
        )
        left += width
    axes.set(xlabel=f"sent, {name}")
    caption = (
        "Bytes by purpose: the shared part sent to the clients of each round (download) and back "
        "(upload), to clients that validate and test it (evaluation), and local parts sent once "
        "for the New Test (ensemble). As counted on the wire; the mean over seeds."
    )
    key = legend((bar_sample(hatching), purpose) for purpose, hatching in _PURPOSES.items())
    return Drawing(figure, "Bytes by purpose", caption, key)


def _new_dot_plot(records: Sequence[ExperimentRecord]) -> tuple[Figure, Axes]:
    figure, axes = new_axes(max(2.4, 1.0 + 0.46 * len(records)))
    axes.set_yticks(range(len(records)), [_short(record.name) for record in records])
    axes.set_ylim(len(records) - 0.45, -0.55)
    axes.margins(x=0.04)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False, axis="y")
    return figure, axes


def _short(name: str) -> str:
    plain = " ".join(name.split())
    return plain if len(plain) <= 18 else plain[:17] + "…"


def _dot(axes: Axes, place: float, values: Sequence[float], line_style: LineStyle) -> None:
    """The mean over seeds, with its standard deviation."""
    if not values:
        return
    middle = fmean(values)
    error = stdev(values) if len(values) > 1 else 0.0
    axes.plot(
        [middle - error, middle + error], [place, place], color=line_style.colour, linewidth=1.6
    )
    axes.plot(middle, place, color=line_style.colour, marker=line_style.marker, markersize=7.5)


def _by_client(record: ExperimentRecord) -> list[float]:
    figures = [client["local_test"] for client in record.results[0]["clients"]]
    return [figure for figure in figures if figure is not None]


def _box(axes: Axes, place: int, values: npt.NDArray[np.float64], line_style: LineStyle) -> None:
    first, median, third = np.quantile(values, (0.25, 0.5, 0.75))
    axes.barh(place, third - first, left=first, height=0.62, color=line_style.colour, alpha=0.2)
    axes.plot([median, median], [place - 0.31, place + 0.31], color=line_style.colour, linewidth=2)
    # multiples of the golden ratio lie evenly apart, however many there are
    heights = place + 0.5 * (np.arange(len(values)) * 0.6180339887 % 1 - 0.5)
    axes.scatter(
        values,
        heights,
        s=20,
        color=line_style.colour,
        marker=line_style.marker,
        edgecolors=BACKGROUND,
        linewidths=0.5,
        alpha=0.85,
    )
