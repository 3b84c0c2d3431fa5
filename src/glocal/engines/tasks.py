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
from glocal.core.sampling import Integers
from glocal.core.training import Descent, Work
from glocal.core.trees import Params

Result = TypeVar("Result")
OneDevice = Callable[[Params, Params, Work], Result]
_WORTH_THREADS = 2**23
_LARGE_ROW = 2**20  # bytes


class Task(NamedTuple):
    """One device's inputs: its trees, the rows it visits (steps, batch) with -1 for padding, and the key of its randomness."""

    shared: Params
    private: Params
    order: Integers
    key: int = 0


@dataclass(frozen=True)
class Outcome(Generic[Result]):
    """The results of several devices, as the engine has them: `rows` one by one, or `stack` with a first axis (devices, ...)."""

    rows: Sequence[Result] | None = None
    stack: Result | None = None

    def stacked(self) -> Result:
        """All results as one, each tensor with a first axis (devices, ...)."""
        if self.rows is None:
            return cast(Result, self.stack)
        return cast(Result, tree_map(lambda *parts: torch.stack(parts), *self.rows))


class Form(Protocol[Result]):
    """A way to run a one-device function over many."""

    def __call__(self, tasks: Sequence[Task], examples: Examples, round_index: int) -> Outcome[Result]:
        """One result per task, in the tasks' order."""

    def about(self) -> str:
        """What it is, in a few words."""

    def close(self) -> None:
        """Let go of whatever it holds."""


def alone(function: OneDevice[Result], task: Task, examples: Examples, round_index: int, descent: Descent | None = None) -> Result:
    """One task, by itself."""
    device = examples.y.device
    order = torch.from_numpy(task.order).to(device)
    key, number = torch.tensor(task.key, device=device), torch.tensor(round_index, device=device)
    work = Work(examples, order, key, number, full_steps(task.order[None]), descent)
    return function(task.shared, task.private, work)


def full_steps(orders: Integers) -> int:
    """How many of the first steps of orders (devices, steps, batch) hold a row of every device."""
    return int((orders >= 0).any(2).all(0).cumprod().sum())


def nbytes(task: Task) -> int:
    """How large a task's trees are."""
    return trees.nbytes(task.shared) + trees.nbytes(task.private)


def calm(bytes_at_once: int) -> int:
    """How many threads to use: small steps gain nothing from several, which wait for each other when a neighbour takes a core."""
    return 1 if bytes_at_once < _WORTH_THREADS else torch.get_num_threads()


@contextmanager
def threads(number: int) -> Iterator[None]:
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
def own_randomness(key: int, device: torch.device) -> Iterator[None]:
    """Layers that draw from torch's own generator start from the device's key; the caller's generators are left as they were."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(key)
        if device.type == "cuda":
            torch.cuda.default_generators[device.index or 0].manual_seed(key)
        yield


def sent(array: Integers, device: torch.device) -> Tensor:
    """Numbers on a computing device; a GPU gets them without being waited for."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def rows_of(stack: Params, number: int) -> list[Params]:
    """The trees of a stack: tensors of their own on a CPU; on a GPU small ones are views, see `unbound`."""
    if not all(tensor.is_cuda for tensor in stack.values()):
        return trees.unstack(stack, number)
    columns = {name: unbound(tensor) for name, tensor in stack.items()}
    return [{name: column[place] for name, column in columns.items()} for place in range(number)]


def unbound(stack: Tensor) -> Sequence[Tensor]:
    """The rows of a stack; small ones are views, for many small copies would take longer than a step.

    A view keeps its whole stack: about three times the rows' memory for cohorts of ten, if all devices take part often, and more
    for every state that is kept besides. Large rows are therefore copied.
    """
    rows = stack.unbind(0)
    return [row.clone() for row in rows] if rows and rows[0].nbytes >= _LARGE_ROW else rows
