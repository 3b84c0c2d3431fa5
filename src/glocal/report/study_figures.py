"""The figures of a study: its own, and that of a goal if it has one."""

from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.lines import Line2D

from glocal.core.files import atomic_write
from glocal.report.comparison import load_report_function
from glocal.report.drawing import Drawing, colour_theme
from glocal.report.goals import draw_goal
from glocal.report.styles import COLOURS, HOLLOW_MARKER
from glocal.studies.findings import Findings

_MAX_LABEL = 20  # letters; labels up to this length fit four to a row below a figure


def study_drawings(findings: Findings) -> dict[str, Drawing]:
    """Every figure that there are measurements for, by a short name."""
    drawings: dict[str, Drawing | None] = {}
    for name, function in findings.study.figures.items():
        drawings[name] = load_report_function(function, f"figures.{name}")(findings)
    drawings["goal"] = draw_goal(findings)
    return {name: drawing for name, drawing in drawings.items() if drawing is not None}


def draw_study(findings: Findings, folder: Path) -> list[Path]:
    """Write the figures as PNG files, each with its legend."""
    with colour_theme("#1c2126", "#ffffff"):
        return [
            _written(of, folder / f"{findings.study.name}-{name}.png")
            for name, of in study_drawings(findings).items()
        ]


def _written(drawing: Drawing, path: Path) -> Path:
    """A figure as a file, with a legend inside it; the page's legend is HTML."""
    entries: dict[str, Artist] = {}
    for axes in drawing.figure.axes:
        entries |= {
            str(handle.get_label()): handle for handle in axes.get_legend_handles_labels()[0]
        }
    if any(
        line.get_markerfacecolor() == "none" for axes in drawing.figure.axes for line in axes.lines
    ):
        entries["published"] = Line2D(
            [],
            [],
            linestyle="none",
            marker="o",
            markeredgecolor=COLOURS[0],
            **HOLLOW_MARKER,
        )
    spacing = {"columnspacing": 1.2, "handlelength": 1.8}
    columns = 4 if max(map(len, entries), default=0) <= _MAX_LABEL else 2
    drawing.figure.legend(
        [*entries.values()],
        [*entries],
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        **spacing,
    )
    with atomic_write(path) as half:
        drawing.figure.savefig(
            half, format="png", facecolor="#ffffff", dpi=200, metadata={"Software": None}
        )
    return path
