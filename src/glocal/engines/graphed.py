"""Whole rounds on a GPU, captured once as a CUDA graph and replayed: hundreds of small kernels without a word from the host."""

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_map

from glocal.core.data import Examples
from glocal.core.sampling import IntArray, pad_and_stack
from glocal.core.training import LocalTrainer, Work
from glocal.core.trees import Params
from glocal.engines.protocol import (
    ClientFunction,
    ClientResults,
    ClientTask,
    ResultT,
    count_full_steps,
    to_device,
)
from glocal.engines.vmapped import vmap_clients

_MAX_GRAPHS = 24


class GraphKey(NamedTuple):
    """What must be alike for a captured round to be replayed."""

    clients: int
    shared: int
    steps: int
    batch: int
    full_steps: int
    trees: tuple[tuple[str, torch.Size, torch.dtype], ...]
    store: tuple[tuple[int, torch.Size], ...]


class GraphedEngine(Generic[ResultT]):
    """A function over many devices; a shape that comes back is captured, then replayed."""

    def __init__(
        self,
        function: ClientFunction[ResultT],
        *,
        trainer: LocalTrainer | None,
        description: str = "",
    ) -> None:
        self.function, self.trainer, self.description = function, trainer, description
        self.graphs: dict[GraphKey, _CapturedRound | None] = {}
        self.pool: Any = None

    def __call__(
        self, tasks: Sequence[ClientTask], examples: Examples, round_index: int
    ) -> ClientResults[ResultT]:
        """One stack of results."""
        if not examples.y.is_cuda:
            raise RuntimeError("graphs need an NVIDIA GPU")
        number = len(tasks)
        tasks, orders = _pad_tasks(tasks)
        shape = _graph_key(tasks, orders, examples)
        graph = self.graphs.get(shape)
        if graph is None:
            graph = _CapturedRound(self.function, shape, tasks, examples, self.trainer)
        graph.fill(tasks, orders, round_index)
        result = self._result(graph, shape)
        return ClientResults(stack=tree_map(lambda tensor: tensor[:number], result))

    def _result(self, graph: "_CapturedRound", shape: GraphKey) -> Any:
        """The first time as it comes, which prepares whatever is prepared once; from the second on captured."""
        if shape not in self.graphs:
            while len(self.graphs) >= _MAX_GRAPHS:
                self.graphs.pop(next(iter(self.graphs)))
            self.graphs[shape] = None
            return graph.run()
        self.graphs[shape] = graph
        # one after the other, and results are copied at once: what one graph needs on its way, all others can use
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        return graph.replay(self.pool)

    def describe(self) -> str:
        """What it is."""
        return f"all devices at once, whole rounds replayed as a CUDA graph{self.description}"

    def close(self) -> None:
        """Forget the graphs and the memory they hold."""
        self.graphs.clear()


class _CapturedRound:
    """A round of one shape: inputs that lie still, and the graph that reads them."""

    def __init__(
        self,
        function: ClientFunction[Any],
        shape: GraphKey,
        tasks: Sequence[ClientTask],
        examples: Examples,
        trainer: LocalTrainer | None,
    ) -> None:
        device = examples.y.device
        self.function, self.examples, self.trainer = function, examples, trainer
        self.shared = _zeros(tasks[0].shared, shape.shared, device)
        self.private = _zeros(tasks[0].private, shape.clients, device)
        self.shared_index = torch.zeros(shape.clients, dtype=torch.int64, device=device)
        self.order = torch.zeros(
            shape.clients, shape.steps, shape.batch, dtype=torch.int64, device=device
        )
        self.key = torch.zeros(shape.clients, dtype=torch.int64, device=device)
        self.round_index = torch.zeros((), dtype=torch.int64, device=device)
        self.full_steps = shape.full_steps
        self.graph: torch.cuda.CUDAGraph | None = None
        self.result: Any = None

    def fill(self, tasks: Sequence[ClientTask], orders: IntArray, round_index: int) -> None:
        """Put a round's inputs where the graph reads them."""
        trees_of = {id(task.shared): task.shared for task in tasks}
        places = {key: place for place, key in enumerate(trees_of)}
        _stack_into(self.shared, list(trees_of.values()))
        _stack_into(self.private, [task.private for task in tasks])
        numbers = [
            [places[id(task.shared)] for task in tasks],
            [task.key for task in tasks],
            [round_index] * len(tasks),
        ]
        there = to_device(
            np.concatenate([np.array(numbers).reshape(-1), orders.reshape(-1)]), self.order.device
        )
        shared_index, key, number = there[: 3 * len(tasks)].view(3, -1)
        self.shared_index.copy_(shared_index)
        self.key.copy_(key)
        self.round_index.copy_(number[0])
        self.order.copy_(there[3 * len(tasks) :].view_as(self.order))

    def run(self) -> Any:
        """The round, launched kernel by kernel."""
        work = Work(
            self.examples, self.order, self.key, self.round_index, self.full_steps, self.trainer
        )
        own = {name: tensor[self.shared_index] for name, tensor in self.shared.items()}
        return vmap_clients(self.function, own, self.private, work)

    def replay(self, pool: Any) -> Any:
        """The round as it was captured, on today's inputs; the results are copies, for the next replay writes over them."""
        if self.graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self.result = self.run()
            self.graph = graph
        self.graph.replay()
        return tree_map(torch.clone, self.result)


def _pad_tasks(tasks: Sequence[ClientTask]) -> tuple[Sequence[ClientTask], IntArray]:
    """Tasks and orders (devices, steps, batch); unequal ones are brought to one of few shapes, so that it comes back.

    Devices to make up the number and steps to make up the length are padding. A function of the tasks alone: a round has the same
    shape in a run that was stopped and went on.
    """
    if len({task.order.shape for task in tasks}) == 1:
        return tasks, np.stack([task.order for task in tasks])
    idle = tasks[-1]._replace(order=np.full_like(tasks[-1].order, -1))
    tasks = [*tasks, *[idle] * (_round_up(len(tasks)) - len(tasks))]
    orders = pad_and_stack([task.order for task in tasks])
    steps = _round_up(orders.shape[1])
    return tasks, np.pad(orders, ((0, 0), (0, steps - orders.shape[1]), (0, 0)), constant_values=-1)


def _round_up(number: int) -> int:
    """The next of 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, ...: at most a fifth more.

    >>> [_round_up(n) for n in (3, 9, 17, 60, 100)]
    [3, 10, 20, 64, 112]
    """
    unit: int = 2 ** max(0, number.bit_length() - 3)
    return -(-number // unit) * unit


def _graph_key(tasks: Sequence[ClientTask], orders: IntArray, examples: Examples) -> GraphKey:
    described = tuple((name, t.shape, t.dtype) for tree in tasks[0][:2] for name, t in tree.items())
    # unequal devices: how many steps are full differs from round to round, so none is taken to be
    full = count_full_steps(orders)
    full = full if full == orders.shape[1] else 0
    copies = len({id(task.shared) for task in tasks})
    _, steps, batch = orders.shape
    store = tuple((tensor.data_ptr(), tensor.shape) for tensor in examples if tensor is not None)
    return GraphKey(len(tasks), copies, steps, batch, full, described, store)


def _zeros(tree: Params, rows: int, device: torch.device) -> Params:
    return {
        name: torch.zeros(rows, *tensor.shape, dtype=tensor.dtype, device=device)
        for name, tensor in tree.items()
    }


def _stack_into(static: Params, rows: Sequence[Params]) -> None:
    for name, tensor in static.items():
        torch.stack([row[name] for row in rows], out=tensor)
