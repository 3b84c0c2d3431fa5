"""Random numbers computed from an address instead of drawn from a state.

A key is a whole number (); folding a step, a layer or an element into it gives another. The numbers are the same on a CPU, on a
GPU, alone or batched with other devices: a generator with a state cannot promise that under `vmap`.
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
    """A new key (or many) out of a key and an address; shapes broadcast."""
    if isinstance(
        address, int
    ):  # worked out here: a copy to the accelerator at every step would wait for it
        return _mix((key ^ _mixed_number(address * _GOLDEN)) + _GOLDEN)
    # torch's compiler folds a product with `arange` into an index of 32 bits; behind `^ 0` it is a number of 64 bits again
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
    """Normal numbers of mean 0 and deviation 1 of this shape, float32 (Box and Muller 1958)."""
    radius, angle = (uniform(fold_in(key, half), shape) for half in (0, 1))
    return (-2 * torch.log1p(-radius)).sqrt() * torch.cos(2 * torch.pi * angle)


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _shift(bits, 30)) * _FIRST
    bits = (bits ^ _shift(bits, 27)) * _SECOND
    return bits ^ _shift(bits, 31)


def _mixed_number(number: int) -> int:
    """What `_mix` does to one whole number, in Python."""
    bits = number & _ALL
    bits = ((bits ^ (bits >> 30)) * _FIRST) & _ALL
    bits = ((bits ^ (bits >> 27)) * _SECOND) & _ALL
    bits ^= bits >> 31
    return bits - 2**64 if bits >> 63 else bits


def _shift(bits: Tensor, by: int) -> Tensor:
    """Logical shift to the right: torch's own keeps the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)
