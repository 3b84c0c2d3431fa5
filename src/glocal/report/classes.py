"""The figure of each client's classes, for the page or for a file."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from glocal.core.errors import InputError
from glocal.core.sampling import IntArray
from glocal.report.drawing import Drawing, colour_theme, new_figure, picture_kind, save_picture
from glocal.report.formatting import pluralize
from glocal.report.styles import COLOURS


def draw_classes(counts: npt.ArrayLike, path: Path) -> Path:
    """Draw who has which classes (clients, classes) into an .svg or .png file."""
    picture_kind(path)
    table = np.asarray(counts, dtype=np.int64)
    if table.ndim != 2 or not table.size:
        raise InputError(
            f"draw: the counts have shape {table.shape}; a table (clients, classes) was expected"
        )
    with colour_theme("#1c2126", "#ffffff"):
        return save_picture(_heat_map(table), path)


def draw_partition(counts: IntArray, seed: int) -> Drawing:
    """The training examples of a seed's partition (clients, classes), with a caption."""
    held = np.count_nonzero(counts, axis=1)
    caption = (
        "Training examples by client and class, in the partition of the "
        f"{pluralize(len(counts), 'client')} of seed {seed}; a stronger colour means more. "
        f"Classes per client: {_range(held)}; training examples per "
        f"client: {_range(counts.sum(axis=1))}."
    )
    return Drawing(_heat_map(counts), "Who has which classes", caption)


def _range(values: IntArray) -> str:
    low, high = int(values.min()), int(values.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _heat_map(counts: IntArray) -> Figure:
    """Clients across, classes up; the more examples, the stronger the colour."""
    highest = max(1, int(counts.max()))
    figure = new_figure(3.0)
    axes, scale = figure.subplots(1, 2, width_ratios=(30, 1))
    axes.imshow(_tinted(counts.T / highest), aspect="auto", origin="lower", interpolation="none")
    axes.set(xlabel="client", ylabel="class")
    for axis, length in ((axes.xaxis, len(counts)), (axes.yaxis, counts.shape[1])):
        axis.set_major_locator(MaxNLocator(min(10, length), integer=True, steps=[1, 2, 5, 10]))
    scale.imshow(
        _tinted(np.linspace(0, 1, 64)[:, None]),
        aspect="auto",
        origin="lower",
        extent=(0, 1, 0, highest),
    )
    scale.set(xticks=[], ylabel="examples")
    scale.yaxis.tick_right()
    scale.yaxis.set_label_position("right")
    scale.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    scale.spines[:].set_visible(False)
    for part in (axes, scale):
        part.grid(visible=False)
    return figure


def _tinted(shares: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """One colour over the background (..., 4); 0 is transparent, and a few examples are visible."""
    strength = np.where(shares > 0, 0.12 + 0.88 * shares, 0.0)
    return np.concatenate(
        [np.broadcast_to(to_rgb(COLOURS[0]), (*shares.shape, 3)), strength[..., None]], axis=-1
    )
