"""Client sampling, and the order of each client's examples: randomness by address, not by state.

The strings in `make_rng(seed, "cohort", ...)` are part of the address. Another string gives other
random numbers, so the strings never change, even where functions were renamed.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from glocal.core.bounds import (
    MAX_CLIENTS,
    MAX_EPOCHS,
    MAX_EXAMPLES,
    MAX_ROUNDS,
    MAX_SEED,
    count_field,
    require_count,
    require_counts,
)
from glocal.core.checks import require_instance
from glocal.core.errors import InputError
from glocal.core.one_line import one_line

IntArray = npt.NDArray[np.int64]
_SEVERAL = (list, tuple, range, set, frozenset, np.ndarray)


@dataclass(frozen=True)
class Plan:
    """The number of rounds, the clients per round, and their local training.

    `first_round` > 0 continues the numbering of a warm start. With `max_tokens`, a batch of texts
    has at most `batch_size` rows, and rows times its longest text are at most `max_tokens`.

    >>> Plan(rounds=20, clients_per_round=5, first_round=10).total_rounds
    30
    """

    rounds: int = count_field(maximum=MAX_ROUNDS)
    clients_per_round: int = count_field(maximum=MAX_CLIENTS)
    local_epochs: int = count_field(1, maximum=MAX_EPOCHS)
    batch_size: int = count_field(10, maximum=MAX_EXAMPLES)
    seed: int = count_field(0, minimum=0, maximum=MAX_SEED)
    first_round: int = count_field(0, minimum=0, maximum=1_000 * MAX_ROUNDS)
    max_tokens: int | None = count_field(None, maximum=1_000 * MAX_EXAMPLES)

    @property
    def total_rounds(self) -> int:
        """The number of rounds at the end, those of a warm start included."""
        return self.first_round + self.rounds

    def __post_init__(self) -> None:
        require_counts("plan: ", self)


class Availability(NamedTuple):
    """The clients that can be sampled in a round.

    `available` clients are sampled from, `always` clients take part in addition, and `dropouts`
    may be sampled but leave before they answer.

    >>> Availability.of([0, 1, 2], dropouts=[1]).dropouts.tolist()
    [1]
    """

    available: IntArray
    always: IntArray
    dropouts: IntArray

    def __repr__(self) -> str:
        return one_line(self)

    @classmethod
    def of(
        cls, available: Sequence[int], *, always: Sequence[int] = (), dropouts: Sequence[int] = ()
    ) -> "Availability":
        """From plain numbers of clients; a client that always takes part is not sampled as well."""
        _require_client_numbers("available", available)
        _require_client_numbers("always", always)
        _require_client_numbers("dropouts", dropouts)
        absent = {*dropouts} - {*available, *always}
        if absent:
            raise InputError(
                f"availability: client {min(absent)} drops out, but is not available; "
                "let it be available too"
            )
        sampled = {*available} - {*always}
        return cls(_sorted_array(sampled), _sorted_array(always), _sorted_array(dropouts))


def _require_client_numbers(name: str, clients: Sequence[int]) -> None:
    require_instance(f"availability: {name}", clients, _SEVERAL, "a list of clients' numbers")
    for client in clients:
        require_count(f"availability: a client in {name}", client, 0, MAX_CLIENTS)
    if len({*clients}) != len(clients):
        raise InputError(f"availability: {name} names a client twice; name each once")


def _sorted_array(clients: set[int] | Sequence[int]) -> IntArray:
    return np.array(sorted(clients), dtype=np.int64)


def make_rng(seed: int, purpose: str, *address: int) -> np.random.Generator:
    """A NumPy generator for one purpose and address; a deployed client and the simulator agree.

    >>> bool(make_rng(0, "order", 3).integers(100) == make_rng(0, "order", 3).integers(100))
    True
    """
    require_instance("make_rng: purpose", purpose, str, "a text")
    for number in (seed, *address):
        require_count("make_rng: a number of the seed or address", number, 0, 2**64)
    entropy = np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), *address])
    return np.random.Generator(np.random.PCG64(entropy))


def sample_clients(plan: Plan, num_clients: int, round_index: int) -> IntArray:
    """The clients of one round, S_t in the paper, in ascending order."""
    if plan.clients_per_round > num_clients:
        raise InputError(
            f"plan: clients_per_round is {plan.clients_per_round}, but there are {num_clients} "
            f"clients; choose at most {num_clients}"
        )
    rng = make_rng(plan.seed, "cohort", round_index)
    return np.sort(rng.choice(num_clients, plan.clients_per_round, replace=False))


def sample_available(plan: Plan, availability: Availability, round_index: int) -> IntArray:
    """The clients of a round with some clients absent: those sampled, and those always there."""
    available = availability.available
    count = min(plan.clients_per_round, len(available))
    places = make_rng(plan.seed, "cohort", round_index).choice(len(available), count, replace=False)
    return np.sort(np.concatenate([available[places], availability.always]))


def batch_order(
    plan: Plan, size: int, round_index: int, client: int, *, lengths: IntArray | None = None
) -> IntArray:
    """The order of a client's examples in local training (epochs, steps, batch); -1 is padding.

    Only the end of an epoch has padding. Where the plan counts tokens, by the examples' `lengths`
    (size,), any batch may end in padding.
    """
    rng = make_rng(plan.seed, "order", round_index, client)
    epochs = []
    for _ in range(plan.local_epochs):
        if plan.max_tokens is None or lengths is None:
            epochs.append(to_batches(rng.permutation(size), plan.batch_size))
        else:
            epochs.append(
                to_token_batches(
                    lengths, rng, batch_size=plan.batch_size, max_tokens=plan.max_tokens
                )
            )
    return np.stack(epochs)


def client_batches(
    plan: Plan, rows: IntArray, round_index: int, client: int, *, lengths: IntArray | None = None
) -> IntArray:
    """The same order as rows of the store, for a client with these rows."""
    order = batch_order(plan, len(rows), round_index, client, lengths=lengths)
    return np.where(order >= 0, rows[order.clip(min=0)], -1)


def client_key(plan: Plan, round_index: int, client: int) -> int:
    """The key of a client's dropout and augmentation in one round."""
    return int(make_rng(plan.seed, "noise", round_index, client).integers(2**62))


