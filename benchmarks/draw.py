"""Figures of the results: time per round, distance to the floor, and scaling.

python -m benchmarks.draw --benchmark docs/results/benchmark.json \\
    --scaling docs/results/scaling.json --into docs/images
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.job import Measurement
from benchmarks.workloads import WORKLOADS

OURS, OTHERS, REFERENCE, INK, FAINT = "#1f6feb", "#8b949e", "#444c56", "#24292f", "#d0d7de"
STYLE = {
    "font.size": 9,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.hashsalt": "glocal",
    "xtick.color": INK,
    "ytick.color": INK,
}
AXES = {
    "clients_per_round": "clients per round",
    "clients": "clients that share 60,000 examples",
    "width": "parameters",
    "seeds": "seeds side by side",
}


def main() -> None:
    """Draw the measurements."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.draw", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--benchmark", type=Path)
    parser.add_argument("--scaling", type=Path)
    parser.add_argument("--into", type=Path, default=Path("."))
    parser.add_argument("--prefix", default="", help="prefix of the file names")
    options = parser.parse_args()
    for path in draw_figures(
        options.benchmark, options.scaling, options.into, prefix=options.prefix
    ):
        print(path)


def draw_figures(
    benchmark: Path | None, scaling: Path | None, into: Path, *, prefix: str = ""
) -> list[Path]:
    """All figures of the given files, as PNG and as SVG."""
    into.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Figure] = {}
    with pyplot.rc_context(STYLE):
        if benchmark:
            report = json.loads(benchmark.read_text())
            figures |= {"time-per-round": times(report), "roofline": distances(report)}
        if scaling:
            figures["scaling"] = growth(json.loads(scaling.read_text()))
        paths = [into / f"{prefix}{name}.{kind}" for name in figures for kind in ("png", "svg")]
        for path in paths:
            chosen = figures[path.stem.removeprefix(prefix)]
            chosen.savefig(
                path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None
            )
    for figure in figures.values():
        pyplot.close(figure)
    return paths


def training_rows(report: Measurement, name: str) -> list[Measurement]:
    """One workload's training rows with a time, fastest first."""
    rows = [
        row
        for row in report["rows"]
        if row["workload"] == name and row["measure"] == "training" and "median" in row
    ]
    return sorted(rows, key=lambda row: row["median"])


def times(report: Measurement) -> Figure:
    """Bars of time per round, fastest on top, labelled with the ratio to the plain loop."""
    return _bars(
        report,
        value=lambda row: 1e3 * row["median"],
        text=lambda row: f"{_short(1e3 * row['median'])} ms, {row['speed_up']:.2g} x",
        heading="milliseconds per round (log scale); x: times as fast as the plain loop, 1 thread",
    )


def distances(report: Measurement) -> Figure:
    """Bars of time per round as multiples of the floor."""
    return _bars(
        report,
        value=lambda row: row["times_floor"],
        text=lambda row: f"{_short(row['times_floor'])} x",
        heading="time per round as a multiple of the machine's floor (log scale; 1 is the floor)",
        mark=1.0,
    )


def _bars(
    report: Measurement,
    *,
    value: Callable[[Measurement], float],
    text: Callable[[Measurement], str],
    heading: str,
    mark: float | None = None,
) -> Figure:
    """A panel for each workload, all on one scale, with a line at `mark`."""
    names = [name for name in WORKLOADS if training_rows(report, name)]
    heights = [len(training_rows(report, name)) for name in names]
    figure, places = pyplot.subplots(
        len(names),
        1,
        figsize=(8, 0.21 * sum(heights) + 0.42 * len(names) + 0.5),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
        sharex=True,
    )
    for axes, name in zip(places[:, 0], names, strict=True):
        rows = training_rows(report, name)
        axes.set_title(f"{name}: {WORKLOADS[name].summary}")
        _horizontal(axes, rows, [value(row) for row in rows], [text(row) for row in rows])
        if mark:
            axes.axvline(mark, color=INK, lw=0.8)
    every = [value(row) for name in names for row in training_rows(report, name)]
    left = min(every) / 2 if mark is None else 0.8 * min(mark, *every)
    places[-1, 0].set(xlabel=heading, xlim=(left, max(every) * 5))
    places[-1, 0].xaxis.set_major_formatter(lambda number, _: f"{number:,g}")
    return figure


def _horizontal(axes: Axes, rows: list[Measurement], values: list[float], texts: list[str]) -> None:
    axes.barh(range(len(rows)), values, color=[_colour(row) for row in rows], height=0.72, log=True)
    axes.set_yticks(range(len(rows)), [f"{row['tool']}, {row['setting']}" for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    for place, (width, text) in enumerate(zip(values, texts, strict=True)):
        axes.annotate(
            text,
            (width, place),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=INK,
        )


def _colour(row: Measurement) -> str:
    if row["tool"].startswith("glocal"):
        return OURS
    return REFERENCE if row["tool"] == "plain loop" else OTHERS


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def growth(report: Measurement) -> Figure:
    """Curves of time and memory for every axis; the dashed line is proportional to the axis."""
    axes_of = [
        axis
        for axis in AXES
        if any(row["axis"] == axis and "seconds" in row for row in report["rows"])
    ]
    figure, places = pyplot.subplots(
        2,
        len(axes_of),
        figsize=(2.6 * len(axes_of) + 0.6, 4.6),
        squeeze=False,
        layout="constrained",
    )
    for (above, below), axis in zip(places.T, axes_of, strict=True):
        rows = [row for row in report["rows"] if row["axis"] == axis and "seconds" in row]
        across = [row["parameters"] if axis == "width" else row["value"] for row in rows]
        times, memory = [1e3 * row["seconds"] for row in rows], [_memory(row) for row in rows]
        if axis != "clients":  # there a round is shorter, the more clients share the examples
            above.plot(
                *_in_proportion(across, times), "--", color=OTHERS, lw=1, label="in proportion"
            )
        above.set(yscale="log", ylim=(min(times) / 2.2, max(times) * 2.2))
        _curve(above, across, times)
        _curve(below, across, memory)
        below.set(xlabel=AXES[axis], ylim=(0, 1.25 * max(memory)))
    places[0, 0].legend(frameon=False, fontsize=8, loc="lower right")
    places[0, 0].set_ylabel("milliseconds per round")
    places[1, 0].set_ylabel("peak memory, MB")
    return figure


def _memory(row: Measurement) -> float:
    """Memory of the GPU if there is one, else of the process."""
    return row.get("peak_device_memory_mb", row["peak_memory_mb"])


def _curve(axes: Axes, across: list[float], up: list[float]) -> None:
    axes.plot(across, up, "o-", color=OURS, markersize=4, lw=1.5)
    axes.set(xscale="log", xlim=(across[0] / 1.35, across[-1] * 1.35))
    axes.set_xticks(across, [_thousands(each) for each in across])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda number, _: f"{number:,g}")
    axes.grid(axis="y", color=FAINT, lw=0.5)
    for place in {0, len(up) - 1}:
        offset = (0, -13) if place == 0 else (0, 7)
        axes.annotate(
            _short(up[place]),
            (across[place], up[place]),
            offset,
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )


def _in_proportion(across: list[float], up: list[float]) -> tuple[list[float], list[float]]:
    """A line through the first point, proportional to the axis."""
    return across, [up[0] * each / across[0] for each in across]


def _thousands(number: float) -> str:
    if number >= 1e6:
        return f"{number / 1e6:.2g}M"
    return f"{number / 1e3:.3g}k" if number >= 1e4 else f"{number:g}"


if __name__ == "__main__":
    main()
