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
from glocal.core.training import Descent
from glocal.core.trees import Params
from glocal.engines.tasks import OneDevice, Outcome, Result, Task, alone, own_randomness, threads

_LINE = 64  # tensors start at a cache line
_SPARE = 2**20
_KILLED = "engine: a worker was killed (is the memory full?); use fewer with run.workers"


class Order(NamedTuple):
    """What a worker is told: where its shared tree lies, its slot, where the result goes, and the rest of the task."""

    shared: int
    slot: int
    place: int
    rows: Any
    key: int
    round_index: int


@dataclass(frozen=True)
class Plot:
    """How the shared memory is laid out: some shared trees, slots with a private tree each, and room for every task's result."""

    shared: Params
    private: Params
    copies: int
    slots: int
    results: int

    @property
    def shared_bytes(self) -> int:
        """Room for one shared tree."""
        return _room(self.shared)

    @property
    def result_bytes(self) -> int:
        """Room for a result: what comes back is about as large as what went in."""
        return 2 * (_room(self.shared) + _room(self.private)) + _SPARE

    def shared_at(self, place: int) -> int:
        """Where a shared tree starts."""
        return place * self.shared_bytes

    def private_at(self, slot: int) -> int:
        """Where a slot's private tree starts."""
        return self.copies * self.shared_bytes + slot * _room(self.private)

    def result_at(self, place: int) -> int:
        """Where the result of a task starts."""
        return self.private_at(self.slots) + place * self.result_bytes

    @property
    def total(self) -> int:
        """All of it."""
        return self.result_at(self.results)


class Crew(Generic[Result]):
    """A one-device function, run by several processes."""

    def __init__(self, function: OneDevice[Result], *, workers: int, descent: Descent | None) -> None:
        self.function, self.workers, self.descent = function, workers, descent
        self.hired: _Hired | None = None
        self.structure: TreeSpec | None = None

    def __call__(self, tasks: Sequence[Task], examples: Examples, round_index: int) -> Outcome[Result]:
        """One result per task; tensors that lie in the shared memory are good until the next call."""
        if examples.y.is_cuda or not hasattr(os, "fork"):
            raise RuntimeError("workers compute on a CPU, in forked processes")
        self._prime(tasks[0], examples, round_index)
        if self.workers == 1 or len(tasks) == 1:
            with threads(1):
                return Outcome(rows=[self._one(task, examples, round_index) for task in tasks])
        try:
            found = self._hire(tasks, examples).run(tasks, round_index)
            assert self.structure is not None
            if isinstance(found, Stacked):
                return Outcome(stack=cast(Result, tree_unflatten(found.leaves, self.structure)))
            return Outcome(rows=[cast(Result, tree_unflatten(leaves, self.structure)) for leaves in found])
        except BaseException:
            self.close()  # whoever is in the middle of something is not waited for
            raise

    def _prime(self, task: Task, examples: Examples, round_index: int) -> None:
        """Take one step here, once: what it prepares is there for all workers, and what comes back has the structure of this."""
        if self.structure is None:
            with threads(1):
                self.structure = tree_flatten(self._one(task._replace(order=task.order[:1]), examples, round_index))[1]

    def _one(self, task: Task, examples: Examples, round_index: int) -> Result:
        with own_randomness(task.key, examples.y.device):
            return alone(self.function, task, examples, round_index, self.descent)

    def _hire(self, tasks: Sequence[Task], examples: Examples) -> "_Hired":
        copies = len({id(task.shared) for task in tasks})
        if self.hired is None or not self.hired.suit(tasks, copies, examples):
            self.close()
            plot = Plot(tasks[0].shared, tasks[0].private, copies, 2 * self.workers, len(tasks))
            try:
                self.hired = _Hired(self, plot, examples)
            except OSError as error:
                raise RuntimeError(f"{self.workers} workers could not be started ({error.strerror})") from error
        return self.hired

    def about(self) -> str:
        """What it is."""
        return f"{self.workers} processes, one device at a time each"

    def close(self) -> None:
        """Dismiss the workers."""
        if self.hired is not None:
            self.hired.dismiss()
            self.hired = None


class Stacked(NamedTuple):
    """The tensors of all tasks' results, each with a first axis (tasks, ...)."""

    leaves: list[Tensor]


