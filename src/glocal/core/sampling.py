"""Who takes part in a round, and in which order a device visits its data: randomness by address, not by state."""

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
    require_counts,
)
from glocal.core.errors import InputError

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Plan:
    """How long, with how many devices, and how they train; `first_round` > 0 continues the numbering of a warm start.

    With `max_tokens`, a batch of texts has at most `batch_size` rows and rows times its longest text are at most so many.
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
        """How many rounds there have been at the end, a warm start's included."""
        return self.first_round + self.rounds

    def __post_init__(self) -> None:
        require_counts("plan: ", self)


class Availability(NamedTuple):
    """Who can be asked: `present` are sampled from, `always` take part besides, `leaving` are asked and gone before they answer."""

    available: IntArray
    always: IntArray
    dropouts: IntArray

    @classmethod
    def of(
        cls, available: Sequence[int], *, always: Sequence[int] = (), dropouts: Sequence[int] = ()
    ) -> "Availability":
        """From plain numbers of devices; one that always takes part is not sampled as well."""
        for name, clients in (("present", available), ("always", always), ("dropouts", dropouts)):
            if len({*clients}) != len(clients):
                raise InputError(f"attendance: {name} names a device twice; name each once")
            if any(client < 0 for client in clients):
                raise InputError(
                    f"attendance: {name} names device {min(clients)}; devices are numbered from 0"
                )
        absent = {*dropouts} - {*available, *always}
        if absent:
            raise InputError(
                f"attendance: device {min(absent)} leaves, and was not there; let it be present too"
            )
        sampled = sorted({*available} - {*always})
        return cls(
            *(
                np.array(clients, dtype=np.int64)
                for clients in (sampled, sorted(always), sorted(dropouts))
            )
        )


def make_rng(seed: int, purpose: str, *address: int) -> np.random.Generator:
    """A generator for one purpose at one address; the same on a device as in the simulator.

    >>> bool(make_rng(0, "order", 3).integers(100) == make_rng(0, "order", 3).integers(100))
    True
    """
    return np.random.Generator(
        np.random.PCG64(np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), *address]))
    )


def sample_clients(plan: Plan, clients: int, round_index: int) -> IntArray:
    """The devices of one round, S_t in the paper, in ascending order."""
    if plan.clients_per_round > clients:
        raise InputError(
            f"plan: the cohort is {plan.clients_per_round}, but there are {clients} devices; choose at most {clients}"
        )
    return np.sort(
        make_rng(plan.seed, "cohort", round_index).choice(
            clients, plan.clients_per_round, replace=False
        )
    )


def sample_available(plan: Plan, attendance: Availability, round_index: int) -> IntArray:
    """The devices of a round where not all are there: a cohort of those present, or all of them, and who always takes part."""
    available = attendance.available
    drawn = make_rng(plan.seed, "cohort", round_index).choice(
        len(available), min(plan.clients_per_round, len(available)), replace=False
    )
    return np.sort(np.concatenate([available[drawn], attendance.always]))


def batch_order(
    plan: Plan, size: int, round_index: int, client: int, *, lengths: IntArray | None = None
) -> IntArray:
    """The order in which a device visits its own examples (steps, batch); -1 is padding, at each epoch's end only.

    Where the plan counts tokens, by the examples' `lengths` (size,), any batch may end in padding.
    """
    generator = make_rng(plan.seed, "order", round_index, client)
    if plan.max_tokens is None or lengths is None:
        return np.concatenate(
            [
                to_batches(generator.permutation(size), plan.batch_size)
                for _ in range(plan.local_epochs)
            ]
        )
    local_epochs = [
        to_token_batches(lengths, generator, batch_size=plan.batch_size, max_tokens=plan.max_tokens)
        for _ in range(plan.local_epochs)
    ]
    return np.concatenate(local_epochs)


def client_batches(
    plan: Plan, rows: IntArray, round_index: int, client: int, *, lengths: IntArray | None = None
) -> IntArray:
    """The same as rows of the store, of a device that holds these."""
    order = batch_order(plan, len(rows), round_index, client, lengths=lengths)
    return np.where(order >= 0, rows[order.clip(min=0)], -1)


def client_key(plan: Plan, round_index: int, client: int) -> int:
    """Where a device's dropout and augmentation of one round start from."""
    return int(make_rng(plan.seed, "noise", round_index, client).integers(2**62))


def to_batches(rows: IntArray, batch_size: int) -> IntArray:
    """Rows as they come (steps, batch), no wider than they are many; -1 is padding."""
    batch_size = min(batch_size, max(len(rows), 1))
    steps = -(-len(rows) // batch_size)
    order = np.full(steps * batch_size, -1, dtype=np.int64)
    order[: len(rows)] = rows
    return order.reshape(steps, batch_size)


def to_token_batches(
    lengths: IntArray, generator: np.random.Generator, *, batch_size: int, max_tokens: int
) -> IntArray:
    """Rows by length, at random among those of one length, cut into batches; the batches in random order, -1 is padding.

    So does fairseq (Ott et al. 2019), whose `--max-tokens` counts rows times the longest. Texts of like length share a batch,
    and whatever the chance, there are equally many batches of the same widths: shapes stay the same from round to round.

    >>> to_token_batches(np.array([2, 9, 2, 2]), make_rng(0, "order"), batch_size=4, max_tokens=6).shape
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
    return pad_and_stack([cut[place][None] for place in generator.permutation(len(cut))])[:, 0]


def pad_and_stack(orders: Sequence[IntArray]) -> IntArray:
    """Orders of many devices as one array (devices, steps, batch); short or narrow ones end in padding."""
    longest, widest = (max(order.shape[axis] for order in orders) for axis in (0, 1))
    stacked = np.full((len(orders), longest, widest), -1, dtype=np.int64)
    for place, order in zip(stacked, orders, strict=True):
        place[: len(order), : order.shape[1]] = order
    return stacked
