"""Figure 1(c): the representation has to tell how the tiles of an image were shuffled (Noroozi and Favaro 2016)."""

from dataclasses import dataclass
from math import factorial

import torch
from torch import Tensor, nn
from torch.nn import functional

from glocal.core import random
from glocal.core.errors import InputError
from glocal.core.modules import (
    Forward,
    ForwardWithFeatures,
    forward_with_features,
    training_forward,
)
from glocal.core.training import Batch, masked_mean
from glocal.core.trees import Params
from glocal.personalize.representations.auxiliary import Auxiliary, with_prefix, without_prefix

_ADDRESS = -2  # of the shuffle among what a step draws


@dataclass(frozen=True)
class JigsawLoss:
    """The mean over the real rows of the cross entropy of which permutation the tiles of an image were put into."""

    name: str
    encode: ForwardWithFeatures
    solve: Forward
    side: int

    def __call__(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """Its value (); no buffers move."""
        drawn = random.uniform(random.fold_in(batch.key, _ADDRESS), (len(batch.x),))
        tiles = self.side * self.side
        which = (drawn * factorial(tiles)).long()
        _, h, _ = self.encode(
            params,
            shuffle_tiles(batch.x, nth_permutation(which, tiles), self.side),
            batch.mask,
            batch.key,
        )
        guess, _ = self.solve(without_prefix(self.name, params), h, batch.mask, batch.key)
        return masked_mean(functional.cross_entropy(guess, which, reduction="none"), batch.mask), {}


def jigsaw(
    model: nn.Module, solver: nn.Module, *, layer: str, side: int = 2, name: str = "jigsaw"
) -> Auxiliary:
    """`solver` tells from what the module `layer` puts out which of all orders the side x side tiles are in; 2 x 2 have 24."""
    if side != 2:
        raise InputError(f"jigsaw: side is {side}; 2 was expected: 3 x 3 tiles have 362,880 orders")
    params, trainable = with_prefix(name, solver)
    return Auxiliary(
        name,
        params,
        trainable,
        JigsawLoss(name, forward_with_features(model, layer), training_forward(solver), side),
    )


def nth_permutation(which: Tensor, tiles: int) -> Tensor:
    """The permutations of so many tiles at these places (rows,) of a dictionary: (rows, tiles).

    Worked out where `which` lies: a table would have to be copied there, which a CUDA graph does not allow.

    >>> nth_permutation(torch.tensor([0, 1, 5]), 3)
    tensor([[0, 1, 2],
            [0, 2, 1],
            [2, 1, 0]])
    """
    order = torch.zeros_like(which)[:, None]
    for size in range(2, tiles + 1):
        first = (which // factorial(size - 1) % size)[:, None]
        order = torch.cat([first, order + (order >= first)], 1)
    return order


def shuffle_tiles(images: Tensor, orders: Tensor, side: int) -> Tensor:
    """Images (rows, ..., height, width) whose tiles are put into these orders (rows, tiles).

    >>> shuffle_tiles(torch.tensor([[[1, 2], [3, 4]]]), torch.tensor([[3, 2, 1, 0]]), 2)
    tensor([[[4, 3],
             [2, 1]]])
    """
    *_, height, width = images.shape
    if images.dim() < 3 or height % side or width % side:
        raise InputError(
            f"jigsaw: an example is {tuple(images.shape[1:])}; images that {side} x {side} tiles fill were expected"
        )
    rows, between = images.shape[0], images.shape[1:-2]
    cut = (
        images.reshape(rows, *between, side, height // side, side, width // side)
        .movedim((-4, -2), (1, 2))
        .flatten(1, 2)
    )
    mixed = cut.gather(1, orders.reshape(rows, -1, *(1,) * (cut.dim() - 2)).expand_as(cut))
    return (
        mixed.reshape(rows, side, side, *cut.shape[2:])
        .movedim((1, 2), (-4, -2))
        .reshape(images.shape)
    )
