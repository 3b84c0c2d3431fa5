"""Bounds of counts: a larger number is a typing error and would run for ever or fill the memory."""

from dataclasses import MISSING, field, fields
from numbers import Integral
from typing import Any

from glocal.core.errors import InputError

MILLION = 10**6
MAX_ROUNDS = MAX_CLIENTS = MAX_EXAMPLES = MILLION
MAX_EPOCHS = MAX_SEEDS = MAX_CLUSTERS = 1_000
MAX_WIDTH = 16_384  # two layers of this width hold a gigabyte
MAX_WORKERS = 1_024
MAX_SEED = 2**32 - 1  # the largest seed that scikit-learn accepts
_PRINTABLE = 10**20  # larger numbers are not printed in full


def count_field(default: Any = MISSING, *, minimum: int = 1, maximum: int = MILLION) -> Any:
    """A dataclass field that holds a count, several, or None: each from `minimum` to `maximum`."""
    return field(default=default, metadata={"count": (minimum, maximum)})


def require_counts(prefix: str, settings: Any) -> None:
    """Refuse a dataclass with a count out of bounds; the message has `prefix` before its name."""
    for part in fields(settings):
        if "count" not in part.metadata:
            continue
        value = getattr(settings, part.name)
        counts = value if isinstance(value, tuple) else (value,)
        for count in counts:
            if count is not None:
                require_count(prefix + part.name, count, *part.metadata["count"])


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
    is_long = whole is not None and not -_PRINTABLE < whole < _PRINTABLE
    shown = "a number of more than 20 digits" if is_long else value
    raise InputError(
        f"{name} is {shown}; a whole number from {minimum:,} to {maximum:,} was expected"
    )
