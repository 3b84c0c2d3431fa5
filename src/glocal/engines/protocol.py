"""What engines run: one task per client as input, one result per client as output."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from glocal.core import trees
from glocal.core.data import Examples
from glocal.core.sampling import IntArray
from glocal.core.training import LocalTrainer, Work
from glocal.core.trees import Params

ResultT = TypeVar("ResultT")
ClientFunction = Callable[[Params, Params, Work], ResultT]
_MIN_BYTES_FOR_THREADS = 2**23
_LARGE_ROW_BYTES = 2**20


class ClientTask(NamedTuple):
    """One client's inputs: its trees, its order of examples and the key of its randomness.

    `order` (epochs, steps, batch) holds rows of the examples; -1 is padding.
    """

    shared: Params
    private: Params
    order: IntArray
    key: int = 0

    @property
    def num_steps(self) -> int:
        """The number of steps over all epochs."""
        epochs, steps, _ = self.order.shape
        return int(epochs * steps)


@dataclass(frozen=True)
class ClientResults(Generic[ResultT]):
    """The results of several clients, in the form in which the engine has them.

    Either `rows`, one by one, or `stack`, whose tensors have a first axis (clients, ...).
    """

    rows: Sequence[ResultT] | None = None
    stack: ResultT | None = None

    def stacked(self) -> ResultT:
        """All results as one, each tensor with a first axis (clients, ...)."""
        if self.rows is None:
            return cast(ResultT, self.stack)
        return cast(ResultT, tree_map(_stack_tensors, *self.rows))


class Engine(Protocol[ResultT]):
    """A way to run a function of one client over many clients."""

    def __call__(
        self, tasks: Sequence[ClientTask], examples: Examples, round_index: int
    ) -> ClientResults[ResultT]:
        """One result per task, in the order of the tasks."""

    def describe(self) -> str:
        """The engine in a few words, for the log."""

    def close(self) -> None:
        """Release processes, threads and memory."""


def run_one(
    function: ClientFunction[ResultT],
    task: ClientTask,
    examples: Examples,
    round_index: int,
    trainer: LocalTrainer | None = None,
) -> ResultT:
    """The result of a single task."""
    device = examples.device
    order = torch.from_numpy(task.order).to(device)
    key = torch.tensor(task.key, device=device)
    round_tensor = torch.tensor(round_index, device=device)
    full_steps = count_full_steps(task.order[None])
    work = Work.of(examples, order, key, round_tensor, full_steps=full_steps, trainer=trainer)
    return function(task.shared, task.private, work)


def count_full_steps(orders: IntArray) -> int:
    """The number of leading steps of every epoch in which every client has an example.

    `orders` is (clients, epochs, steps, batch).
    """
    has_example = (orders >= 0).any(3).all(0).all(0)
    return int(has_example.cumprod().sum())


def first_steps(task: ClientTask, steps: int) -> ClientTask:
    """The same task with about so many steps: at least one of every epoch, and as many of each.

    An algorithm may train one part in some epochs and another part in the others.
    """
    num_epochs = task.order.shape[0]
    return task._replace(order=task.order[:, : max(1, steps // num_epochs)])


def tree_bytes(task: ClientTask) -> int:
    """The size of a task's trees."""
    return trees.nbytes(task.shared) + trees.nbytes(task.private)


def choose_num_threads(bytes_at_once: int) -> int:
    """How many threads torch should use.

    Small steps gain nothing from several threads: these wait for each other as soon as another
    process takes a core.
    """
    return 1 if bytes_at_once < _MIN_BYTES_FOR_THREADS else torch.get_num_threads()


@contextmanager
def use_num_threads(number: int) -> Iterator[None]:
    """Let torch compute with this number of threads."""
    before = torch.get_num_threads()
    if number != before:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        if number != before:
            torch.set_num_threads(before)


@contextmanager
def seeded_rng(key: int, device: torch.device) -> Iterator[None]:
    """Seed torch's own generators with the client's key; the caller's states are restored.

    Only layers such as `nn.Dropout`, which draw from these generators, need this.
    """
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng([device] if on_gpu else []):
        torch.default_generator.manual_seed(key)
        if on_gpu:
            torch.cuda.default_generators[device.index or 0].manual_seed(key)
        yield


def to_device(array: IntArray, device: torch.device) -> Tensor:
    """An array as a tensor on a device; the host does not wait for the copy to a GPU."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def unstack_rows(stack: Params, number: int) -> list[Params]:
    """The trees of a stack: copies on a CPU; on a GPU small rows are views, see `unbind_rows`."""
    if not all(tensor.is_cuda for tensor in stack.values()):
        return trees.unstack(stack, number)
    columns = {name: unbind_rows(tensor) for name, tensor in stack.items()}
    rows: list[Params] = []
    for index in range(number):
        rows.append({name: column[index] for name, column in columns.items()})
    return rows


def unbind_rows(stack: Tensor) -> Sequence[Tensor]:
    """The rows of a stack. Small ones are views: many small copies would take longer than a step.

    A view keeps its whole stack in memory. With ten sampled clients a round this is about three
    times the memory of the rows if all clients take part often, and more for every state that is
    stored besides. Large rows are therefore copied.
    """
    rows = stack.unbind(0)
    if not rows or rows[0].nbytes < _LARGE_ROW_BYTES:
        return rows
    return [row.clone() for row in rows]


def _stack_tensors(*tensors: Tensor) -> Tensor:
    return torch.stack(tensors)
