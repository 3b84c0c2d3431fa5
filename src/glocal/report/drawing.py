"""What figures share: matplotlib's settings, empty axes, and inline SVG in the page's colours."""

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from glocal.core.errors import InputError
from glocal.core.files import atomic_write
from glocal.report.styles import LineStyle

# stand-ins that the page's own colours take the place of, so that a figure follows its theme
FOREGROUND, BACKGROUND = "#0a0b0c", "#fafbfc"
_WIDTH = 5.0  # inches; small enough for 10 pt to stay readable on a phone
_STYLE: dict[str, Any] = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.15,
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.8,
    "lines.scale_dashes": False,
    "font.sans-serif": ["DejaVu Sans", "sans-serif"],
    "text.parse_math": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "glocal",
}


class Drawing(NamedTuple):
    """A figure with its words; `legend` is HTML."""

    figure: Figure
    title: str
    caption: str
    legend: str = ""


@contextmanager
def colour_theme(foreground: str, background: str) -> Iterator[None]:
    """Draw in these colours, whatever the user's own matplotlib settings say."""
    inked = (
        "text.color",
        "axes.labelcolor",
        "axes.edgecolor",
        "xtick.color",
        "ytick.color",
        "grid.color",
    )
    coloured = {
        **dict.fromkeys(inked, foreground),
        "hatch.color": background,
        "lines.markeredgecolor": background,
    }
    with style.context(["default", _STYLE | coloured]), warnings.catch_warnings():
        # the page's fonts draw a name that matplotlib's own cannot
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def new_figure(height: float) -> Figure:
    """An empty figure, so many inches high."""
    return Figure(figsize=(_WIDTH, height), layout="constrained")


def new_axes(height: float = 3.4) -> tuple[Figure, Axes]:
    """A figure with one pair of axes."""
    figure = new_figure(height)
    return figure, figure.add_subplot()


def plot_mean_and_range(
    axes: Axes,
    places: Sequence[float],
    values: Sequence[Sequence[float]],
    line_style: LineStyle,
    **line: Any,
) -> None:
    """The mean as a line with markers, the range as a band; `line` is for matplotlib."""
    low, mean, high = ([of(several) for several in values] for of in (min, fmean, max))
    axes.fill_between(places, low, high, color=line_style.colour, alpha=0.16, linewidth=0)
    dashes = (0, line_style.dash) if line_style.dash else "solid"
    axes.plot(
        places,
        mean,
        line_style.marker,
        color=line_style.colour,
        linestyle=dashes,
        linewidth=1.8,
        markersize=5.5,
        **line,
    )


def figure_html(drawing: Drawing, name: str, *, kind: str = "plain") -> str:
    """A drawing as HTML; `name` sets its ids apart from those of the page's other drawings."""
    caption = f"<figcaption><b>{drawing.title}</b> {drawing.caption}</figcaption>"
    plot = f"<div>{_svg(drawing.figure, name, drawing.title)}{drawing.legend}</div>"
    return f'<figure class="{kind}">{plot}{caption}</figure>'


def _svg(figure: Figure, name: str, label: str) -> str:
    """A figure as inline SVG, with ids of its own, no metadata, and the page's colours."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    _, _, drawn = buffer.getvalue().partition("<svg")
    _, _, inner = drawn.partition(">")
    inner = re.sub(r"\s*<(metadata|style)\b.*?</\1>", "", inner, flags=re.DOTALL)
    width, height = (72 * inches for inches in figure.get_size_inches())
    head = (
        f'<svg class="plot" role="img" aria-label="{escape(label)}" viewBox="0 0 {width:g} '
        f'{height:g}">'
    )
    return head + re.sub(r"<[^>]*>", lambda tag: _themed(tag.group(), name), inner).strip()


def _themed(tag: str, name: str) -> str:
    """One SVG tag; what a user has named stands between tags and is left alone."""
    owned = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{name}-", tag)
    return owned.replace(FOREGROUND, "currentColor").replace(BACKGROUND, "var(--card)")


def picture_kind(path: Path) -> str:
    """The picture format from a file's ending, svg or png."""
    kind = path.suffix.lower().removeprefix(".")
    if kind not in ("svg", "png"):
        raise InputError(
            f"draw: {path} is neither .svg nor .png; give the file one of these endings"
        )
    return kind


def save_picture(figure: Figure, path: Path) -> Path:
    """A figure as a file, the same bytes for the same figure."""
    kind = picture_kind(path)
    about: dict[str, None] = {"Date": None} if kind == "svg" else {"Software": None}
    with atomic_write(path) as half:
        figure.savefig(half, format=kind, facecolor="#ffffff", dpi=200, metadata=about)
    return path
