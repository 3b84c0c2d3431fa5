"""Images moved and mirrored at random while training, the same alone or batched with other devices' images."""

import torch
from torch import Tensor

from glocal.core import random
from glocal.core.errors import InputError
from glocal.core.training import Augment


def crop_and_flip(padding: int = 4, fill: tuple[float, ...] | None = None) -> Augment:
    """Shift each image by up to `padding` pixels, `fill` (one value per channel, else 0) coming in, and mirror it or not.

    A crop of the padded image, its mirror image with probability 1/2 (He et al. 2016, section 4.2). Row r depends on the key
    and r only, not on how many rows follow.
    """
    if padding < 0:
        raise InputError(f"augment: the padding is {padding}; it must be 0 or more pixels")

    def augment(x: Tensor, key: Tensor) -> Tensor:
        rows, _, height, width = x.shape
        draws = random.uniform(key, (rows, 3))
        # from -padding to padding: a draw is at most 1 - 2**-24, and times an odd number that never rounds up
        shifts = (draws[:, :2] * (2 * padding + 1)).long() - padding
        down = (shifts[:, :1] + torch.arange(height, device=x.device))[:, :, None]
        along = torch.arange(width, device=x.device).expand(rows, width)
        along = (shifts[:, 1:] + torch.where(draws[:, 2:] < 0.5, along.flip(1), along))[:, None, :]
        inside = (down >= 0) & (down < height) & (along >= 0) & (along < width)
        places = down.clamp(0, height - 1) * width + along.clamp(0, width - 1)
        return torch.where(inside[:, None], _pixels(x, places), _border(fill, x))

    return augment


def _pixels(x: Tensor, places: Tensor) -> Tensor:
    """The pixels of each image, in all channels, at places (rows, height, width) in its flattened plane."""
    return (
        x.flatten(2)
        .gather(2, places.flatten(1)[:, None].expand(-1, x.shape[1], -1))
        .reshape(x.shape)
    )


def _border(fill: tuple[float, ...] | None, x: Tensor) -> Tensor:
    """The colour outside the image (channels, 1, 1)."""
    channels = x.shape[1]
    if fill is not None and len(fill) != channels:
        raise InputError(
            f"augment: fill has {len(fill)} values, but the images have {channels} channels; give one per channel"
        )
    # filled in place: torch.tensor would copy from the host, and make a GPU wait, at every step
    colours = [
        torch.full((1, 1), value, dtype=x.dtype, device=x.device)
        for value in fill or (0.0,) * channels
    ]
    return torch.stack(colours)
