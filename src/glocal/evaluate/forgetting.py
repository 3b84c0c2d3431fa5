"""A metric over time, and its forgetting (Chaudhry et al. 2018, definition 1)."""

from typing import NamedTuple


class Forgetting(NamedTuple):
    """A metric of which higher is better, at the first, the best and the last evaluation.

    Forgetting is how far the last is below the best earlier one. It is negative where the last is
    the best: the group is still learning.
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

    def summary(self) -> Forgetting | None:
        """First, best and last value, and forgetting; None without an evaluation.

        >>> MetricHistory([1, 10, 20], [0.5, 0.75, 0.25], [3, 3, 0]).summary()
        Forgetting(first=0.5, best=0.75, last=0.25, forgetting=0.5)
        """
        if not self.values:
            return None
        *earlier, last = self.values
        forgetting = max(earlier, default=last) - last
        return Forgetting(self.values[0], max(self.values), last, forgetting)
