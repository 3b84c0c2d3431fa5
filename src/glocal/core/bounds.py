"""Bounds of counts: a larger number is a typing error and would run for ever or fill the memory."""

from dataclasses import MISSING, field, fields
from numbers import Integral
from types import UnionType
from typing import Any, get_args, get_origin

from glocal.core.errors import InputError, describe_value

MILLION = 10**6
MAX_ROUNDS = MAX_CLIENTS = MAX_EXAMPLES = MILLION
MAX_EPOCHS = MAX_SEEDS = MAX_CLUSTERS = 1_000
MAX_WIDTH = 16_384  # two layers of this width hold a gigabyte
MAX_WORKERS = 1_024
MAX_SEED = 2**32 - 1  # the largest seed that scikit-learn accepts


def count_field(default: Any = MISSING, *, minimum: int = 1, maximum: int = MILLION) -> Any:
    """A dataclass field that holds a count from `minimum` to `maximum`.

    Where its type says so, it holds None, or a tuple of counts.
    """
    return field(default=default, metadata={"count": (minimum, maximum)})


def require_counts(prefix: str, settings: Any) -> None:
    """Refuse a dataclass with a count out of bounds; the message has `prefix` before its name.

    Whole numbers of NumPy become Python's.
    """
    for part in fields(settings):
        if "count" not in part.metadata:
            continue
        value, kinds = getattr(settings, part.name), _kinds(part.type)
        if value is None and type(None) in kinds:
            continue
        counts = value if isinstance(value, tuple) and tuple in kinds else (value,)
        for count in counts:
            require_count(prefix + part.name, count, *part.metadata["count"])
        if isinstance(value, Integral):  # NumPy's cannot be written as JSON
            object.__setattr__(settings, part.name, int(value))


def _kinds(annotation: Any) -> set[Any]:
    """The types that an annotation allows.

    >>> _kinds(tuple[int, ...] | None) == {tuple, type(None)}
    True
    """
    each = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    return {get_origin(kind) or kind for kind in each}


def require_count(name: str, value: object, minimum: int, maximum: int) -> None:
    """Refuse a number that is not whole, or out of bounds.

    >>> require_count("epochs", 2_000, 1, 1_000)
    Traceback (most recent call last):
    ...
    glocal.core.errors.InputError: epochs is 2000; a whole number from 1 to 1,000 was expected
    """
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if is_whole and minimum <= int(value) <= maximum:  # type: ignore[call-overload]
        return
    raise InputError(
        f"{name} is {describe_value(value)}; "
        f"a whole number from {minimum:,} to {maximum:,} was expected"
    )
