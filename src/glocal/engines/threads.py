"""Threads on a CPU for fused steps, which release Python's lock and copy nothing."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic

import torch

from glocal.core.data import Examples
from glocal.core.optimizers import Optimizer
from glocal.core.training import Objective, Trained, Work
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
    """Runs the function in several threads; the fused step must support its local training.

    The very first task runs alone. It traces the model, which patches the calls of all modules
    while it lasts, and other tasks may call one: an algorithm that evaluates models, such as IFCA.
    """

    def __init__(
        self, function: ClientFunction[ResultT], *, workers: int, fused: FusedCpuTraining
    ) -> None:
        self.function = function
        self.workers = workers
        self.fused = fused
        self.pool: ThreadPoolExecutor | None = None
        self.has_traced = False

    def __call__(
        self, tasks: Sequence[ClientTask], examples: Examples, round_index: int
    ) -> ClientResults[ResultT]:
        """One result per task."""
        before = torch.get_rng_state()
        with use_num_threads(1):
            rows = self._run(tasks, examples, round_index)
        if not torch.equal(before, torch.get_rng_state()):
            torch.set_rng_state(before)
            raise NotImplementedError(
                "the algorithm draws from torch's own generator, which threads would share"
            )
        return ClientResults(rows=rows)

    def _run(
        self, tasks: Sequence[ClientTask], examples: Examples, round_index: int
    ) -> list[ResultT]:
        """The results in the order of the tasks; the longest task starts first."""
        pool = self._start_threads()
        longest_first = sorted(range(len(tasks)), key=lambda index: -tasks[index].order.size)
        futures = {}
        for index in longest_first:
            futures[index] = pool.submit(self._one, tasks[index], examples, round_index)
            if not self.has_traced:
                futures[index].result()
                self.has_traced = True
        return [futures[index].result() for index in range(len(tasks))]

    def _start_threads(self) -> ThreadPoolExecutor:
        if self.pool is None:
            self.pool = ThreadPoolExecutor(
                self.workers, initializer=torch.set_num_threads, initargs=(1,)
            )
        return self.pool

    def _one(self, task: ClientTask, examples: Examples, round_index: int) -> ResultT:
        return run_one(self.function, task, examples, round_index, self._local_train)

    def _local_train(
        self, objective: Objective, params: Params, work: Work, optimizer: Optimizer
    ) -> Trained:
        """Fused local training, or an error: several threads must not call one module."""
        result = self.fused(objective, params, work, optimizer)
        if result is None:
            raise NotImplementedError(self.fused.reason)
        return result

    def describe(self) -> str:
        """The engine in a few words."""
        return f"fused C++ on {self.workers} threads"

    def close(self) -> None:
        """End the threads."""
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)
            self.pool = None
