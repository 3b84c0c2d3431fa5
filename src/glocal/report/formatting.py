"""Numbers, sizes and durations as readable text."""

from collections.abc import Sequence
from statistics import fmean

PERCENT = 100.0
BILLION = 1e9


def pluralize(count: int, thing: str) -> str:
    """So many of a thing.

    >>> pluralize(1, "class"), pluralize(2000, "class")
    ('1 class', '2,000 classes')
    """
    plural = thing + ("es" if thing.endswith("s") else "s")
    return f"{count:,} {thing if count == 1 else plural}"


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

    >>> mean_power_of_ten([55_749_120_000]), mean_power_of_ten([0])
    ('5.57e10', '0')
    """
    if not any(values):
        return "0"
    digits, exponent = f"{fmean(values):.2e}".split("e")
    return f"{digits}e{int(exponent)}"


def mean_count(values: Sequence[float]) -> str:
    """The mean with one decimal, unless that is 0.

    >>> mean_count([1, 2]), mean_count([2, 2])
    ('1.5', '2')
    """
    return f"{fmean(values):.1f}".removesuffix(".0")


def duration(seconds: float) -> str:
    """Hours and minutes, minutes and seconds, or seconds.

    >>> duration(4000), duration(75.2), duration(3.4)
    ('1 h 7 min', '1 min 15 s', '3 s')
    """
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        hours, minutes = divmod(round(seconds / 60), 60)
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def signed(points: float) -> str:
    """Points with two decimals and their sign.

    >>> signed(0.5), signed(-0.25), signed(0.0)
    ('+0.50', '−0.25', '0.00')
    """
    written = f"{abs(points):.2f}"
    return written if written == "0.00" else f"{'+' if points > 0 else '−'}{written}"
