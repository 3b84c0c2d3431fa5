"""Who takes part in a round, and in which order a device visits its data: randomness by address, not by state."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from glocal.core.bounds import CLIENTS, EPOCHS, EXAMPLES, ROUNDS, SEED, count, require_counts
from glocal.core.errors import InputError

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Plan:
    """How long, with how many devices, and how they train; `first_round` > 0 continues the numbering of a warm start.

    With `tokens`, a batch of texts has at most `batch` rows and rows times its longest text are at most so many.
    """

    rounds: int = count(most=ROUNDS)
    cohort: int = count(most=CLIENTS)
    epochs: int = count(1, most=EPOCHS)
    batch: int = count(10, most=EXAMPLES)
    seed: int = count(0, least=0, most=SEED)
    first_round: int = count(0, least=0, most=1_000 * ROUNDS)
    tokens: int | None = count(None, most=1_000 * EXAMPLES)

    @property
    def last_round(self) -> int:
        """How many rounds there have been at the end, a warm start's included."""
        return self.first_round + self.rounds

    def __post_init__(self) -> None:
        require_counts("plan: ", self)


class Attendance(NamedTuple):
    """Who can be asked: `present` are sampled from, `always` take part besides, `leaving` are asked and gone before they answer."""

    present: Integers
    always: Integers
    leaving: Integers

    @classmethod
    def of(cls, present: Sequence[int], *, always: Sequence[int] = (), leaving: Sequence[int] = ()) -> "Attendance":
        """From plain numbers of devices; one that always takes part is not sampled as well."""
        for name, devices in (("present", present), ("always", always), ("leaving", leaving)):
            if len({*devices}) != len(devices):
                raise InputError(f"attendance: {name} names a device twice; name each once")
            if any(device < 0 for device in devices):
                raise InputError(f"attendance: {name} names device {min(devices)}; devices are numbered from 0")
        absent = {*leaving} - {*present, *always}
        if absent:
            raise InputError(f"attendance: device {min(absent)} leaves, and was not there; let it be present too")
        sampled = sorted({*present} - {*always})
        return cls(*(np.array(devices, dtype=np.int64) for devices in (sampled, sorted(always), sorted(leaving))))


def stream(seed: int, purpose: str, *address: int) -> np.random.Generator:
    """A generator for one purpose at one address; the same on a device as in the simulator.

    >>> bool(stream(0, "order", 3).integers(100) == stream(0, "order", 3).integers(100))
    True
    """
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), *address])))


def choose_cohort(plan: Plan, devices: int, round_index: int) -> Integers:
    """The devices of one round, S_t in the paper, in ascending order."""
    if plan.cohort > devices:
        raise InputError(f"plan: the cohort is {plan.cohort}, but there are {devices} devices; choose at most {devices}")
    return np.sort(stream(plan.seed, "cohort", round_index).choice(devices, plan.cohort, replace=False))


def choose_present(plan: Plan, attendance: Attendance, round_index: int) -> Integers:
    """The devices of a round where not all are there: a cohort of those present, or all of them, and who always takes part."""
    present = attendance.present
    drawn = stream(plan.seed, "cohort", round_index).choice(len(present), min(plan.cohort, len(present)), replace=False)
    return np.sort(np.concatenate([present[drawn], attendance.always]))


def visiting_order(plan: Plan, size: int, round_index: int, device: int, *, lengths: Integers | None = None) -> Integers:
    """The order in which a device visits its own examples (steps, batch); -1 is padding, at each epoch's end only.

    Where the plan counts tokens, by the examples' `lengths` (size,), any batch may end in padding.
    """
    generator = stream(plan.seed, "order", round_index, device)
    if plan.tokens is None or lengths is None:
        return np.concatenate([in_batches(generator.permutation(size), plan.batch) for _ in range(plan.epochs)])
    epochs = [in_token_batches(lengths, generator, batch=plan.batch, tokens=plan.tokens) for _ in range(plan.epochs)]
    return np.concatenate(epochs)


def visited_rows(plan: Plan, rows: Integers, round_index: int, device: int, *, lengths: Integers | None = None) -> Integers:
    """The same as rows of the store, of a device that holds these."""
    order = visiting_order(plan, len(rows), round_index, device, lengths=lengths)
    return np.where(order >= 0, rows[order.clip(min=0)], -1)


def noise_key(plan: Plan, round_index: int, device: int) -> int:
    """Where a device's dropout and augmentation of one round start from."""
    return int(stream(plan.seed, "noise", round_index, device).integers(2**62))


def in_batches(rows: Integers, batch: int) -> Integers:
    """Rows as they come (steps, batch), no wider than they are many; -1 is padding."""
    batch = min(batch, max(len(rows), 1))
    steps = -(-len(rows) // batch)
    order = np.full(steps * batch, -1, dtype=np.int64)
    order[: len(rows)] = rows
    return order.reshape(steps, batch)


def in_token_batches(lengths: Integers, generator: np.random.Generator, *, batch: int, tokens: int) -> Integers:
    """Rows by length, at random among those of one length, cut into batches; the batches in random order, -1 is padding.

    So does fairseq (Ott et al. 2019), whose `--max-tokens` counts rows times the longest. Texts of like length share a batch,
    and whatever the chance, there are equally many batches of the same widths: shapes stay the same from round to round.

    >>> in_token_batches(np.array([2, 9, 2, 2]), stream(0, "order"), batch=4, tokens=6).shape
    (2, 3)
    """
    shuffled = generator.permutation(len(lengths))
    ordered = shuffled[np.argsort(lengths[shuffled], kind="stable")]
    starts = [0]
    for place, length in enumerate(lengths[ordered].tolist()):
        rows = place - starts[-1]
        if rows and (rows == batch or (rows + 1) * length > tokens):
            starts.append(place)
    cut = np.split(ordered, starts[1:])
    return padded([cut[place][None] for place in generator.permutation(len(cut))])[:, 0]


def padded(orders: Sequence[Integers]) -> Integers:
    """Orders of many devices as one array (devices, steps, batch); short or narrow ones end in padding."""
    longest, widest = (max(order.shape[axis] for order in orders) for axis in (0, 1))
    stacked = np.full((len(orders), longest, widest), -1, dtype=np.int64)
    for place, order in zip(stacked, orders, strict=True):
        place[: len(order), : order.shape[1]] = order
    return stacked
