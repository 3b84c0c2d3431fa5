"""Workers on a CPU whose steps are fused: threads, for such a step holds no Python lock and needs no copy of anything."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic

import torch

from glocal.core.data import Examples
from glocal.core.optimizers import Optimizer
from glocal.core.training import Objective, Work
from glocal.core.trees import Params
from glocal.engines.fused.cpu import FusedCpuTraining
from glocal.engines.protocol import (
    ClientFunction,
    ClientResults,
    ClientTask,
    ResultT,
    run_one,
    use_num_threads,
)


class ThreadPool(Generic[ResultT]):
    """A one-device function, run by several threads; its descents must be ones that the fused step knows."""

    def __init__(
        self, function: ClientFunction[ResultT], *, workers: int, fused: FusedCpuTraining
    ) -> None:
        self.function, self.workers, self.fused = function, workers, fused
        self.pool: ThreadPoolExecutor | None = None

    def __call__(
        self, tasks: Sequence[ClientTask], examples: Examples, round_index: int
    ) -> ClientResults[ResultT]:
        """One result per task."""
        if self.pool is None:
            self.pool = ThreadPoolExecutor(
                self.workers, initializer=torch.set_num_threads, initargs=(1,)
            )
        longest_first = sorted(range(len(tasks)), key=lambda index: -tasks[index].order.size)
        before = torch.get_rng_state()
        with use_num_threads(1):
            futures = {
                index: self.pool.submit(self._one, tasks[index], examples, round_index)
                for index in longest_first
            }
            rows = [futures[index].result() for index in range(len(tasks))]
        if not torch.equal(before, torch.get_rng_state()):
            torch.set_rng_state(before)
            raise NotImplementedError(
                "the algorithm draws from torch's own generator, which threads would share"
            )
        return ClientResults(rows=rows)

    def _one(self, task: ClientTask, examples: Examples, round_index: int) -> ResultT:
        return run_one(self.function, task, examples, round_index, self._descent)

    def _descent(
        self, objective: Objective, params: Params, work: Work, optimizer: Optimizer
    ) -> tuple[Params, torch.Tensor]:
        """A fused descent, or an error: modules must not be called from several threads."""
        taken = self.fused(objective, params, work, optimizer)
        if taken is None:
            raise NotImplementedError(self.fused.reason)
        return taken

    def describe(self) -> str:
        """What it is."""
        return f"{self.workers} threads, one device at a time each, with fused steps"

    def close(self) -> None:
        """Let the threads go."""
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)
            self.pool = None
