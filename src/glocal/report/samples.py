"""Sample images, as they are and as a new client has them."""

from pathlib import Path

from torch import Tensor

from glocal.core.files import atomic_write
from glocal.report.drawing import colour_theme, new_figure


def draw_samples(images: Tensor, turned: Tensor, path: Path) -> Path:
    """Images (columns, channels, height, width), and the same ones rotated below, as a PNG file."""
    columns = len(images)
    with colour_theme("#1c2126", "#ffffff"):
        figure = new_figure(5.0 * 2 / columns)
        panels = figure.subplots(2, columns)
        for row, pictures in enumerate((images, turned)):
            for axes, picture in zip(panels[row], pictures, strict=True):
                axes.imshow(picture.mean(0).numpy(), cmap="gray")
                axes.set_axis_off()
        with atomic_write(path) as half:
            figure.savefig(
                half, format="png", facecolor="#ffffff", dpi=200, metadata={"Software": None}
            )
    return path
