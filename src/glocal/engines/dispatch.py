"""Dispatch the tasks of one call to worker processes, the longest task first."""

from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import cast

from glocal.engines.protocol import ClientTask
from glocal.engines.worker_processes import Reply, WorkerProcesses, WorkItem

SLOTS_PER_WORKER = 2


class Dispatcher:
    """Tasks that wait, tasks that are under way, and answers.

    Each worker has two slots: while it runs a task, the next one lies ready, so that it never waits
    for the parent. Long tasks go first: at the end, no worker is left alone with a long one.
    """

    def __init__(
        self, workers: WorkerProcesses, tasks: Sequence[ClientTask], round_index: int
    ) -> None:
        self.workers = workers
        self.tasks = tasks
        self.round_index = round_index
        self.shared_places = _write_shared_trees(workers, tasks)
        # the queue is popped from its end
        self.queue = sorted(range(len(tasks)), key=lambda index: tasks[index].order.size)
        self.free_slots: dict[Connection, list[int]] = {}
        for number, connection in enumerate(workers.connections):
            first = SLOTS_PER_WORKER * number
            self.free_slots[connection] = list(range(first, first + SLOTS_PER_WORKER))
        self.under_way: dict[tuple[Connection, int], int] = {}
        self.replies: dict[int, Reply] = {}

    def run(self) -> list[Reply]:
        """Every task's answer, in the order of the tasks."""
        for _ in range(SLOTS_PER_WORKER):
            for connection in self.workers.connections:
                self._send_next(connection)
        while self.under_way:
            busy = {connection for connection, _ in self.under_way}
            for connection in cast(list[Connection], wait(busy)):
                self._collect(connection)
                self._send_next(connection)
        return [self.replies[index] for index in range(len(self.tasks))]

    def _send_next(self, connection: Connection) -> None:
        """Send a worker the next task, if there is one and the worker has a free slot."""
        if not self.queue or not self.free_slots[connection]:
            return
        index, slot = self.queue.pop(), self.free_slots[connection].pop()
        task = self.tasks[index]
        self.workers.memory.write_private(slot, task.private)
        shared = self.shared_places[id(task.shared)]
        item = WorkItem(shared, slot, index, task.order, task.key, self.round_index)
        self.workers.send(connection, item)
        self.under_way[connection, slot] = index

    def _collect(self, connection: Connection) -> None:
        """Take a worker's answer; its slot is free again."""
        reply = self.workers.receive(connection)
        index = self.under_way.pop((connection, reply.slot))
        self.replies[index] = reply
        self.free_slots[connection].append(reply.slot)


def _write_shared_trees(workers: WorkerProcesses, tasks: Sequence[ClientTask]) -> dict[int, int]:
    """Write each distinct shared tree once; the place of each, by the tree's id."""
    shared_trees = {id(task.shared): task.shared for task in tasks}
    places: dict[int, int] = {}
    for place, (tree_id, tree) in enumerate(shared_trees.items()):
        workers.memory.write_shared(place, tree)
        places[tree_id] = place
    return places
