"""Rotated images, and stores that hold rotated copies beside the originals."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from glocal.core.data import Examples, Rows
from glocal.core.errors import InputError

_CHUNK = 4096  # images rotated at once


class RotatedExamples(NamedTuple):
    """A store with rotated copies.

    `copy_rows` maps an angle to the row of each original's copy (rows,), or -1 without one.
    """

    examples: Examples
    copy_rows: Mapping[float, Rows]


def rotate_images(images: Tensor, degrees: float, fill: Tensor | float = 0.0) -> Tensor:
    """Images (rows, height, width) or (rows, channels, height, width), rotated anticlockwise.

    `fill` is the colour of the corners. Quarter turns of square images only move pixels; any other
    angle interpolates between the four nearest ones.

    >>> rotate_images(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), 90)
    tensor([[[2., 4.],
             [1., 3.]]])
    """
    require_images(images)
    if _moves_pixels_only(images, degrees):
        return images.rot90(int(degrees // 90) % 4, (-2, -1)).contiguous()
    planes = images if images.dim() == 4 else images[:, None]
    return _rotate_in_chunks(planes, degrees, fill).reshape(images.shape)


def channel_minimum(images: Tensor) -> Tensor:
    """The fill for normalised images: black is each channel's smallest value."""
    return images.amin((0, -2, -1), keepdim=images.dim() == 4)


def require_images(inputs: Tensor) -> None:
    """Refuse inputs that are no images."""
    if inputs.dim() not in (3, 4) or not inputs.is_floating_point():
        raise InputError(
            f"rotate: one example is {tuple(inputs.shape[1:])} {inputs.dtype}; an image "
            "(height, width) or (channels, height, width) of floats was expected; "
            "leave out rotate and drift"
        )


def add_rotated_copies(examples: Examples, rows_by_angle: Mapping[float, Rows]) -> RotatedExamples:
    """A store that also holds rotated copies of some rows; at 0 degrees a row is its own copy."""
    rows = examples.num_rows
    copy_rows = {0.0: np.arange(rows)}
    if not rows_by_angle:
        return RotatedExamples(examples, copy_rows)
    require_images(examples.x)
    stores, end = [examples], rows
    for degrees, originals in rows_by_angle.items():
        stores.append(_rotated_copies(examples, originals, degrees))
        copy_rows[degrees] = np.full(rows, -1)
        copy_rows[degrees][originals] = np.arange(end, end + len(originals))
        end += len(originals)
    return RotatedExamples(_concatenate(stores), copy_rows)


def _moves_pixels_only(images: Tensor, degrees: float) -> bool:
    """Half turns do, and quarter turns of square images."""
    height, width = images.shape[-2:]
    return degrees % 180 == 0 or (degrees % 90 == 0 and height == width)


def _rotated_copies(examples: Examples, rows: Rows, degrees: float) -> Examples:
    copies = examples.take(rows)
    return copies._replace(x=rotate_images(copies.x, degrees, channel_minimum(examples.x)))


def _rotate_in_chunks(planes: Tensor, degrees: float, fill: Tensor | float) -> Tensor:
    chunks = torch.split(planes, _CHUNK)
    return torch.cat([_interpolate_rotation(chunk, degrees, fill) for chunk in chunks])


def _interpolate_rotation(planes: Tensor, degrees: float, fill: Tensor | float) -> Tensor:
    """Images (rows, channels, height, width) rotated about their middle."""
    matrix = planes.new_tensor(_rotation_matrix(degrees, *planes.shape[-2:]))
    grid = affine_grid(matrix.expand(len(planes), 2, 3), list(planes.shape), align_corners=False)
    return grid_sample(planes - fill, grid, align_corners=False) + fill


def _rotation_matrix(degrees: float, height: int, width: int) -> list[list[float]]:
    """The affine map of a rotation (2, 3).

    A grid runs from -1 to 1 along both sides, so an oblong image needs its sides' ratio.
    """
    angle = np.radians(degrees)
    cosine, sine = float(np.cos(angle)), float(np.sin(angle))
    return [[cosine, -sine * height / width, 0.0], [sine * width / height, cosine, 0.0]]


def _concatenate(stores: list[Examples]) -> Examples:
    x, y, groups = zip(*stores, strict=True)
    present = [group for group in groups if group is not None]
    return Examples(torch.cat(x), torch.cat(y), torch.cat(present) if present else None)
