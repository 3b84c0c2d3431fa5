"""Forked processes that run tasks until their parent ends them or is gone.

A forked worker has data and model as the parent had them: nothing is copied and nothing is pickled.
Three traps come with this:
- A child inherits all open files, among them the parent's ends of the pipes to the workers that
  were started before. It closes them: otherwise those workers would never notice that the parent
  is gone, because somebody still holds the other end, and would live for ever.
- Of the parent's threads only the one that forks exists in the child. A worker thus computes with
  one thread and uses no thread pool of the parent.
- The child must not return from `_fork` into the parent's code. It leaves by `os._exit`, without
  exit handlers, finalizers, or a second flush of what the parent had buffered.
"""

import os
import signal
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from glocal.core.data import Examples
from glocal.core.errors import InputError
from glocal.core.sampling import IntArray
from glocal.engines.protocol import ClientTask
from glocal.engines.shared_memory import LeafSpec, TaskMemory

RunTask = Callable[[ClientTask, Examples, int], Any]
_KILLED_MESSAGE = "engine: a worker was killed (is the memory full?); use fewer with run.workers"


class WorkItem(NamedTuple):
    """A task as it is sent to a worker: where its trees lie, where its result goes, and the rest.

    `shared`, `slot` and `result` are numbers of places in the shared memory.
    """

    shared: int
    slot: int
    result: int
    order: IntArray
    key: int
    round_index: int


class Reply(NamedTuple):
    """A worker's answer to the task in a slot: `specs`, `leaves` or an error.

    `specs` describes tensors in the shared memory. `leaves` are the tensors themselves, as arrays,
    where they are too large for it.
    """

    slot: int
    specs: list[LeafSpec] | None = None
    leaves: list[Any] | None = None
    error: Exception | None = None


class WorkerProcesses:
    """Running workers, and the memory that they share with this process.

    `run_task` is not stored: it belongs to the pool that owns this object, and the cycle would
    delay the end of the workers when the pool is dropped.
    """

    def __init__(
        self, run_task: RunTask, *, number: int, memory: TaskMemory, examples: Examples
    ) -> None:
        self.memory = memory
        self.examples = examples
        self.connections: list[Connection] = []
        self.pids: list[int] = []
        self.kill = weakref.finalize(self, _kill_workers, os.getpid(), self.connections, self.pids)
        for _ in range(number):
            self._fork(run_task)

    def send(self, connection: Connection, item: WorkItem) -> None:
        """Send a worker its next task."""
        try:
            connection.send(item)
        except OSError as error:
            raise InputError(_KILLED_MESSAGE) from error

    def receive(self, connection: Connection) -> Reply:
        """A worker's next answer; an error in the task is raised here."""
        try:
            reply: Reply = connection.recv()
        except (EOFError, OSError) as error:
            raise InputError(_KILLED_MESSAGE) from error
        if reply.error is not None:
            raise reply.error
        return reply

    def _fork(self, run_task: RunTask) -> None:
        ours, theirs = Pipe()
        with warnings.catch_warnings():
            # Python warns of a fork while there are threads; a worker uses none of them
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            try:
                for connection in (*self.connections, ours):
                    connection.close()
                _worker_loop(run_task, theirs, self.memory, self.examples)
            finally:
                os._exit(0)
        theirs.close()
        self.connections.append(ours)
        self.pids.append(pid)


def _worker_loop(
    run_task: RunTask, connection: Any, memory: TaskMemory, examples: Examples
) -> None:
    """Run tasks until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    while True:
        try:
            item: WorkItem = connection.recv()
        except (EOFError, OSError):
            return
        connection.send(_reply(run_task, item, memory, examples))


def _reply(run_task: RunTask, item: WorkItem, memory: TaskMemory, examples: Examples) -> Reply:
    """Run one task; an error becomes part of the answer, and the parent raises it."""
    shared, private = memory.read_shared(item.shared), memory.read_private(item.slot)
    task = ClientTask(shared, private, item.order, item.key)
    try:
        leaves = tree_leaves(run_task(task, examples, item.round_index))
        if memory.has_room_for(leaves):
            return Reply(item.slot, specs=memory.write_result(item.result, leaves))
        return Reply(item.slot, leaves=[leaf.numpy() for leaf in leaves])
    except Exception as error:
        return Reply(item.slot, error=_picklable(error))


def _picklable(error: Exception) -> Exception:
    """An error that the parent can unpickle: others may need arguments of their own."""
    is_plain = type(error).__module__ in ("builtins", "glocal.core.errors")
    kind = type(error) if is_plain else RuntimeError
    return kind(str(error))


def _kill_workers(owner: int, connections: list[Connection], pids: list[int]) -> None:
    """Stop the workers at once; only the process that started them may do so."""
    if os.getpid() != owner:
        return
    for connection in connections:
        connection.close()
    for pid in pids:
        with suppress(ProcessLookupError, ChildProcessError):  # it has ended already
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
