"""Numbers as people read them."""

from collections.abc import Sequence
from statistics import fmean, stdev

PERCENT = 100.0


def several(count: int, thing: str) -> str:
    """So many of a thing.

    >>> several(1, "class"), several(2000, "class")
    ('1 class', '2,000 classes')
    """
    plural = thing + ("es" if thing.endswith("s") else "s")
    return f"{count:,} {thing if count == 1 else plural}"


def percent(values: Sequence[float]) -> str:
    """Mean and sample standard deviation.

    >>> percent([0.5, 0.75])
    '62.5 ± 17.7'
    """
    spread = f" ± {PERCENT * stdev(values):.1f}" if len(values) > 1 else ""
    return f"{PERCENT * fmean(values):.1f}{spread}"


def mean_size(values: Sequence[float]) -> str:
    """The mean of numbers of bytes."""
    return size(fmean(values))


def size(amount: float) -> str:
    """A number of bytes.

    >>> size(37_214_880)
    '37.2 MB'
    """
    unit, name = unit_of(amount)
    return f"{amount / unit:.{0 if unit == 1 else 1}f} {name}"


def unit_of(amount: float) -> tuple[int, str]:
    """The largest decimal unit that a number of bytes fills, and its name."""
    units = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (1000, "kB"))
    return next((unit for unit in units if amount >= unit[0]), (1, "B"))


def mean_power_of_ten(values: Sequence[float]) -> str:
    """The mean in three digits and an exponent.

    >>> mean_power_of_ten([55_749_120_000])
    '5.57e10'
    """
    digits, exponent = f"{fmean(values):.2e}".split("e")
    return f"{digits}e{int(exponent)}"


def mean_count(values: Sequence[float]) -> str:
    """The mean with one decimal, unless that is 0.

    >>> mean_count([1, 2]), mean_count([2, 2])
    ('1.5', '2')
    """
    return f"{fmean(values):.1f}".removesuffix(".0")
