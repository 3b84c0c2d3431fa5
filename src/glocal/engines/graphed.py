"""Whole rounds on a GPU, captured once as a CUDA graph and then replayed.

A round consists of hundreds of small kernels that take microseconds each. Launching them one by
one from Python takes longer than running them. A CUDA graph records the launches once;
a replay then costs the host a single call.

A graph records addresses, not values: it reads and writes the same memory at every replay. So
- inputs are copied into buffers that never move (`_CapturedRound.fill`), and results are copied out
  before the next replay overwrites them;
- everything that decides which kernels run is part of `GraphKey`: shapes, the number of steps, the
  address of the examples. What differs from round to round must be a tensor: the keys, the round
  index, and which shared tree a client starts from;
- nothing inside may wait for the GPU: no `.item()`, no copy from the host. Work that is done once,
  such as tracing and compiling a step, must be over before a capture starts. Therefore the first
  round of a shape runs without a graph, and the second one is captured.
"""

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
    """What must be equal for a captured round to be replayed."""

    clients: int
    shared: int
    epochs: int
    steps: int
    batch: int
    full_steps: int
    trees: tuple[tuple[str, torch.Size, torch.dtype], ...]
    store: tuple[tuple[int, torch.Size], ...]


class GraphedEngine(Generic[ResultT]):
    """Runs the function over all clients at once; a shape that repeats is captured and replayed."""

    def __init__(
        self,
        function: ClientFunction[ResultT],
        *,
        trainer: LocalTrainer | None,
        description: str = "",
    ) -> None:
        self.function = function
        self.trainer = trainer
        self.description = description
        self.graphs: dict[GraphKey, _CapturedRound | None] = {}
        self.pool: Any = None

    def __call__(
        self, tasks: Sequence[ClientTask], examples: Examples, round_index: int
    ) -> ClientResults[ResultT]:
        """One stack of results."""
        if not examples.device.type == "cuda":
            raise RuntimeError("graphs need an NVIDIA GPU")
        number = len(tasks)
        tasks, orders = _pad_tasks(tasks)
        key = _graph_key(tasks, orders, examples)
        graph = self.graphs.get(key)
        if graph is None:
            graph = _CapturedRound(self.function, key, tasks[0], examples, self.trainer)
        graph.fill(tasks, orders, round_index)
        result = self._result(graph, key)
        return ClientResults(stack=tree_map(lambda tensor: tensor[:number], result))

    def _result(self, graph: "_CapturedRound", key: GraphKey) -> Any:
        """The round's result: of a plain run the first time, of a replay from the second on."""
        if key not in self.graphs:
            while len(self.graphs) >= _MAX_GRAPHS:
                oldest = next(iter(self.graphs))
                del self.graphs[oldest]
            self.graphs[key] = None
            return graph.run()
        self.graphs[key] = graph
        # All graphs share one memory pool: they run one after the other, and results are copied
        # at once, so that each may use the memory in which the others hold intermediate values.
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        return graph.replay(self.pool)

    def describe(self) -> str:
        """The engine in a few words."""
        return f"CUDA graphs{self.description}"

    def close(self) -> None:
        """Release the graphs and their memory."""
        self.graphs.clear()


