"""Figures by round: one line per experiment, with a band over its seeds."""

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    Locator,
    LogLocator,
    MaxNLocator,
    NullLocator,
)

from glocal.core.files import Json
from glocal.report.drawing import Drawing, new_axes, plot_mean_and_range
from glocal.report.formatting import pluralize, size, unit_of
from glocal.report.run_data import ExperimentRecord, RunData
from glocal.report.styles import MARKERS, legend, line_sample
from glocal.studies.metric_format import MetricFormat


class Curve(NamedTuple):
    """What an experiment measured over the rounds: x positions, and their values, one per seed."""

    record: ExperimentRecord
    places: list[float]
    values: list[list[float]]


def draw_validation(run: RunData) -> Drawing | None:
    """The metric on validation data by round."""
    curves = _curves(run, "validation", _round_up)
    if not curves:
        return None
    metric = run.criterion
    figure, axes = _panel_by_round(f"validation {metric.label}")
    for curve in curves:
        _plot_curve(axes, curve, scale=metric.scale)
    caption = (
        f"The {metric.name} of the clients’ own models on their own validation data, as the mean "
        f"over clients, every {pluralize(run.settings.run.validate_every, 'round')}. "
        f"{_direction(metric)}{_over_seeds(run)}"
    )
    key = _legend(curve.record for curve in curves)
    return Drawing(figure, f"Validation {metric.name} by round", caption, key)


def draw_validation_by_bytes(run: RunData) -> Drawing | None:
    """The metric on validation data by bytes sent; what sends nothing is a level line."""
    curves = _curves(run, "validation", _bytes_so_far)
    sending = [curve for curve in curves if any(curve.places)]
    silent = [curve for curve in curves if not any(curve.places)]
    if not sending:
        return None
    metric, (figure, axes) = run.criterion, new_axes()
    for curve in sending:
        _plot_curve(axes, curve, scale=metric.scale)
    ends = _scale_bytes(axes, [place for curve in sending for place in curve.places if place])
    for curve in silent:
        _plot_curve(
            axes,
            curve._replace(places=list(np.linspace(*ends, 9)), values=[curve.values[-1]] * 9),
            scale=metric.scale,
        )
    axes.set(xlabel="sent so far", ylabel=f"validation {metric.label}", xlim=ends)
    caption = "The same values against all bytes sent until then, evaluation included."
    if any(curve.record.experiment.start_from for curve in sending):
        caption += " An experiment that starts from another begins with the bytes of that one."
    if silent:
        caption += (
            " An experiment that sends nothing during training is a horizontal line at its last "
            "value."
        )
    key = _legend(curve.record for curve in curves)
    title = f"Validation {metric.name} by bytes sent"
    return Drawing(figure, title, f"{caption} {_over_seeds(run)}", key)


def draw_loss(run: RunData) -> Drawing | None:
    """Training loss by round."""
    curves = _curves(run, "loss", _round_up)
    if not curves:
        return None
    step = 1 + max(len(curve.places) for curve in curves) // 200
    figure, axes = _panel_by_round("training loss")
    for curve in curves:
        _plot_curve(axes, _thinned(curve, step))
    losses = [value for curve in curves for values in curve.values for value in values]
    if min(losses) > 0 and max(losses) > 20 * min(losses):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda loss, _: f"{loss:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    smooth = f" Each point is the mean of {step} rounds." if step > 1 else ""
    caption = (
        f"The mean training loss of the clients that took part in a round.{smooth} "
        f"{_over_seeds(run)}"
    )
    return Drawing(
        figure, "Training loss by round", caption, _legend(curve.record for curve in curves)
    )


def _curves(run: RunData, field: str, place: Callable[[Sequence[Json]], float]) -> list[Curve]:
    """Each experiment's rounds with a value of this field; experiments without any are left out."""
    curves = (_curve(record, field, place) for record in run.records)
    return [curve for curve in curves if curve.places]


def _curve(record: ExperimentRecord, field: str, place: Callable[[Sequence[Json]], float]) -> Curve:
    rounds: dict[int, list[Json]] = {}
    for row in record.rows:
        if row[field] is not None:
            rounds.setdefault(row["round"], []).append(row)
    rows = [rounds[number] for number in sorted(rounds)]
    return Curve(
        record, [place(seeds) for seeds in rows], [[row[field] for row in seeds] for seeds in rows]
    )


def _round_up(rows: Sequence[Json]) -> float:
    return float(rows[0]["round"] + 1)


def _bytes_so_far(rows: Sequence[Json]) -> float:
    return fmean(row["bytes"] for row in rows)


def _thinned(curve: Curve, step: int) -> Curve:
    """Means of several rounds each, seed by seed, without a last round that some seeds lack."""
    full = max(len(values) for values in curve.values)
    complete = [
        (place, values)
        for place, values in zip(curve.places, curve.values, strict=True)
        if len(values) == full
    ]
    groups = [complete[start : start + step] for start in range(0, len(complete), step)]
    places = [fmean(place for place, _ in group) for group in groups]
    values = [
        [fmean(seed) for seed in zip(*(values for _, values in group), strict=True)]
        for group in groups
    ]
    return Curve(curve.record, places, values)


def _panel_by_round(measured: str) -> tuple[Figure, Axes]:
    figure, axes = new_axes()
    axes.set(xlabel="round", ylabel=measured)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return figure, axes


def _plot_curve(axes: Axes, curve: Curve, *, scale: float = 1.0) -> None:
    """A curve with some of its markers."""
    length = len(curve.places)
    every = max(1, min(length // 2, 1 + length // 8))
    # lines that lie on each other show their markers in turn
    marked = (MARKERS.index(curve.record.line_style.marker) % every, every)
    values = [[scale * value for value in seeds] for seeds in curve.values]
    plot_mean_and_range(axes, curve.places, values, curve.record.line_style, markevery=marked)


def _scale_bytes(axes: Axes, places: Sequence[float]) -> tuple[float, float]:
    """An axis in bytes and its ends; logarithmic where the most is more than 20 times the least."""
    low, high = min(places), max(places)
    unit, _ = unit_of(high)
    ticks: Locator = FixedLocator(
        [unit * tick for tick in MaxNLocator(6).tick_values(0, high / unit)]
    )
    ends = 0.0, 1.05 * high
    if high > 20 * low:
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
        ticks = LogLocator(subs=(1, 3) if high < 1000 * low else (1,))
        ends = low / 1.15, high * 1.15
    axes.xaxis.set_major_locator(ticks)
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda amount, _: size(amount).replace(".0 ", " "))
    )
    return ends


def _legend(records: Iterable[ExperimentRecord]) -> str:
    return legend((line_sample(record.line_style), record.name) for record in records)


def _direction(metric: MetricFormat) -> str:
    return "" if metric.higher_is_better else "Lower is better. "


def _over_seeds(run: RunData) -> str:
    many = (
        f"A line is the mean over {run.settings.plan.seeds} seeds, its band reaches from the "
        "lowest seed to the highest."
    )
    return many if run.settings.plan.seeds > 1 else "One seed was run."
