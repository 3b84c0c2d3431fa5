"""A metric over time, and its forgetting (Chaudhry et al. 2018, definition 1)."""

from typing import NamedTuple


class Forgetting(NamedTuple):
    """A metric at the first, the best and the last evaluation.

    Forgetting is how much worse the last is than the best earlier one. It is negative where the
    last is the best: the group is still learning.
    """

    first: float
    best: float
    last: float
    forgetting: float


class MetricHistory(NamedTuple):
    """A subgroup's metric per evaluation, with the round and the number of its clients present."""

    rounds: list[int]
    values: list[float]
    present: list[int]

    def summary(self, *, higher_is_better: bool = True) -> Forgetting | None:
        """First, best and last value, and forgetting; None without an evaluation.

        >>> MetricHistory([1, 10, 20], [0.5, 0.75, 0.25], [3, 3, 0]).summary()
        Forgetting(first=0.5, best=0.75, last=0.25, forgetting=0.5)
        >>> errors = MetricHistory([1, 10, 20], [2.0, 1.0, 1.5], [3, 3, 0])
        >>> errors.summary(higher_is_better=False)
        Forgetting(first=2.0, best=1.0, last=1.5, forgetting=0.5)
        """
        if not self.values:
            return None
        best = max if higher_is_better else min
        *earlier, last = self.values
        before = best(earlier, default=last)
        forgetting = before - last if higher_is_better else last - before
        return Forgetting(self.values[0], best(self.values), last, forgetting)
