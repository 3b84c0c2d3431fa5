"""Random crops and mirror images, the same for one client and for a batch of clients."""

from functools import partial

import torch
from torch import Tensor

from glocal.core import random
from glocal.core.bounds import MAX_WIDTH, require_count
from glocal.core.checks import require_items
from glocal.core.errors import InputError
from glocal.core.training import Augment


def crop_and_flip(padding: int = 4, fill: tuple[float, ...] | None = None) -> Augment:
    """Random crops of the padded images, half of them mirrored (He et al. 2016, section 4.2).

    `fill` is the colour of the padding, one value per channel; without it the padding is 0. Row r
    depends on the key and on r only, not on the number of rows.

    >>> augment = crop_and_flip(2)  # for Task(..., augment=augment)
    >>> augment(torch.zeros(5, 3, 8, 8), torch.tensor(0)).shape
    torch.Size([5, 3, 8, 8])
    """
    require_count("augment: the padding", padding, 0, MAX_WIDTH)
    if fill is not None:
        require_items("augment: fill", fill, float | int, "a tuple with a number per channel")
    return partial(_crop_and_flip, padding, fill)


def _crop_and_flip(padding: int, fill: tuple[float, ...] | None, x: Tensor, key: Tensor) -> Tensor:
    draws = random.uniform(key, (x.shape[0], 3))
    shifts = _shifts(draws[:, :2], padding)
    rows = _source_rows(x, shifts[:, :1])
    columns = _source_columns(x, shifts[:, 1:], draws[:, 2:] < 0.5)
    inside = _is_inside(x, rows, columns)[:, None]
    return torch.where(inside, _pixels(x, rows, columns), _border(fill, x))


def _shifts(draws: Tensor, padding: int) -> Tensor:
    """Whole numbers from -padding to padding.

    A draw is at most 1 - 2**-24, and its product with an odd number never rounds up.
    """
    return (draws * (2 * padding + 1)).long() - padding


def _source_rows(x: Tensor, shift: Tensor) -> Tensor:
    """The row of the image that each row of the crop comes from (images, height, 1)."""
    return (shift + torch.arange(x.shape[2], device=x.device))[:, :, None]


def _source_columns(x: Tensor, shift: Tensor, is_mirrored: Tensor) -> Tensor:
    """The column of the image that each column of the crop comes from (images, 1, width)."""
    images, width = x.shape[0], x.shape[3]
    columns = torch.arange(width, device=x.device).expand(images, width)
    columns = torch.where(is_mirrored, columns.flip(1), columns)
    return (shift + columns)[:, None, :]


def _is_inside(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Whether a pixel of the crop lies in the image (images, height, width)."""
    height, width = x.shape[2:]
    return (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)


def _pixels(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The pixels at these rows and columns in all channels; outside, those at the nearest edge."""
    channels, height, width = x.shape[1:]
    places = rows.clamp(0, height - 1) * width + columns.clamp(0, width - 1)
    index = places.flatten(1)[:, None].expand(-1, channels, -1)
    return x.flatten(2).gather(2, index).reshape(x.shape)


def _require_fill(values: int, channels: int) -> None:
    if values != channels:
        raise InputError(
            f"augment: fill has {values} values, but the images have {channels} channels; "
            "give one per channel"
        )


def _border(fill: tuple[float, ...] | None, x: Tensor) -> Tensor:
    """The colour of the padding (channels, 1, 1)."""
    channels = x.shape[1]
    values = (0.0,) * channels if fill is None else fill
    _require_fill(len(values), channels)
    # torch.full fills in place. torch.tensor would copy from the host, and make a GPU wait at
    # every step.
    colours = [torch.full((1, 1), value, dtype=x.dtype, device=x.device) for value in values]
    return torch.stack(colours)
