"""The page of a new client: its figures by method and by number of labels."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from glocal.core.files import Json, atomic_write, read_json, require_format
from glocal.report.drawing import (
    BACKGROUND,
    FOREGROUND,
    Drawing,
    colour_theme,
    figure_html,
    new_axes,
)
from glocal.report.formatting import pluralize, size
from glocal.report.page import section, write_page
from glocal.report.styles import LineStyle, legend, line_sample, nth_line_style
from glocal.report.tables import boxed_table
from glocal.studies.metric_format import ACCURACY, MetricFormat

_DESCRIPTIONS = {
    "everyone": "no training: averaged outputs of every trained client’s model",
    "confident": "no training: the clients whose models have the lowest entropy on its inputs",
    "nearest": "no training: the clients whose models are closest to the ensemble on its inputs",
    "local part": "its local part trained on its labels, the shared part frozen",
    "alone": "the same network trained on its labels only, without the federation",
    "in the rounds": "its local part trained, then it takes part in rounds",
}


def read_join(path: Path) -> Json:
    """A trial of every method to join, from its file."""
    return require_format(read_json(path, dict), path)


def metric_of(trial: Json) -> MetricFormat:
    """The metric that a trial's figures are of; before there were others, accuracy."""
    return MetricFormat(**trial["metric"]) if "metric" in trial else ACCURACY


def write_join_report(folder: Path) -> Path:
    """Write folder/report.html from folder/join.json."""
    trial = read_join(folder / "join.json")
    metric, rows = metric_of(trial), [row for row in trial["rows"] if row["figure"] is not None]
    with colour_theme(FOREGROUND, BACKGROUND):
        drawn = "<p>There is no labelled test example, so nothing was measured.</p>"
        if rows:
            drawn = figure_html(draw_labels(rows, metric), "labels", kind="beside")
        sections = [
            section(f"{metric.name.capitalize()} by labelled examples", drawn),
            section("All methods", _table(trial["rows"], metric)),
        ]
    return write_page(folder, title=trial["name"], summary=_summary(trial), sections=sections)


def _summary(trial: Json) -> str:
    client = trial["new_client"]
    classes = ""
    if client["classes"] is not None:
        classes = f" of {pluralize(len(client['classes']), 'class')}"
    words = (
        f"A new client with {pluralize(client['examples'], 'labelled example')}{classes} joins "
        "the federation of "
        f"{pluralize(client['client'], 'client')} in {trial['run']} ({trial['experiment']}, seed "
        f"{trial['seed']}). "
        f"It is tested on {pluralize(client['test_examples'], 'example')} of its own. No file of "
        "that run was changed."
    )
    return f"<p>{escape(words)}</p>"


def draw_labels(rows: Sequence[Json], metric: MetricFormat) -> Drawing:
    """Figures against labelled examples; a method that needs no label is a horizontal line."""
    figure, axes = new_axes()
    ways = [way for way in _DESCRIPTIONS if any(row["method"] == way for row in rows)]
    most = max(row["labels"] for row in rows)
    for place, way in enumerate(ways):
        points = sorted(
            (row["labels"], metric.scale * row["figure"]) for row in rows if row["method"] == way
        )
        _plot_curve(axes, points, nth_line_style(place), most, label=way)
    _scale_labels(axes, sorted({row["labels"] for row in rows}))
    axes.set(
        xlabel="labelled examples of the new client", ylabel=f"on its test data: {metric.label}"
    )
    key = legend((line_sample(nth_line_style(place)), way) for place, way in enumerate(ways))
    caption = "Methods that need no labels are horizontal lines."
    return Drawing(figure, f"{metric.name.capitalize()} of the new client", caption, key)


def draw_join(path: Path, into: Path) -> Path:
    """The same from a join.json into a PNG file, with its legend."""
    trial = read_join(path)
    with colour_theme("#1c2126", "#ffffff"):
        rows = [row for row in trial["rows"] if row["figure"] is not None]
        drawing = draw_labels(rows, metric_of(trial))
        drawing.figure.legend(
            loc="outside lower center", ncols=3, frameon=False, columnspacing=1.2, handlelength=2.6
        )
        with atomic_write(into) as half:
            drawing.figure.savefig(
                half, format="png", facecolor="#ffffff", dpi=200, metadata={"Software": None}
            )
    return into


def _plot_curve(
    axes: Axes, points: Sequence[tuple[int, float]], line_style: LineStyle, most: int, *, label: str
) -> None:
    level = len(points) == 1 and points[0][0] == 0
    places, values = ([0, max(most, 1)], [points[0][1]] * 2) if level else zip(*points, strict=True)
    dashes = (0, line_style.dash) if line_style.dash else "solid"
    axes.plot(
        places,
        values,
        line_style.marker,
        color=line_style.colour,
        linestyle=dashes,
        linewidth=1.8,
        markersize=5.5,
        label=label,
    )


def _scale_labels(axes: Axes, numbers: Sequence[int]) -> None:
    """An axis on which 0, 1, 5, 50 and thousands all have room."""
    axes.set_xscale("symlog", linthresh=1, linscale=0.5)
    axes.xaxis.set_major_locator(FixedLocator(numbers))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:,.0f}"))


def _table(rows: Sequence[Json], metric: MetricFormat) -> str:
    heads = "".join(
        f'<th scope="col">{head}</th>' for head in ("labels", metric.name, "sent for it")
    )
    head = (
        '<tr><th class="name" scope="col">way</th><th class="name" scope="col">what it '
        f"is</th>{heads}</tr>"
    )
    return boxed_table(head, (_row(row, metric) for row in rows), "Every way")


def _row(row: Json, metric: MetricFormat) -> str:
    words = (
        f'<th class="name" scope="row">{escape(row["method"])}</th><td '
        f'class="name">{_DESCRIPTIONS[row["method"]]}</td>'
    )
    cells = (f"{row['labels']:,}", metric.text(row["figure"]), size(row["bytes"]))
    return f"<tr>{words}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
