"""Confidence intervals of a mean, over seeds, clients or trials."""

from collections.abc import Iterable
from math import inf, sqrt
from statistics import fmean, stdev
from typing import NamedTuple


class ConfidenceInterval(NamedTuple):
    """A mean with the ends of its confidence interval."""

    mean: float
    low: float
    high: float


def confidence_interval(values: Iterable[float], *, confidence: float = 0.95) -> ConfidenceInterval:
    """The mean of independent values with Student's interval; infinite for one value.

    >>> [round(end, 2) for end in confidence_interval([1.0, 2.0, 3.0])]
    [2.0, -0.48, 4.48]
    """
    from scipy.stats import t  # takes a second to load, and few commands need it

    numbers = [float(value) for value in values]
    mean = fmean(numbers)
    if len(numbers) < 2:
        return ConfidenceInterval(mean, -inf, inf)
    quantile = float(t.ppf((1 + confidence) / 2, len(numbers) - 1))
    reach = quantile * stdev(numbers) / sqrt(len(numbers))
    return ConfidenceInterval(mean, mean - reach, mean + reach)
