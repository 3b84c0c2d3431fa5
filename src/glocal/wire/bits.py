"""Numbers in few bits, as operations on whole tensors: they run batched over clients too."""

import torch
from torch import Tensor

_WEIGHTS = (1, 2, 4, 8, 16, 32, 64, 128)


def pack_bits(bits: Tensor) -> Tensor:
    """Zeros and ones (n,) as bytes (n / 8,), the first bit lowest.

    >>> pack_bits(torch.tensor([1, 1, 0, 0, 0, 0, 0, 0, 1])).tolist()
    [3, 1]
    """
    missing = -bits.shape[0] % 8
    padded = torch.cat([bits, bits.new_zeros(missing)]).reshape(-1, 8)
    weights = torch.tensor(_WEIGHTS, device=bits.device)
    return (padded * weights).sum(1).to(torch.uint8)


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """The first zeros and ones (count,) of bytes."""
    places = torch.arange(8, device=packed.device)
    bits = (packed.to(torch.int64)[:, None] >> places) & 1
    return bits.flatten()[:count]


def pack_nibbles(numbers: Tensor) -> Tensor:
    """Numbers from 0 to 15 (n,) as bytes (n / 2,), the first one lowest.

    >>> pack_nibbles(torch.tensor([1, 2, 15])).tolist()
    [33, 15]
    """
    padded = torch.cat([numbers, numbers.new_zeros(numbers.shape[0] % 2)]).reshape(-1, 2)
    return (padded[:, 0] + 16 * padded[:, 1]).to(torch.uint8)


def unpack_nibbles(packed: Tensor, count: int) -> Tensor:
    """The first numbers (count,) of bytes."""
    both = packed.to(torch.int64)
    return torch.stack([both & 15, both >> 4], 1).flatten()[:count]


def low_bits(largest: int, count: int) -> int:
    """How many bits of an index Elias-Fano coding writes as they are."""
    return max(0, (max(largest, 1) // max(count, 1)).bit_length() - 1)


def pack_ascending(numbers: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Ascending numbers below `largest` (n,) as bytes: low parts, and high parts by their gaps.

    This is Elias-Fano coding (Elias 1974): the low bits are written as they are, the gaps between
    the high parts as runs of zeros. The length depends on n and `largest` alone, so that it can be
    declared beforehand, and is at most 2 + log2(largest / n) bits for each number.
    """
    count = numbers.shape[0]
    low = low_bits(largest, count)
    places = torch.arange(low, device=numbers.device)
    low_part = ((numbers[:, None] >> places) & 1).flatten()
    marks = (numbers >> low) + torch.arange(count, device=numbers.device)
    length = count + (largest >> low) + 1
    zeros = torch.zeros(length, dtype=torch.int64, device=numbers.device)
    high_part = zeros.scatter(0, marks, torch.ones_like(marks))
    return pack_bits(low_part), pack_bits(high_part)


def unpack_ascending(low_part: Tensor, high_part: Tensor, count: int, largest: int) -> Tensor:
    """The numbers (count,) of `pack_ascending`.

    >>> numbers = torch.tensor([0, 3, 4, 90])
    >>> unpack_ascending(*pack_ascending(numbers, 100), 4, 100).tolist()
    [0, 3, 4, 90]
    """
    low = low_bits(largest, count)
    bits = unpack_bits(high_part, count + (largest >> low) + 1)
    # the places of the ones, in order: a stable sort puts them first
    marks = torch.sort(bits, descending=True, stable=True).indices[:count]
    high = (marks - torch.arange(count, device=marks.device)) << low
    places = torch.arange(low, device=marks.device)
    parts = unpack_bits(low_part, count * low).reshape(count, low)
    return high + (parts << places).sum(1)
