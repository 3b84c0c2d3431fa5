"""Numbers in few bits: what is packed is unpacked, whatever it is."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from glocal.wire.bits import (
    pack_ascending,
    pack_bits,
    pack_nibbles,
    unpack_ascending,
    unpack_bits,
    unpack_nibbles,
)

pytestmark = pytest.mark.quick


@given(st.lists(st.integers(0, 1), max_size=70))
def test_bits_are_unpacked_as_they_were_packed(bits):
    given = torch.tensor(bits, dtype=torch.int64)
    packed = pack_bits(given)
    assert packed.dtype == torch.uint8
    assert len(packed) == math.ceil(len(bits) / 8)
    assert torch.equal(unpack_bits(packed, len(bits)), given)


@given(st.lists(st.integers(0, 15), max_size=70))
def test_nibbles_are_unpacked_as_they_were_packed(numbers):
    given = torch.tensor(numbers, dtype=torch.int64)
    packed = pack_nibbles(given)
    assert packed.dtype == torch.uint8
    assert len(packed) == math.ceil(len(numbers) / 2)
    assert torch.equal(unpack_nibbles(packed, len(numbers)), given)


@st.composite
def ascending(draw):
    """A size, and some of the numbers below it in ascending order."""
    size = draw(st.integers(1, 5_000) | st.sampled_from([2**20, 2**31 + 5, 2**40]))
    numbers = draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=min(60, size)))
    return size, sorted(numbers)


@given(ascending())
def test_ascending_numbers_are_unpacked_as_they_were_packed(case):
    size, numbers = case
    given = torch.tensor(numbers, dtype=torch.int64)
    low, high = pack_ascending(given, size)
    assert torch.equal(unpack_ascending(low, high, len(numbers), size), given)


@given(ascending(), st.randoms(use_true_random=False))
def test_their_length_depends_on_how_many_there_are_and_on_the_size_alone(case, random):
    size, numbers = case
    others = sorted(random.sample(range(size), len(numbers)))
    lengths = [
        [len(part) for part in pack_ascending(torch.tensor(each), size)]
        for each in (numbers, others)
    ]
    assert lengths[0] == lengths[1]


@given(ascending())
def test_an_ascending_number_takes_two_bits_more_than_the_logarithm_of_the_gap(case):
    """The bound of Elias-Fano coding; each of the two parts ends on a whole byte."""
    size, numbers = case
    low, high = pack_ascending(torch.tensor(numbers), size)
    count = len(numbers)
    bound = count * (2 + math.log2(size / count)) + 1
    assert 8 * (len(low) + len(high)) <= bound + 14


def test_all_numbers_below_a_size_take_two_bits_each():
    low, high = pack_ascending(torch.arange(1000), 1000)
    assert (len(low), len(high)) == (0, math.ceil(2001 / 8))


def test_packing_can_be_batched():
    numbers = torch.stack([torch.randperm(500)[:20].sort().values for _ in range(6)])
    low, high = torch.vmap(lambda row: pack_ascending(row, 500))(numbers)
    unpack = torch.vmap(lambda *parts: unpack_ascending(*parts, 20, 500))
    assert torch.equal(unpack(low, high), numbers)
    nibbles = torch.randint(16, (6, 7))
    together = torch.vmap(pack_nibbles)(nibbles)
    assert torch.equal(torch.vmap(lambda row: unpack_nibbles(row, 7))(together), nibbles)
