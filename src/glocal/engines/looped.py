"""One client after the other: slow and simple; every other engine must agree with it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

from glocal.core.data import Examples
from glocal.engines.protocol import (
    ClientFunction,
    ClientResults,
    ClientTask,
    ResultT,
    choose_num_threads,
    run_one,
    seeded_rng,
    tree_bytes,
    use_num_threads,
)


@dataclass(frozen=True)
class LoopedEngine(Generic[ResultT]):
    """Calls the function for one task after the other."""

    function: ClientFunction[ResultT]

    def __call__(
        self, tasks: Sequence[ClientTask], examples: Examples, round_index: int
    ) -> ClientResults[ResultT]:
        """One result per task."""
        with use_num_threads(choose_num_threads(tree_bytes(tasks[0]))):
            return ClientResults(rows=[self._one(task, examples, round_index) for task in tasks])

    def _one(self, task: ClientTask, examples: Examples, round_index: int) -> ResultT:
        with seeded_rng(task.key, examples.device):
            return run_one(self.function, task, examples, round_index)

    def describe(self) -> str:
        """The engine in a few words."""
        return "looped, one client at a time"

    def close(self) -> None:
        """Nothing to release."""
