"""Workers on a CPU: forked processes, each with one thread, that take one device after the other from a queue.

They see data and model as the parent had them when it forked (nothing is copied), find weights in a piece of shared memory, and put
their results there. Which worker trains a device changes nothing, so the numbers do not depend on how many there are.
"""

import math
import mmap
import os
import signal
import warnings
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from glocal.core.data import Examples
from glocal.core.errors import InputError
from glocal.core.training import LocalTrainer
from glocal.core.trees import Params
from glocal.engines.protocol import (
    ClientFunction,
    ClientResults,
    ClientTask,
    ResultT,
    run_one,
    seeded_rng,
    use_num_threads,
)

_CACHE_LINE = 64  # tensors start at a cache line
_SPARE_BYTES = 2**20
_KILLED_MESSAGE = "engine: a worker was killed (is the memory full?); use fewer with run.workers"


class WorkItem(NamedTuple):
    """What a worker is told: where its shared tree lies, its slot, where the result goes, and the rest of the task."""

    shared: int
    slot: int
    result: int
    rows: Any
    key: int
    round_index: int


@dataclass(frozen=True)
class MemoryLayout:
    """How the shared memory is laid out: some shared trees, slots with a private tree each, and room for every task's result."""

    shared: Params
    private: Params
    copies: int
    slots: int
    results: int

    @property
    def shared_bytes(self) -> int:
        """Room for one shared tree."""
        return _tree_bytes(self.shared)

    @property
    def result_bytes(self) -> int:
        """Room for a result: what comes back is about as large as what went in."""
        return 2 * (_tree_bytes(self.shared) + _tree_bytes(self.private)) + _SPARE_BYTES

    def shared_offset(self, index: int) -> int:
        """Where a shared tree starts."""
        return index * self.shared_bytes

    def private_offset(self, slot: int) -> int:
        """Where a slot's private tree starts."""
        return self.copies * self.shared_bytes + slot * _tree_bytes(self.private)

    def result_offset(self, index: int) -> int:
        """Where the result of a task starts."""
        return self.private_offset(self.slots) + index * self.result_bytes

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.result_offset(self.results)


class ProcessPool(Generic[ResultT]):
    """A one-device function, run by several processes."""

    def __init__(
        self, function: ClientFunction[ResultT], *, workers: int, trainer: LocalTrainer | None
    ) -> None:
        self.function, self.workers, self.trainer = function, workers, trainer
        self.processes: _WorkerProcesses | None = None
        self.treespec: TreeSpec | None = None

    def __call__(
        self, tasks: Sequence[ClientTask], examples: Examples, round_index: int
    ) -> ClientResults[ResultT]:
        """One result per task; tensors that lie in the shared memory are good until the next call."""
        if examples.y.is_cuda or not hasattr(os, "fork"):
            raise RuntimeError("workers compute on a CPU, in forked processes")
        self._warm_up(tasks[0], examples, round_index)
        if self.workers == 1 or len(tasks) == 1:
            with use_num_threads(1):
                return ClientResults(
                    rows=[self._one(task, examples, round_index) for task in tasks]
                )
        try:
            found = self._start_workers(tasks, examples).run(tasks, round_index)
            assert self.treespec is not None
            if isinstance(found, StackedLeaves):
                return ClientResults(
                    stack=cast(ResultT, tree_unflatten(found.leaves, self.treespec))
                )
            return ClientResults(
                rows=[cast(ResultT, tree_unflatten(leaves, self.treespec)) for leaves in found]
            )
        except BaseException:
            self.close()  # whoever is in the middle of something is not waited for
            raise

    def _warm_up(self, task: ClientTask, examples: Examples, round_index: int) -> None:
        """Take one step here, once: what it prepares is there for all workers, and what comes back has the structure of this."""
        if self.treespec is None:
            with use_num_threads(1):
                self.treespec = tree_flatten(
                    self._one(task._replace(order=task.order[:1]), examples, round_index)
                )[1]

    def _one(self, task: ClientTask, examples: Examples, round_index: int) -> ResultT:
        with seeded_rng(task.key, examples.y.device):
            return run_one(self.function, task, examples, round_index, self.trainer)

    def _start_workers(self, tasks: Sequence[ClientTask], examples: Examples) -> "_WorkerProcesses":
        copies = len({id(task.shared) for task in tasks})
        if self.processes is None or not self.processes.fits(tasks, copies, examples):
            self.close()
            layout = MemoryLayout(
                tasks[0].shared, tasks[0].private, copies, 2 * self.workers, len(tasks)
            )
            try:
                self.processes = _WorkerProcesses(self, layout, examples)
            except OSError as error:
                raise RuntimeError(
                    f"{self.workers} workers could not be started ({error.strerror})"
                ) from error
        return self.processes

    def describe(self) -> str:
        """What it is."""
        return f"{self.workers} processes, one device at a time each"

    def close(self) -> None:
        """Dismiss the workers."""
        if self.processes is not None:
            self.processes.kill()
            self.processes = None


