"""What devices had and lost: a group's accuracy over time, and its forgetting (Chaudhry et al. 2018, definition 1)."""

from typing import NamedTuple


class Forgetting(NamedTuple):
    """Accuracy at the first look, at the best one and at the last, and how far the last is below the best earlier one.

    All are shares of 1; where the last look is the best, forgetting is negative: the group is still learning.
    """

    first: float
    best: float
    last: float
    forgetting: float


class AccuracyHistory(NamedTuple):
    """A group's accuracies, look by look: after how many rounds, and how many of its devices were there."""

    rounds: list[int]
    accuracies: list[float]
    present: list[int]

    def summary(self) -> Forgetting | None:
        """What became of the group; None if it was never looked at.

        >>> AccuracyHistory([1, 10, 20], [0.5, 0.75, 0.25], [3, 3, 0]).summary()
        Forgetting(first=0.5, best=0.75, last=0.25, forgetting=0.5)
        """
        if not self.accuracies:
            return None
        *earlier, last = self.accuracies
        return Forgetting(
            self.accuracies[0], max(self.accuracies), last, max(earlier, default=last) - last
        )
