"""What engines run: one task per device in, one result per device out."""

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
_LARGE_ROW_BYTES = 2**20  # bytes


class ClientTask(NamedTuple):
    """One device's inputs: its trees, the rows it visits (steps, batch) with -1 for padding, and the key of its randomness."""

    shared: Params
    private: Params
    order: IntArray
    key: int = 0


@dataclass(frozen=True)
class ClientResults(Generic[ResultT]):
    """The results of several devices, as the engine has them: `rows` one by one, or `stack` with a first axis (devices, ...)."""

    rows: Sequence[ResultT] | None = None
    stack: ResultT | None = None

    def stacked(self) -> ResultT:
        """All results as one, each tensor with a first axis (devices, ...)."""
        if self.rows is None:
            return cast(ResultT, self.stack)
        return cast(ResultT, tree_map(lambda *parts: torch.stack(parts), *self.rows))


class Engine(Protocol[ResultT]):
    """A way to run a one-device function over many."""

    def __call__(
        self, tasks: Sequence[ClientTask], examples: Examples, round_index: int
    ) -> ClientResults[ResultT]:
        """One result per task, in the tasks' order."""

    def describe(self) -> str:
        """What it is, in a few words."""

    def close(self) -> None:
        """Let go of whatever it holds."""


def run_one(
    function: ClientFunction[ResultT],
    task: ClientTask,
    examples: Examples,
    round_index: int,
    trainer: LocalTrainer | None = None,
) -> ResultT:
    """One task, by itself."""
    device = examples.y.device
    order = torch.from_numpy(task.order).to(device)
    key, number = torch.tensor(task.key, device=device), torch.tensor(round_index, device=device)
    work = Work(examples, order, key, number, count_full_steps(task.order[None]), trainer)
    return function(task.shared, task.private, work)


def count_full_steps(orders: IntArray) -> int:
    """How many of the first steps of orders (devices, steps, batch) hold a row of every device."""
    return int((orders >= 0).any(2).all(0).cumprod().sum())


def tree_bytes(task: ClientTask) -> int:
    """How large a task's trees are."""
    return trees.nbytes(task.shared) + trees.nbytes(task.private)


def choose_num_threads(bytes_at_once: int) -> int:
    """How many threads to use: small steps gain nothing from several, which wait for each other when a neighbour takes a core."""
    return 1 if bytes_at_once < _MIN_BYTES_FOR_THREADS else torch.get_num_threads()


@contextmanager
def use_num_threads(number: int) -> Iterator[None]:
    """Compute with that many threads."""
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
    """Layers that draw from torch's own generator start from the device's key; the caller's generators are left as they were."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(key)
        if device.type == "cuda":
            torch.cuda.default_generators[device.index or 0].manual_seed(key)
        yield


def to_device(array: IntArray, device: torch.device) -> Tensor:
    """Numbers on a computing device; a GPU gets them without being waited for."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def unstack_rows(stack: Params, number: int) -> list[Params]:
    """The trees of a stack: tensors of their own on a CPU; on a GPU small ones are views, see `unbind_rows`."""
    if not all(tensor.is_cuda for tensor in stack.values()):
        return trees.unstack(stack, number)
    columns = {name: unbind_rows(tensor) for name, tensor in stack.items()}
    return [{name: column[place] for name, column in columns.items()} for place in range(number)]


def unbind_rows(stack: Tensor) -> Sequence[Tensor]:
    """The rows of a stack; small ones are views, for many small copies would take longer than a step.

    A view keeps its whole stack: about three times the rows' memory for cohorts of ten, if all devices take part often, and more
    for every state that is kept besides. Large rows are therefore copied.
    """
    rows = stack.unbind(0)
    return [row.clone() for row in rows] if rows and rows[0].nbytes >= _LARGE_ROW_BYTES else rows
