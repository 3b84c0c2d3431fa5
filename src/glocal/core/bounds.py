"""What counts may be: what is beyond is a slip, and would run for ever or fill the memory."""

from dataclasses import MISSING, field, fields
from numbers import Integral
from typing import Any

from glocal.core.errors import InputError

MILLION = 10**6
MAX_ROUNDS = MAX_CLIENTS = MAX_EXAMPLES = MILLION
MAX_EPOCHS = MAX_SEEDS = 1_000
MAX_WIDTH = 16_384  # two layers of it hold a gigabyte
MAX_WORKERS = 1_024
MAX_SEED = 2**32 - 1  # what scikit-learn takes
_LONG = 10**20


def count_field(default: Any = MISSING, *, minimum: int = 1, maximum: int = MILLION) -> Any:
    """A dataclass's field that holds a count, several, or None: each from `least` to `most`."""
    return field(default=default, metadata={"count": (minimum, maximum)})


def require_counts(where: str, settings: Any) -> None:
    """Refuse a dataclass one of whose counts is out of bounds; `where` comes before its name."""
    for part in fields(settings):
        if "count" not in part.metadata:
            continue
        value = getattr(settings, part.name)
        for each in value if isinstance(value, tuple) else (value,):
            if each is not None:
                require_count(f"{where}{part.name}", each, *part.metadata["count"])


def require_count(name: str, value: object, minimum: int, maximum: int) -> None:
    """Refuse a number that is not whole, or out of bounds.

    >>> require_count("epochs", 2_000, 1, 1_000)
    Traceback (most recent call last):
    ...
    glocal.core.errors.InputError: epochs is 2000; a whole number from 1 to 1,000 was expected
    """
    whole = int(value) if isinstance(value, Integral) else None
    if whole is not None and minimum <= whole <= maximum:
        return
    long = whole is not None and not -_LONG < whole < _LONG
    told = "a number of more than 20 digits" if long else value
    raise InputError(
        f"{name} is {told}; a whole number from {minimum:,} to {maximum:,} was expected"
    )
