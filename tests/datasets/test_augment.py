"""Augmentation: independent of batching and of later rows, always a crop or its mirror image."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import vmap
from torch.nn import functional

from glocal.core import random
from glocal.core.errors import InputError
from glocal.datasets import crop_and_flip


def images(
    rows: int, *, channels: int = 3, height: int = 6, width: int = 5, clients: int | None = None
) -> Tensor:
    """Images in which no two pixels are alike."""
    shape = (
        (rows, channels, height, width)
        if clients is None
        else (clients, rows, channels, height, width)
    )
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)


def looped(x: Tensor, key: Tensor, padding: int, fill: tuple[float, ...]) -> Tensor:
    """The same augmentation, one image at a time, by padding, slicing and flipping."""
    _, _, height, width = x.shape
    crops = []
    for image, (first, second, third) in zip(
        x, random.uniform(key, (len(x), 3)).tolist(), strict=True
    ):
        background = torch.tensor(fill).reshape(-1, 1, 1)
        padded = functional.pad(image - background, (padding,) * 4) + background
        top, left = int(first * (2 * padding + 1)), int(second * (2 * padding + 1))
        crop = padded[:, top : top + height, left : left + width]
        crops.append(crop.flip(-1) if third < 0.5 else crop)
    return torch.stack(crops)


@given(
    rows=st.integers(1, 9),
    padding=st.integers(0, 7),
    key=st.integers(0, 2**62),
    channels=st.integers(1, 3),
)
def test_batched_augmentation_is_padding_slicing_and_flipping(
    rows: int, padding: int, key: int, channels: int
) -> None:
    x, fill = images(rows, channels=channels), (-1.0, -2.0, -3.0)[:channels]
    augmented = crop_and_flip(padding, fill)(x, torch.tensor(key))
    torch.testing.assert_close(
        augmented, looped(x, torch.tensor(key), padding, fill), rtol=0, atol=0
    )


def test_a_batch_of_clients_gets_what_each_gets_alone() -> None:
    x, keys, augment = (
        images(7, clients=4),
        torch.tensor([3, 1, 4, 1]),
        crop_and_flip(2, (-1.0, -2.0, -3.0)),
    )
    alone = torch.stack([augment(own, key) for own, key in zip(x, keys, strict=True)])
    assert torch.equal(vmap(augment)(x, keys), alone)
    assert torch.equal(
        vmap(augment, in_dims=(0, None))(x, keys[0]),
        torch.stack([augment(own, keys[0]) for own in x]),
    )
    assert torch.equal(
        vmap(augment, in_dims=(None, 0))(x[0], keys),
        torch.stack([augment(x[0], key) for key in keys]),
    )


@given(rows=st.integers(1, 20), more=st.integers(1, 20), key=st.integers(0, 2**62))
def test_a_row_does_not_depend_on_how_many_follow(rows: int, more: int, key: int) -> None:
    x, augment = images(rows + more), crop_and_flip(3)
    assert torch.equal(augment(x[:rows], torch.tensor(key)), augment(x, torch.tensor(key))[:rows])


def test_without_padding_every_image_is_itself_or_its_mirror_image() -> None:
    x = images(400)
    augmented = crop_and_flip(0)(x, torch.tensor(5))
    unchanged, mirrored = ((augmented == other).flatten(1).all(1) for other in (x, x.flip(-1)))
    assert bool((unchanged ^ mirrored).all())
    # 400 fair coins: 200 with standard deviation 10
    assert 150 < int(mirrored.sum()) < 250


def test_every_shift_is_equally_likely() -> None:
    # a single bright pixel in the middle ends up in each of 3 x 3 places, 3600 / 9 = 400 times
    # with standard deviation 19
    x = torch.zeros(3600, 1, 3, 3)
    x[:, :, 1, 1] = 1
    landed = crop_and_flip(1)(x, torch.tensor(0)).sum((0, 1))
    assert landed.sum() == 3600
    assert bool(((landed > 300) & (landed < 500)).all())


def test_another_key_gives_another_augmentation() -> None:
    x, augment = images(16), crop_and_flip(4)
    assert not torch.equal(augment(x, torch.tensor(0)), augment(x, torch.tensor(1)))


def test_the_padding_is_zero_without_a_fill() -> None:
    x = torch.full((200, 2, 4, 4), 9.0)
    assert set(crop_and_flip(2)(x, torch.tensor(0)).flatten().tolist()) == {0.0, 9.0}
    filled = crop_and_flip(2, (1.0, 2.0))(x, torch.tensor(0))
    assert [set(channel.flatten().tolist()) for channel in filled.unbind(1)] == [
        {1.0, 9.0},
        {2.0, 9.0},
    ]


def test_a_padding_or_fill_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(InputError, match="the padding is -1; a whole number from 0 to"):
        crop_and_flip(-1)
    with pytest.raises(InputError, match="fill has 3 values, but the images have 1 channels"):
        crop_and_flip(2, (0.0, 0.0, 0.0))(images(2, channels=1), torch.tensor(0))