def to_batches(rows: IntArray, batch_size: int) -> IntArray:
    """Rows in the given order (steps, batch), at most as wide as there are rows; -1 is padding."""
    batch_size = min(batch_size, max(len(rows), 1))
    steps = -(-len(rows) // batch_size)
    order = np.full(steps * batch_size, -1, dtype=np.int64)
    order[: len(rows)] = rows
    return order.reshape(steps, batch_size)


def to_token_batches(
    lengths: IntArray, generator: np.random.Generator, *, batch_size: int, max_tokens: int
) -> IntArray:
    """Rows sorted by length and cut into batches (steps, batch), in random order; -1 is padding.

    This is fairseq's way (Ott et al. 2019), where `--max-tokens` counts rows times the longest.
    Rows of one length are shuffled. Texts of similar length share a batch. The number of batches
    and their widths do not depend on the generator: shapes are the same in every round.

    >>> rng = make_rng(0, "order")
    >>> to_token_batches(np.array([2, 9, 2, 2]), rng, batch_size=4, max_tokens=6).shape
    (2, 3)
    """
    shuffled = generator.permutation(len(lengths))
    ordered = shuffled[np.argsort(lengths[shuffled], kind="stable")]
    starts = [0]
    for place, length in enumerate(lengths[ordered].tolist()):
        rows = place - starts[-1]
        if rows and (rows == batch_size or (rows + 1) * length > max_tokens):
            starts.append(place)
    cut = np.split(ordered, starts[1:])
    shuffled_batches = [cut[place][None] for place in generator.permutation(len(cut))]
    return pad_and_stack(shuffled_batches)[:, 0]


def pad_and_stack(orders: Sequence[IntArray]) -> IntArray:
    """Orders of many clients as one array (clients, ..., batch); short ones end in padding.

    Each axis is as long as the longest client's: every epoch is padded at its own end.

    >>> pad_and_stack([np.array([[3]]), np.array([[1, 2], [0, -1]])]).tolist()
    [[[3, -1], [-1, -1]], [[1, 2], [0, -1]]]
    """
    shape = np.max([order.shape for order in orders], axis=0)
    stacked = np.full((len(orders), *shape), -1, dtype=np.int64)
    for place, order in zip(stacked, orders, strict=True):
        place[tuple(map(slice, order.shape))] = order
    return stacked
