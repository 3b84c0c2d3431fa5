"""Jigsaw: predict from the representation how an image's tiles were shuffled.

Liang et al. 2020, Figure 1(c); the pretext task is that of Noroozi and Favaro 2016.
"""

from dataclasses import dataclass
from math import factorial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from glocal.core import random, trees
from glocal.core.errors import InputError
from glocal.core.masked_mean import masked_mean
from glocal.core.modules import Forward, ForwardWithFeatures
from glocal.core.training import Batch
from glocal.core.trees import Params
from glocal.personalize.representations.auxiliary import Auxiliary

_SIDE = 2  # 3 x 3 tiles would have 362,880 permutations
_ADDRESS = -2  # of the shuffle, among the random numbers of a step


@dataclass(frozen=True)
class JigsawLoss:
    """Mean cross entropy of the permutation of an image's tiles, over the real rows."""

    prefix: str
    encode: ForwardWithFeatures
    solve: Forward
    side: int

    def __call__(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """The loss (); no buffers change."""
        tiles = self.side * self.side
        uniform = random.uniform(random.fold_in(batch.key, _ADDRESS), (len(batch.x),))
        which = (uniform * factorial(tiles)).long()
        shuffled = shuffle_tiles(batch.x, nth_permutation(which, tiles), self.side)
        _, h, _ = self.encode(params, shuffled, batch.mask, batch.key)
        logits, _ = self.solve(trees.under_prefix(self.prefix, params), h, batch.mask, batch.key)
        losses = functional.cross_entropy(logits, which, reduction="none")
        return masked_mean(losses, batch.mask), {}


@dataclass(frozen=True, eq=False)
class Jigsaw(Auxiliary):
    """Predicts the permutation of 2 x 2 tiles from the output of the module `layer`.

    There are 24 permutations.
    """

    name: ClassVar[str] = "jigsaw"

    def loss(self, model: nn.Module) -> JigsawLoss:
        """The cross entropy of the permutation."""
        return JigsawLoss(self.prefix, self.encoder(model), self.forward, _SIDE)


def nth_permutation(which: Tensor, tiles: int) -> Tensor:
    """Permutations of `tiles` numbers by their lexicographic index `which` (rows,): (rows, tiles).

    They are computed on the device of `which`. A table of all permutations would have to be copied
    to that device, and a CUDA graph does not allow the copy.

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
    """Images (rows, ..., height, width) with their tiles in the given orders (rows, tiles).

    >>> shuffle_tiles(torch.tensor([[[1, 2], [3, 4]]]), torch.tensor([[3, 2, 1, 0]]), 2)
    tensor([[[4, 3],
             [2, 1]]])
    """
    *_, height, width = images.shape
    if images.dim() < 3 or height % side or width % side:
        raise InputError(
            f"jigsaw: an example is {tuple(images.shape[1:])}; "
            f"images that {side} x {side} tiles fill were expected"
        )
    rows, between = images.shape[0], images.shape[1:-2]
    grid = images.reshape(rows, *between, side, height // side, side, width // side)
    tiles = grid.movedim((-4, -2), (1, 2)).flatten(1, 2)
    index = orders.reshape(rows, -1, *(1,) * (tiles.dim() - 2)).expand_as(tiles)
    shuffled = tiles.gather(1, index).reshape(rows, side, side, *tiles.shape[2:])
    return shuffled.movedim((1, 2), (-4, -2)).reshape(images.shape)
