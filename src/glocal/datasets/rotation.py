"""Images turned by an angle, and a store that holds turned copies beside the originals."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from glocal.core.data import Examples, Rows
from glocal.core.errors import InputError

_CHUNK = 4096  # images turned at once


class RotatedExamples(NamedTuple):
    """A store with turned copies, and for each angle where the copy of each original row lies (rows,); -1 where there is none."""

    examples: Examples
    copy_rows: Mapping[float, Rows]


def rotate_images(images: Tensor, degrees: float, fill: Tensor | float = 0.0) -> Tensor:
    """Images (rows, height, width) or (rows, channels, height, width) turned anticlockwise; `fill` comes in at the corners.

    Quarter turns of square images only move pixels; any other angle is interpolated between the four nearest ones.

    >>> rotate_images(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), 90)
    tensor([[[2., 4.],
             [1., 3.]]])
    """
    require_images(images)
    if degrees % 90 == 0 and (degrees % 180 == 0 or images.shape[-1] == images.shape[-2]):
        return images.rot90(int(degrees // 90) % 4, (-2, -1)).contiguous()
    planes = images if images.dim() == 4 else images[:, None]
    return torch.cat(
        [_interpolate_rotation(part, degrees, fill) for part in torch.split(planes, _CHUNK)]
    ).reshape(images.shape)


def channel_minimum(images: Tensor) -> Tensor:
    """What comes in at the corners: after normalisation black is each channel's smallest value."""
    return images.amin((0, -2, -1), keepdim=images.dim() == 4)


def require_images(inputs: Tensor) -> None:
    """Refuse what has no top and no left."""
    if inputs.dim() not in (3, 4) or not inputs.is_floating_point():
        shape = tuple(inputs.shape[1:])
        raise InputError(
            f"rotate: one example is {shape} {inputs.dtype}; an image (height, width) or (channels, height, width) of floats was "
            "expected; leave out rotate and drift"
        )


def _interpolate_rotation(planes: Tensor, degrees: float, fill: Tensor | float) -> Tensor:
    """Images (rows, channels, height, width) turned about their middle."""
    height, width = planes.shape[-2:]
    cosine, sine = float(np.cos(np.radians(degrees))), float(np.sin(np.radians(degrees)))
    # a grid runs from -1 to 1 along either side, so that an oblong one is stretched
    matrix = planes.new_tensor(
        [[cosine, -sine * height / width, 0.0], [sine * width / height, cosine, 0.0]]
    )
    grid = affine_grid(matrix.expand(len(planes), 2, 3), list(planes.shape), align_corners=False)
    return grid_sample(planes - fill, grid, align_corners=False) + fill


def add_rotated_copies(examples: Examples, rows_by_angle: Mapping[float, Rows]) -> RotatedExamples:
    """A store that also holds some rows turned by some angles; at 0 degrees a row is its own copy."""
    copy_rows, copies, rows = {0.0: np.arange(len(examples.y))}, [examples], len(examples.y)
    for degrees, turned in rows_by_angle.items():
        require_images(examples.x)
        taken = examples.take(turned)
        copies.append(
            taken._replace(x=rotate_images(taken.x, degrees, channel_minimum(examples.x)))
        )
        copy_rows[degrees] = np.full(len(examples.y), -1)
        copy_rows[degrees][turned] = np.arange(rows, rows + len(turned))
        rows += len(turned)
    return RotatedExamples(_concatenate(copies) if rows_by_angle else examples, copy_rows)


def _concatenate(stores: list[Examples]) -> Examples:
    x, y, groups = zip(*stores, strict=True)
    known = [group for group in groups if group is not None]
    return Examples(torch.cat(x), torch.cat(y), torch.cat(known) if known else None)
