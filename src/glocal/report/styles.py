"""The styles of experiments and bars, the same in every figure, and their legends as HTML."""

from collections.abc import Iterable
from html import escape
from typing import Any, NamedTuple

# each colour has a contrast of at least 3:1 on the light and on the dark page;
# dashes and markers distinguish lines without colour
COLOURS = ("#2a7fc4", "#cf5b1f", "#12946c", "#b65fa0", "#9a7b12", "#6f6ad6", "#c2485f", "#6f7f8c")
_DASHES: tuple[tuple[float, ...], ...] = ((), (6, 2), (2, 1.6), (7, 2, 2, 2), (10, 3))
# matplotlib's markers, each with the same as a path for the legend
_MARKERS = {
    "o": "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "s": "M-3.5-3.5h7v7h-7z",
    "^": "M0-4.2L4 3.4H-4z",
    "D": "M0-4.6L4.6 0L0 4.6L-4.6 0z",
    "v": "M0 4.2L4-3.4H-4z",
    "P": "M-1.4-4.2h2.8v2.8h2.8v2.8h-2.8v2.8h-2.8v-2.8h-2.8v-2.8h2.8z",
    "X": "M-4-2L-2-4L0-2L2-4L4-2L2 0L4 2L2 4L0 2L-2 4L-4 2L-2 0z",
}
MARKERS = tuple(_MARKERS)
# of published numbers, for matplotlib
HOLLOW_MARKER: dict[str, Any] = {
    "markerfacecolor": "none",
    "markeredgewidth": 1.3,
    "markersize": 9.5,
}


class LineStyle(NamedTuple):
    """How one experiment is drawn."""

    colour: str
    dash: tuple[float, ...]
    marker: str


class BarStyle(NamedTuple):
    """How a part of a bar is drawn: matplotlib's pattern, and the same as a path for the legend."""

    colour: str
    pattern: str
    strokes: str


def nth_line_style(place: int) -> LineStyle:
    """No two alike among the first 280: the cycles' lengths have no common factor."""
    return LineStyle(
        COLOURS[place % len(COLOURS)], _DASHES[place % len(_DASHES)], MARKERS[place % len(MARKERS)]
    )


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """A list of samples, each with its words."""
    items = "".join(f"<li>{sample}{escape(words)}</li>" for sample, words in entries)
    return f'<ul class="key">{items}</ul>'


def line_sample(line_style: LineStyle) -> str:
    """A piece of an experiment's line, with its marker."""
    dash = (
        f' stroke-dasharray="{" ".join(f"{length:g}" for length in line_style.dash)}"'
        if line_style.dash
        else ""
    )
    line = f'<path d="M0 6H30" fill="none" stroke="{line_style.colour}" stroke-width="2"{dash}/>'
    return _sample(
        f'{line}<path transform="translate(15 6)" d="{_MARKERS[line_style.marker]}" '
        f'fill="{line_style.colour}"/>'
    )


def hollow_sample(line_style: LineStyle) -> str:
    """An experiment's marker, empty."""
    return _sample(
        f'<path transform="translate(15 6)" d="{_MARKERS[line_style.marker]}" fill="none" '
        f'stroke="{line_style.colour}" stroke-width="1.6"/>'
    )


def bar_sample(hatching: BarStyle) -> str:
    """A piece of a bar."""
    bar = f'<path d="M0 0h30v12H0z" fill="{hatching.colour}"/>'
    strokes = (
        f'<path d="{hatching.strokes}" stroke="var(--card)" stroke-width="1.2" fill="none"/>'
        if hatching.strokes
        else ""
    )
    return _sample(bar + strokes)


def _sample(paths: str) -> str:
    return f'<svg class="mark" viewBox="0 0 30 12" aria-hidden="true">{paths}</svg>'
