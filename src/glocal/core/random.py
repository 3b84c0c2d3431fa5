"""Random numbers computed from an address: no generator has a state.

A key is a whole number (). Folding a step, a layer or an element into it gives another key. The
numbers are the same on a CPU, on a GPU, for one client alone and for many in a batch: a generator
with a state cannot promise that under `vmap`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

# splitmix64 (Steele, Lea and Flood 2014), its constants as signed 64-bit numbers
_GOLDEN = -7046029254386353131
_FIRST = -4658895280553007687
_SECOND = -7723592293110705685
_ALL = 2**64 - 1


def fold_in(key: Tensor, address: Tensor | int) -> Tensor:
    """A new key (or many) from a key and an address; shapes broadcast."""
    if isinstance(address, int):
        # Python mixes a number itself: copying it to a GPU at every step would stall the GPU.
        return _mix((key ^ _mix_number(address * _GOLDEN)) + _GOLDEN)
    # torch.compile folds a product with `arange` into an index of 32 bits, which overflows.
    # `^ 0` changes no number, and the product stays one of 64 bits.
    return _mix((key ^ _mix((address ^ 0) * _GOLDEN)) + _GOLDEN)


def uniform(key: Tensor, shape: Sequence[int]) -> Tensor:
    """Numbers in [0, 1) of this shape, float32, 24 random bits each.

    >>> uniform(torch.tensor(7), (2,)).shape
    torch.Size([2])
    """
    size = int(torch.Size(shape).numel())
    bits = fold_in(key, torch.arange(size, device=key.device))
    return (_shift(bits, 40).to(torch.float32) / 2**24).reshape(tuple(shape))


def normal(key: Tensor, shape: Sequence[int]) -> Tensor:
    """Standard normal numbers of this shape, float32 (Box and Muller 1958)."""
    radius = uniform(fold_in(key, 0), shape)
    angle = uniform(fold_in(key, 1), shape)
    return (-2 * torch.log1p(-radius)).sqrt() * torch.cos(2 * torch.pi * angle)


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _shift(bits, 30)) * _FIRST
    bits = (bits ^ _shift(bits, 27)) * _SECOND
    return bits ^ _shift(bits, 31)


def _mix_number(number: int) -> int:
    """`_mix` of one whole number, in Python."""
    bits = number & _ALL
    bits = ((bits ^ (bits >> 30)) * _FIRST) & _ALL
    bits = ((bits ^ (bits >> 27)) * _SECOND) & _ALL
    bits ^= bits >> 31
    return bits - 2**64 if bits >> 63 else bits


def _shift(bits: Tensor, by: int) -> Tensor:
    """Logical shift to the right: torch's own shift keeps the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)