class StackedLeaves(NamedTuple):
    """The tensors of all tasks' results, each with a first axis (tasks, ...)."""

    leaves: list[Tensor]


class _WorkerProcesses:
    """Workers that run, and the memory that they share."""

    def __init__(self, pool: ProcessPool[Any], layout: MemoryLayout, examples: Examples) -> None:
        self.layout, self.examples, self.memory = (
            layout,
            examples,
            mmap.mmap(-1, max(layout.total_bytes, 1)),
        )
        self.connections: list[Connection] = []
        self.pids: list[int] = []
        self.kill = weakref.finalize(self, _kill_workers, os.getpid(), self.connections, self.pids)
        for _ in range(pool.workers):
            self._fork(pool)

    def _fork(self, pool: ProcessPool[Any]) -> None:
        ours, theirs = Pipe()
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # a worker uses none of the threads that it leaves behind
            pid = os.fork()
        if pid == 0:
            try:
                for connection in (*self.connections, ours):
                    connection.close()  # else a worker outlives the parent, whose end it would hold open
                _worker_loop(pool, self, theirs)
            finally:
                os._exit(0)
        theirs.close()
        self.connections.append(ours)
        self.pids.append(pid)

    def fits(self, tasks: Sequence[ClientTask], copies: int, examples: Examples) -> bool:
        """Whether tasks like these fit into the memory, and the data are those that the workers know."""
        alike = _same_shapes(tasks[0].shared, self.layout.shared) and _same_shapes(
            tasks[0].private, self.layout.private
        )
        same_data = all(
            theirs is ours for theirs, ours in zip(examples, self.examples, strict=True)
        )
        return (
            alike
            and copies <= self.layout.copies
            and len(tasks) <= self.layout.results
            and same_data
        )

    def run(
        self, tasks: Sequence[ClientTask], round_index: int
    ) -> StackedLeaves | list[list[Tensor]]:
        """Every task's result, as its tensors; stacked where they lie, if they are alike."""
        shift = _Dispatcher(self, tasks, round_index)
        for connection in [
            *self.connections,
            *self.connections,
        ]:  # two for each, so that none waits for the next
            shift.send_next(connection)
        while shift.in_flight:
            for connection in cast(
                list[Connection], wait({connection for connection, _ in shift.in_flight})
            ):
                shift.collect(connection)
                shift.send_next(connection)
        first = shift.results[0]
        if isinstance(first, LeafSpecs) and all(told == first for told in shift.results):
            return self._stacked(first, len(tasks))
        return [self._tensors(index, told) for index, told in enumerate(shift.results)]

    def receive(self, connection: Connection) -> tuple[int, "LeafSpecs | list[Tensor]"]:
        """A worker's answer: a slot that is free again, and what it left, or what there was no room for."""
        try:
            slot, told = connection.recv()
        except (EOFError, OSError) as error:
            raise InputError(_KILLED_MESSAGE) from error
        if isinstance(told, Exception):
            raise told
        return slot, told if isinstance(told, LeafSpecs) else [
            torch.from_numpy(leaf) for leaf in told
        ]

    def _stacked(self, left: "LeafSpecs", tasks: int) -> StackedLeaves:
        """Results that are alike lie at equal distances: each of their tensors is one of all tasks, without a copy."""
        start, leaves, apart = self.layout.result_offset(0), [], self.layout.result_bytes
        for dtype, shape in left.leaves:
            count = math.prod(shape)
            if count:
                reach = (tasks - 1) * apart // dtype.itemsize + count
                whole = torch.frombuffer(self.memory, dtype=dtype, count=reach, offset=start)
                leaves.append(
                    whole.as_strided((tasks, count), (apart // dtype.itemsize, 1)).reshape(
                        tasks, *shape
                    )
                )
            else:
                leaves.append(torch.empty(tasks, *shape, dtype=dtype))
            start += _align(count * dtype.itemsize)
        return StackedLeaves(leaves)

    def _tensors(self, index: int, told: "LeafSpecs | list[Tensor]") -> list[Tensor]:
        if not isinstance(told, LeafSpecs):
            return told
        start, found = self.layout.result_offset(index), []
        for dtype, shape in told.leaves:
            found.append(_tensor_at(self.memory, start, dtype, shape).clone())
            start += _align(found[-1].nbytes)
        return found


class LeafSpecs(NamedTuple):
    """What kind of tensors a worker has left in the shared memory, one after the other: dtype and shape of each."""

    leaves: list[tuple[torch.dtype, tuple[int, ...]]]


class _Dispatcher:
    """The tasks of one call on their way through the workers, the longest first."""

    def __init__(
        self, processes: _WorkerProcesses, tasks: Sequence[ClientTask], round_index: int
    ) -> None:
        self.processes, self.tasks, self.round_index = processes, tasks, round_index
        self.queue = sorted(range(len(tasks)), key=lambda index: tasks[index].order.size)
        self.free_slots = {
            connection: [2 * number, 2 * number + 1]
            for number, connection in enumerate(processes.connections)
        }
        self.in_flight: dict[tuple[Connection, int], int] = {}
        self.results: list[LeafSpecs | list[Tensor]] = [[] for _ in tasks]
        shared = {id(task.shared): task.shared for task in tasks}
        self.places = {key: index for index, key in enumerate(shared)}
        for index, tree in enumerate(shared.values()):
            _write_tree(
                processes.memory,
                processes.layout.shared_offset(index),
                tree,
                processes.layout.shared,
            )

    def send_next(self, connection: Connection) -> None:
        """Give a worker the next task, if there is one and it has a slot for it."""
        if not self.queue or not self.free_slots[connection]:
            return
        index, slot = self.queue.pop(), self.free_slots[connection].pop()
        task = self.tasks[index]
        _write_tree(
            self.processes.memory,
            self.processes.layout.private_offset(slot),
            task.private,
            self.processes.layout.private,
        )
        try:
            connection.send(
                WorkItem(
                    self.places[id(task.shared)],
                    slot,
                    index,
                    task.order,
                    task.key,
                    self.round_index,
                )
            )
        except OSError as error:
            raise InputError(_KILLED_MESSAGE) from error
        self.in_flight[connection, slot] = index

    def collect(self, connection: Connection) -> None:
        """Keep what a worker has finished."""
        slot, result = self.processes.receive(connection)
        self.results[self.in_flight.pop((connection, slot))] = result
        self.free_slots[connection].append(slot)


def _worker_loop(pool: ProcessPool[Any], processes: _WorkerProcesses, connection: Any) -> None:
    """What a worker does until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    layout, memory = processes.layout, processes.memory
    while True:
        try:
            order: WorkItem = connection.recv()
        except (EOFError, OSError):
            return
        shared = _read_tree(memory, layout.shared_offset(order.shared), layout.shared)
        private = _read_tree(memory, layout.private_offset(order.slot), layout.private)
        try:
            result = pool._one(
                ClientTask(shared, private, order.rows, order.key),
                processes.examples,
                order.round_index,
            )
            connection.send(
                (order.slot, _write_result(memory, layout, order.result, tree_flatten(result)[0]))
            )
        except Exception as error:  # told to the parent, who raises it
            connection.send((order.slot, _picklable(error)))


def _write_result(
    memory: mmap.mmap, layout: MemoryLayout, index: int, leaves: Sequence[Tensor]
) -> LeafSpecs | list[Any]:
    """Put a result where it belongs; what each tensor is, or the tensors themselves where there is no room."""
    if sum(_align(leaf.nbytes) for leaf in leaves) > layout.result_bytes:
        return [leaf.numpy() for leaf in leaves]
    start = layout.result_offset(index)
    for leaf in leaves:
        _tensor_at(memory, start, leaf.dtype, leaf.shape).copy_(leaf)
        start += _align(leaf.nbytes)
    return LeafSpecs([(leaf.dtype, tuple(leaf.shape)) for leaf in leaves])


def _picklable(error: Exception) -> Exception:
    kind = (
        type(error)
        if type(error).__module__ in ("builtins", "glocal.core.errors")
        else RuntimeError
    )
    return kind(str(error))


def _kill_workers(owner: int, connections: list[Connection], pids: list[int]) -> None:
    """Stop the workers at once, whatever they are doing; only the process that hired them may."""
    if os.getpid() != owner:
        return
    for connection in connections:
        connection.close()
    for pid in pids:
        with suppress(ProcessLookupError, ChildProcessError):  # gone already
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _write_tree(memory: mmap.mmap, start: int, tree: Params, like: Params) -> None:
    """Put a tree where one like that is expected, name by name."""
    if not _same_shapes(tree, like):
        raise RuntimeError("devices have trees of different shapes")
    for name, tensor in like.items():
        _tensor_at(memory, start, tensor.dtype, tensor.shape).copy_(tree[name])
        start += _align(tensor.nbytes)


def _read_tree(memory: mmap.mmap, start: int, like: Params) -> Params:
    tree: Params = {}
    for name, tensor in like.items():
        tree[name] = _tensor_at(memory, start, tensor.dtype, tensor.shape)
        start += _align(tensor.nbytes)
    return tree


def _tensor_at(memory: mmap.mmap, start: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """A tensor that lies in the shared memory."""
    count = math.prod(shape)
    if not count:
        return torch.empty(*shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).reshape(tuple(shape))


def _tree_bytes(tree: Params) -> int:
    return sum(_align(tensor.nbytes) for tensor in tree.values())


def _align(size: int) -> int:
    return -(-size // _CACHE_LINE) * _CACHE_LINE


def _same_shapes(left: Params, right: Params) -> bool:
    return left.keys() == right.keys() and all(
        tensor.shape == right[name].shape and tensor.dtype == right[name].dtype
        for name, tensor in left.items()
    )
