"""Hold out a share of every client's examples, for all clients at once.

A client's share does not depend on the other clients: a real client that holds out its own examples
by its number gets the same ones.
"""

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from glocal.core.errors import InputError

Rows = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # splitmix64 (Steele, Lea and Flood 2014)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_OFFSET = 2**63 - 1  # the address of a client's own number, beside those of its examples


def hold_out_share(
    rows: Sequence[Rows],
    share: float,
    *,
    seed: int,
    purpose: str,
    classes: Rows | None = None,
    first_client: int = 0,
) -> tuple[tuple[Rows, ...], tuple[Rows, ...]]:
    """Of every client, the remaining rows and those held out; at least one remains.

    With `classes`, the class of every row of the store, the share of each class is held out as
    nearly as whole numbers allow.

    >>> rest, held = hold_out_share([np.arange(5)], 0.4, seed=0, purpose="test")
    >>> len(rest[0]), len(held[0])
    (3, 2)
    """
    if not 0 <= share < 1:
        raise InputError(
            f"data: the fraction for {purpose} is {share}; it must be at least 0 and below 1"
        )
    sizes = np.array([len(own) for own in rows], dtype=np.int64)
    counts = np.minimum(np.rint(share * sizes).astype(np.int64), np.maximum(sizes - 1, 0))
    flat = np.concatenate(rows) if len(rows) else np.zeros(0, dtype=np.int64)
    chosen = _choose(sizes, counts, _order(sizes, flat, classes, (seed, purpose, first_client)))
    is_held = np.zeros(len(flat), dtype=np.bool_)
    is_held[chosen] = True
    return _split(flat[~is_held], sizes - counts), _split(flat[is_held], counts)


def _order(
    sizes: Rows, flat: Rows, classes: Rows | None, address: tuple[int, str, int]
) -> tuple[Rows, Floats]:
    """All places sorted by client, then class, then at random; and a random number per client."""
    seed, purpose, first_client = address
    key = np.uint64(zlib.crc32(purpose.encode())) ^ (np.uint64(seed) << np.uint64(32))
    clients = np.arange(len(sizes), dtype=np.int64)
    own = np.repeat(clients, sizes)
    index = np.arange(len(flat)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    numbers = _uniform(key, own + first_client, index)
    of_class = np.zeros(len(flat), dtype=np.int64) if classes is None else classes[flat]
    offsets = _uniform(key, clients + first_client, np.full(len(sizes), _OFFSET))
    return np.lexsort((numbers, of_class, own)), offsets


def _choose(sizes: Rows, counts: Rows, order: tuple[Rows, Floats]) -> Rows:
    """Evenly spaced places of every client's order, from a random start: systematic sampling."""
    places, offsets = order
    step = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    spacing = np.repeat(sizes / np.maximum(counts, 1), counts)
    within = np.floor((step + np.repeat(offsets, counts)) * spacing).astype(np.int64)
    within = np.minimum(within, np.repeat(sizes, counts) - 1)
    starts = np.repeat(np.cumsum(sizes) - sizes, counts)
    return np.asarray(places[starts + within])


def _split(flat: Rows, sizes: Rows) -> tuple[Rows, ...]:
    return tuple(np.split(flat, np.cumsum(sizes)[:-1])) if len(sizes) else ()


def _uniform(key: np.uint64, clients: Rows, index: Rows) -> Floats:
    """A number in [0, 1) for every (client, index): no generator has a state."""
    with np.errstate(over="ignore"):
        bits = _mix(clients.astype(np.uint64) * _GOLDEN ^ key)
        bits = _mix(bits ^ index.astype(np.uint64) * _GOLDEN)
    return np.asarray((bits >> np.uint64(11)) / 2**53)


def _mix(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    bits = bits + _GOLDEN
    bits = (bits ^ (bits >> np.uint64(30))) * _FIRST
    bits = (bits ^ (bits >> np.uint64(27))) * _SECOND
    return np.asarray(bits ^ (bits >> np.uint64(31)))
