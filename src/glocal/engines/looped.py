"""One device after the other: slow, simple, and what every other form must agree with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

from glocal.core.data import Examples
from glocal.engines.tasks import OneDevice, Outcome, Result, Task, alone, calm, nbytes, own_randomness, threads


@dataclass(frozen=True)
class Looped(Generic[Result]):
    """The function itself, called for one task after the other."""

    function: OneDevice[Result]

    def __call__(self, tasks: Sequence[Task], examples: Examples, round_index: int) -> Outcome[Result]:
        """One result per task."""
        with threads(calm(nbytes(tasks[0]))):
            return Outcome(rows=[self._one(task, examples, round_index) for task in tasks])

    def _one(self, task: Task, examples: Examples, round_index: int) -> Result:
        with own_randomness(task.key, examples.y.device):
            return alone(self.function, task, examples, round_index)

    def about(self) -> str:
        """What it is."""
        return "one device after the other"

    def close(self) -> None:
        """It holds nothing."""
