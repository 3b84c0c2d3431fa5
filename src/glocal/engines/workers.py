"""Worker processes on a CPU: each has one thread and takes one client after the other.

Workers see data and model as they were when the process forked, and share the memory in which
weights and results lie. Which worker trains a client changes nothing about the client's numbers;
these therefore do not depend on how many workers there are.
"""

import os
from collections.abc import Sequence
from typing import Generic, cast

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_structure, tree_unflatten

from glocal.core.data import Examples
from glocal.core.training import LocalTrainer
from glocal.engines.dispatch import SLOTS_PER_WORKER, Dispatcher
from glocal.engines.protocol import (
    ClientFunction,
    ClientResults,
    ClientTask,
    ResultT,
    first_steps,
    run_one,
    seeded_rng,
    use_num_threads,
)
from glocal.engines.shared_memory import MemoryLayout, TaskMemory, same_shapes
from glocal.engines.worker_processes import Reply, WorkerProcesses


class ProcessPool(Generic[ResultT]):
    """Runs the function in several processes."""

    def __init__(
        self, function: ClientFunction[ResultT], *, workers: int, trainer: LocalTrainer | None
    ) -> None:
        self.function = function
        self.workers = workers
        self.trainer = trainer
        self.processes: WorkerProcesses | None = None
        self.treespec: TreeSpec | None = None

    def __call__(
        self, tasks: Sequence[ClientTask], examples: Examples, round_index: int
    ) -> ClientResults[ResultT]:
        """One result per task; a stack lies in the shared memory and is valid until the next call.

        After any error the workers are ended at once: some may be in the middle of a task.
        """
        if examples.device.type == "cuda" or not hasattr(os, "fork"):
            raise RuntimeError("workers compute on a CPU, in forked processes")
        treespec = self._warm_up(tasks[0], examples, round_index)
        if self.workers == 1 or len(tasks) == 1:
            with use_num_threads(1):
                rows = [self._one(task, examples, round_index) for task in tasks]
            return ClientResults(rows=rows)
        try:
            processes = self._start_workers(tasks, examples)
            replies = Dispatcher(processes, tasks, round_index).run()
            return _results(replies, processes.memory, treespec)
        except BaseException:
            self.close()
            raise

    def _warm_up(self, task: ClientTask, examples: Examples, round_index: int) -> TreeSpec:
        """The structure of a result, known after one step in this process.

        What this step prepares, such as a trace, is inherited by all workers.
        """
        if self.treespec is None:
            one_step = first_steps(task, 1)
            with use_num_threads(1):
                self.treespec = tree_structure(self._one(one_step, examples, round_index))
        return self.treespec

    def _one(self, task: ClientTask, examples: Examples, round_index: int) -> ResultT:
        with seeded_rng(task.key, examples.device):
            return run_one(self.function, task, examples, round_index, self.trainer)

    def _start_workers(self, tasks: Sequence[ClientTask], examples: Examples) -> WorkerProcesses:
        """The running workers, or new ones where these tasks do not fit the running ones."""
        num_shared = len({id(task.shared) for task in tasks})
        if self.processes is not None:
            if _fits(self.processes, tasks, num_shared, examples):
                return self.processes
            self.close()
        shared, private = tasks[0].shared, tasks[0].private
        num_slots = SLOTS_PER_WORKER * self.workers
        layout = MemoryLayout(shared, private, num_shared, num_slots, len(tasks))
        try:
            self.processes = WorkerProcesses(
                self._one, number=self.workers, memory=TaskMemory(layout), examples=examples
            )
        except OSError as error:
            message = f"{self.workers} workers could not be started ({error.strerror})"
            raise RuntimeError(message) from error
        return self.processes

    def describe(self) -> str:
        """The engine in a few words."""
        return f"traced steps in {self.workers} processes"

    def close(self) -> None:
        """End the workers."""
        if self.processes is not None:
            self.processes.kill()
            self.processes = None


def _fits(
    processes: WorkerProcesses, tasks: Sequence[ClientTask], num_shared: int, examples: Examples
) -> bool:
    """Whether the tasks fit into the memory, and the workers know these examples."""
    layout, first = processes.memory.layout, tasks[0]
    if num_shared > layout.num_shared or len(tasks) > layout.num_results:
        return False
    for known, given in zip(processes.examples, examples, strict=True):
        if known is not given:
            return False
    return same_shapes(first.shared, layout.shared) and same_shapes(first.private, layout.private)


def _results(
    replies: Sequence[Reply], memory: TaskMemory, treespec: TreeSpec
) -> ClientResults[ResultT]:
    """The results of all tasks; stacked where they lie if they are alike."""
    specs = replies[0].specs
    if specs is not None and all(reply.specs == specs for reply in replies):
        stacks = memory.read_stacked_results(len(replies), specs)
        return ClientResults(stack=cast(ResultT, tree_unflatten(stacks, treespec)))
    rows: list[ResultT] = []
    for index, reply in enumerate(replies):
        leaves = _leaves(index, reply, memory)
        rows.append(cast(ResultT, tree_unflatten(leaves, treespec)))
    return ClientResults(rows=rows)


def _leaves(index: int, reply: Reply, memory: TaskMemory) -> list[Tensor]:
    """The tensors of one task's result."""
    if reply.specs is not None:
        return memory.read_result(index, reply.specs)
    assert reply.leaves is not None
    return [torch.from_numpy(leaf) for leaf in reply.leaves]