class _Hired:
    """Workers that run, and the memory that they share."""

    def __init__(self, crew: Crew[Any], plot: Plot, examples: Examples) -> None:
        self.plot, self.examples, self.memory = plot, examples, mmap.mmap(-1, max(plot.total, 1))
        self.lines: list[Connection] = []
        self.pids: list[int] = []
        self.dismiss = weakref.finalize(self, _dismiss, os.getpid(), self.lines, self.pids)
        for _ in range(crew.workers):
            self._fork(crew)

    def _fork(self, crew: Crew[Any]) -> None:
        ours, theirs = Pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # a worker uses none of the threads that it leaves behind
            pid = os.fork()
        if pid == 0:
            try:
                for line in (*self.lines, ours):
                    line.close()  # else a worker outlives the parent, whose end it would hold open
                _serve(crew, self, theirs)
            finally:
                os._exit(0)
        theirs.close()
        self.lines.append(ours)
        self.pids.append(pid)

    def suit(self, tasks: Sequence[Task], copies: int, examples: Examples) -> bool:
        """Whether tasks like these fit into the memory, and the data are those that the workers know."""
        alike = _same_shapes(tasks[0].shared, self.plot.shared) and _same_shapes(tasks[0].private, self.plot.private)
        same_data = all(theirs is ours for theirs, ours in zip(examples, self.examples, strict=True))
        return alike and copies <= self.plot.copies and len(tasks) <= self.plot.results and same_data

    def run(self, tasks: Sequence[Task], round_index: int) -> Stacked | list[list[Tensor]]:
        """Every task's result, as its tensors; stacked where they lie, if they are alike."""
        shift = _Shift(self, tasks, round_index)
        for line in [*self.lines, *self.lines]:  # two for each, so that none waits for the next
            shift.hand_out(line)
        while shift.underway:
            for line in cast(list[Connection], wait({line for line, _ in shift.underway})):
                shift.take_back(line)
                shift.hand_out(line)
        first = shift.results[0]
        if isinstance(first, Left) and all(told == first for told in shift.results):
            return self._stacked(first, len(tasks))
        return [self._tensors(place, told) for place, told in enumerate(shift.results)]

    def hear(self, line: Connection) -> tuple[int, "Left | list[Tensor]"]:
        """A worker's answer: a slot that is free again, and what it left, or what there was no room for."""
        try:
            slot, told = line.recv()
        except (EOFError, OSError) as error:
            raise InputError(_KILLED) from error
        if isinstance(told, Exception):
            raise told
        return slot, told if isinstance(told, Left) else [torch.from_numpy(leaf) for leaf in told]

    def _stacked(self, left: "Left", tasks: int) -> Stacked:
        """Results that are alike lie at equal distances: each of their tensors is one of all tasks, without a copy."""
        start, leaves, apart = self.plot.result_at(0), [], self.plot.result_bytes
        for dtype, shape in left.leaves:
            count = math.prod(shape)
            if count:
                reach = (tasks - 1) * apart // dtype.itemsize + count
                whole = torch.frombuffer(self.memory, dtype=dtype, count=reach, offset=start)
                leaves.append(whole.as_strided((tasks, count), (apart // dtype.itemsize, 1)).reshape(tasks, *shape))
            else:
                leaves.append(torch.empty(tasks, *shape, dtype=dtype))
            start += _rounded(count * dtype.itemsize)
        return Stacked(leaves)

    def _tensors(self, place: int, told: "Left | list[Tensor]") -> list[Tensor]:
        if not isinstance(told, Left):
            return told
        start, found = self.plot.result_at(place), []
        for dtype, shape in told.leaves:
            found.append(_view(self.memory, start, dtype, shape).clone())
            start += _rounded(found[-1].nbytes)
        return found


class Left(NamedTuple):
    """What kind of tensors a worker has left in the shared memory, one after the other: dtype and shape of each."""

    leaves: list[tuple[torch.dtype, tuple[int, ...]]]


class _Shift:
    """The tasks of one call on their way through the workers, the longest first."""

    def __init__(self, hired: _Hired, tasks: Sequence[Task], round_index: int) -> None:
        self.hired, self.tasks, self.round_index = hired, tasks, round_index
        self.waiting = sorted(range(len(tasks)), key=lambda index: tasks[index].order.size)
        self.free = {line: [2 * number, 2 * number + 1] for number, line in enumerate(hired.lines)}
        self.underway: dict[tuple[Connection, int], int] = {}
        self.results: list[Left | list[Tensor]] = [[] for _ in tasks]
        shared = {id(task.shared): task.shared for task in tasks}
        self.places = {key: place for place, key in enumerate(shared)}
        for place, tree in enumerate(shared.values()):
            _write(hired.memory, hired.plot.shared_at(place), tree, hired.plot.shared)

    def hand_out(self, line: Connection) -> None:
        """Give a worker the next task, if there is one and it has a slot for it."""
        if not self.waiting or not self.free[line]:
            return
        index, slot = self.waiting.pop(), self.free[line].pop()
        task = self.tasks[index]
        _write(self.hired.memory, self.hired.plot.private_at(slot), task.private, self.hired.plot.private)
        try:
            line.send(Order(self.places[id(task.shared)], slot, index, task.order, task.key, self.round_index))
        except OSError as error:
            raise InputError(_KILLED) from error
        self.underway[line, slot] = index

    def take_back(self, line: Connection) -> None:
        """Keep what a worker has finished."""
        slot, result = self.hired.hear(line)
        self.results[self.underway.pop((line, slot))] = result
        self.free[line].append(slot)


def _serve(crew: Crew[Any], hired: _Hired, line: Any) -> None:
    """What a worker does until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    plot, memory = hired.plot, hired.memory
    while True:
        try:
            order: Order = line.recv()
        except (EOFError, OSError):
            return
        shared = _read(memory, plot.shared_at(order.shared), plot.shared)
        private = _read(memory, plot.private_at(order.slot), plot.private)
        try:
            result = crew._one(Task(shared, private, order.rows, order.key), hired.examples, order.round_index)
            line.send((order.slot, _leave(memory, plot, order.place, tree_flatten(result)[0])))
        except Exception as error:  # told to the parent, who raises it
            line.send((order.slot, _sendable(error)))


def _leave(memory: mmap.mmap, plot: Plot, place: int, leaves: Sequence[Tensor]) -> Left | list[Any]:
    """Put a result where it belongs; what each tensor is, or the tensors themselves where there is no room."""
    if sum(_rounded(leaf.nbytes) for leaf in leaves) > plot.result_bytes:
        return [leaf.numpy() for leaf in leaves]
    start = plot.result_at(place)
    for leaf in leaves:
        _view(memory, start, leaf.dtype, leaf.shape).copy_(leaf)
        start += _rounded(leaf.nbytes)
    return Left([(leaf.dtype, tuple(leaf.shape)) for leaf in leaves])


def _sendable(error: Exception) -> Exception:
    kind = type(error) if type(error).__module__ in ("builtins", "glocal.core.errors") else RuntimeError
    return kind(str(error))


def _dismiss(owner: int, lines: list[Connection], pids: list[int]) -> None:
    """Stop the workers at once, whatever they are doing; only the process that hired them may."""
    if os.getpid() != owner:
        return
    for line in lines:
        line.close()
    for pid in pids:
        with suppress(ProcessLookupError, ChildProcessError):  # gone already
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _write(memory: mmap.mmap, start: int, tree: Params, like: Params) -> None:
    """Put a tree where one like that is expected, name by name."""
    if not _same_shapes(tree, like):
        raise RuntimeError("devices have trees of different shapes")
    for name, tensor in like.items():
        _view(memory, start, tensor.dtype, tensor.shape).copy_(tree[name])
        start += _rounded(tensor.nbytes)


def _read(memory: mmap.mmap, start: int, like: Params) -> Params:
    tree: Params = {}
    for name, tensor in like.items():
        tree[name] = _view(memory, start, tensor.dtype, tensor.shape)
        start += _rounded(tensor.nbytes)
    return tree


def _view(memory: mmap.mmap, start: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """A tensor that lies in the shared memory."""
    count = math.prod(shape)
    if not count:
        return torch.empty(*shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).reshape(tuple(shape))


def _room(tree: Params) -> int:
    return sum(_rounded(tensor.nbytes) for tensor in tree.values())


def _rounded(size: int) -> int:
    return -(-size // _LINE) * _LINE


def _same_shapes(left: Params, right: Params) -> bool:
    return left.keys() == right.keys() and all(
        tensor.shape == right[name].shape and tensor.dtype == right[name].dtype for name, tensor in left.items()
    )