class _CapturedRound:
    """A round of one shape: input buffers that never move, and the graph that reads them."""

    def __init__(
        self,
        function: ClientFunction[Any],
        key: GraphKey,
        task: ClientTask,
        examples: Examples,
        trainer: LocalTrainer | None,
    ) -> None:
        device = examples.device
        self.function = function
        self.examples = examples
        self.trainer = trainer
        self.full_steps = key.full_steps
        self.shared = _zeros(task.shared, key.shared, device)
        self.private = _zeros(task.private, key.clients, device)
        self.shared_index = _int_buffer(device, key.clients)
        self.key = _int_buffer(device, key.clients)
        self.order = _int_buffer(device, key.clients, key.epochs, key.steps, key.batch)
        self.round_index = _int_buffer(device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.result: Any = None

    def fill(self, tasks: Sequence[ClientTask], orders: IntArray, round_index: int) -> None:
        """Copy a round's inputs into the buffers; all integers cross in one transfer."""
        shared_trees = {id(task.shared): task.shared for task in tasks}
        _stack_into(self.shared, list(shared_trees.values()))
        _stack_into(self.private, [task.private for task in tasks])
        numbers = _client_numbers(tasks, list(shared_trees), round_index)
        packed = np.concatenate([numbers.reshape(-1), orders.reshape(-1)])
        on_gpu = to_device(packed, self.order.device)
        shared_index, key, round_tensor = on_gpu[: numbers.size].view(3, -1)
        self.shared_index.copy_(shared_index)
        self.key.copy_(key)
        self.round_index.copy_(round_tensor[0])
        self.order.copy_(on_gpu[numbers.size :].view_as(self.order))

    def run(self) -> Any:
        """The round, launched kernel by kernel."""
        work = Work.of(
            self.examples,
            self.order,
            self.key,
            self.round_index,
            full_steps=self.full_steps,
            trainer=self.trainer,
        )
        # indexing, not Python: a replay must read today's `shared_index`
        shared = {name: tensor[self.shared_index] for name, tensor in self.shared.items()}
        return vmap_clients(self.function, shared, self.private, work)

    def replay(self, pool: Any) -> Any:
        """The captured round on the buffers' inputs; a copy of its result."""
        if self.graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self.result = self.run()
            self.graph = graph
        self.graph.replay()
        return tree_map(torch.clone, self.result)


def _pad_tasks(tasks: Sequence[ClientTask]) -> tuple[Sequence[ClientTask], IntArray]:
    """Tasks and orders (clients, epochs, steps, batch), padded to one of few shapes if unequal.

    A shape that repeats can be replayed. Missing clients and missing steps are filled with
    padding. The shape depends on these tasks alone, so that a run that was stopped and resumed
    goes through the same shapes.
    """
    if len({task.order.shape for task in tasks}) == 1:
        return tasks, np.stack([task.order for task in tasks])
    idle = tasks[-1]._replace(order=np.full_like(tasks[-1].order, -1))
    missing_tasks = _round_up(len(tasks)) - len(tasks)
    tasks = [*tasks, *[idle] * missing_tasks]
    orders = pad_and_stack([task.order for task in tasks])
    missing_steps = _round_up(orders.shape[2]) - orders.shape[2]
    padding = ((0, 0), (0, 0), (0, missing_steps), (0, 0))
    return tasks, np.pad(orders, padding, constant_values=-1)


def _round_up(number: int) -> int:
    """The next of 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, ...: at most a quarter more.

    >>> [_round_up(n) for n in (3, 9, 17, 60, 100)]
    [3, 10, 20, 64, 112]
    """
    unit: int = 2 ** max(0, number.bit_length() - 3)
    return -(-number // unit) * unit


def _graph_key(tasks: Sequence[ClientTask], orders: IntArray, examples: Examples) -> GraphKey:
    clients, epochs, steps, batch = orders.shape
    full_steps = count_full_steps(orders)
    if full_steps < steps:
        # among unequal clients this number changes from round to round: count no step as full
        full_steps = 0
    return GraphKey(
        clients=clients,
        shared=len({id(task.shared) for task in tasks}),
        epochs=epochs,
        steps=steps,
        batch=batch,
        full_steps=full_steps,
        trees=_tree_shapes(tasks[0].shared) + _tree_shapes(tasks[0].private),
        store=tuple((each.data_ptr(), each.shape) for each in examples if each is not None),
    )


def _tree_shapes(tree: Params) -> tuple[tuple[str, torch.Size, torch.dtype], ...]:
    return tuple((name, tensor.shape, tensor.dtype) for name, tensor in tree.items())


def _client_numbers(
    tasks: Sequence[ClientTask], shared_ids: Sequence[int], round_index: int
) -> IntArray:
    """Each client's shared tree and key, and the round (3, clients)."""
    places = {shared_id: place for place, shared_id in enumerate(shared_ids)}
    shared_index = [places[id(task.shared)] for task in tasks]
    keys = [task.key for task in tasks]
    return np.array([shared_index, keys, [round_index] * len(tasks)])


def _int_buffer(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64, device=device)


def _zeros(tree: Params, rows: int, device: torch.device) -> Params:
    """A buffer for this many trees, stacked."""
    buffers: Params = {}
    for name, tensor in tree.items():
        buffers[name] = torch.zeros(rows, *tensor.shape, dtype=tensor.dtype, device=device)
    return buffers


def _stack_into(buffers: Params, rows: Sequence[Params]) -> None:
    for name, buffer in buffers.items():
        torch.stack([row[name] for row in rows], out=buffer)
