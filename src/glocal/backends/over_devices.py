"""Run a function written for one device over many: one after the other, or batched."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch.utils._pytree import tree_map

from glocal import trees
from glocal.errors import GlocalWarning, InputError, brief, nearest
from glocal.federation import Examples
from glocal.sampling import Integers, padded
from glocal.training import Work
from glocal.trees import Params

Result = TypeVar("Result")
OneDevice = Callable[[Params, Params, Work], Result]

ENGINES = ("auto", "looped", "vmapped")
_CHUNK_BYTES = 2**30
_WORTH_THREADS = 2**23
_COPIES_WHILE_TRAINING = 6  # weights, slopes, momentum, and what a step makes new of each


class Task(NamedTuple):
    """One device's inputs: its trees, the rows it visits (steps, batch) with -1 for padding, and the key of its randomness."""

    shared: Params
    private: Params
    order: Integers
    key: int = 0


def check_engine(engine: str, chunk: int | None) -> None:
    """Refuse an engine that does not exist, or a chunk of no devices."""
    if engine not in ENGINES:
        raise InputError(f"engine: '{engine}' is unknown; {nearest(engine, ENGINES)}")
    if chunk is not None and chunk < 1:
        raise InputError(f"engine: chunk is {chunk}; it must be at least 1")


class OverDevices(Generic[Result]):
    """A one-device function, ready to run over many devices; results come back stacked (devices, ...)."""

    def __init__(self, function: OneDevice[Result], *, engine: str = "auto", chunk: int | None = None) -> None:
        check_engine(engine, chunk)
        self.function, self.chunk = function, chunk
        self.form = looped if engine == "looped" else vmapped

    def __call__(self, tasks: Sequence[Task], examples: Examples, round_index: int = 0) -> Result:
        """Run all tasks, a chunk of devices at a time; devices of like length share a chunk."""
        by_length = sorted(range(len(tasks)), key=lambda index: len(tasks[index].order))
        chunks = _chunks(by_length, [len(task.order) for task in tasks], self.chunk or _affordable(tasks[0]))
        if len(chunks) == 1:
            return self._run(tasks, examples, round_index)
        results = [self._run([tasks[index] for index in chunk], examples, round_index) for chunk in chunks]
        back = torch.from_numpy(np.argsort(by_length)).to(examples.y.device)
        return cast(Result, tree_map(lambda *parts: torch.cat(parts)[back], *results))

    def _run(self, tasks: Sequence[Task], examples: Examples, round_index: int) -> Result:
        with _calm_threads(_nbytes(tasks[0]) * (1 if self.form is looped else len(tasks))):
            return self._tried(tasks, examples, round_index)

    def _tried(self, tasks: Sequence[Task], examples: Examples, round_index: int) -> Result:
        """Batched if the model can be, with one visible line if not."""
        if self.form is looped:
            return looped(self.function, tasks, examples, round_index)
        try:
            return vmapped(self.function, tasks, examples, round_index)
        except torch.OutOfMemoryError as error:
            raise InputError(f"engine: {len(tasks)} devices at once do not fit into memory; give a smaller chunk") from error
        except (RuntimeError, ValueError, UserWarning) as error:
            result = looped(self.function, tasks, examples, round_index)  # a mistake in the model itself is raised here
            self.form = looped
            warnings.warn(
                f"engine: this model cannot be batched over devices ({brief(error)}); running them one by one",
                GlocalWarning,
                stacklevel=3,
            )
            return result


def looped(function: OneDevice[Result], tasks: Sequence[Task], examples: Examples, round_index: int) -> Result:
    """One device after the other: slow, simple, and what every other form must agree with."""
    results = [_alone(function, task, examples, round_index) for task in tasks]
    return cast(Result, tree_map(lambda *parts: torch.stack(parts), *results))


def _alone(function: OneDevice[Result], task: Task, examples: Examples, round_index: int) -> Result:
    device = examples.y.device
    order = torch.from_numpy(task.order).to(device)
    key, number = torch.tensor(task.key, device=device), torch.tensor(round_index, device=device)
    work = Work(examples, order, key, number, _full_steps(task.order[None]))
    with _own_randomness(task.key, device):
        return function(task.shared, task.private, work)


def vmapped(function: OneDevice[Result], tasks: Sequence[Task], examples: Examples, round_index: int) -> Result:
    """All devices in one batched step; the short ones end in padded steps.

    A model that draws from torch's own generator is refused by vmap: its numbers would depend on who else is in the batch.
    """
    device = examples.y.device
    orders = padded([task.order for task in tasks])
    keys, number = torch.tensor([task.key for task in tasks], device=device), torch.tensor(round_index, device=device)
    work = Work(examples, torch.from_numpy(orders).to(device), keys, number, _full_steps(orders))
    batched = torch.vmap(function, in_dims=(0, 0, Work(None, 0, 0, None, None)), randomness="error")  # type: ignore[arg-type]
    with warnings.catch_warnings():
        # where torch has no batched rule it loops inside, and warns: our own loop is as fast and says so once
        warnings.filterwarnings("error", message="There is a performance drop")
        return batched(_stacked([t.shared for t in tasks]), _stacked([t.private for t in tasks]), work)


def _full_steps(orders: Integers) -> int:
    """How many of the first steps of orders (devices, steps, batch) hold a row of every device."""
    return int((orders >= 0).any(2).all(0).cumprod().sum())


def _stacked(rows: list[Params]) -> Params:
    """Rows as one tree; rows that are one and the same tree are not copied."""
    if all(row is rows[0] for row in rows):
        return {name: tensor.expand(len(rows), *tensor.shape) for name, tensor in rows[0].items()}
    return trees.stack(rows)


def _chunks(order: list[int], lengths: list[int], size: int) -> list[list[int]]:
    """Devices in ascending length, at most `size` together, and none beside one more than twice as long: it would wait for it."""
    chunks: list[list[int]] = []
    for index in order:
        if not chunks or len(chunks[-1]) == size or lengths[index] > 2 * lengths[chunks[-1][0]]:
            chunks.append([])
        chunks[-1].append(index)
    return chunks


def _affordable(task: Task) -> int:
    """How many devices fit into the memory that a chunk may take."""
    return max(1, _CHUNK_BYTES // max(_COPIES_WHILE_TRAINING * _nbytes(task), 1))


def _nbytes(task: Task) -> int:
    return trees.nbytes(task.shared) + trees.nbytes(task.private)


@contextmanager
def _calm_threads(stacked_bytes: int) -> Iterator[None]:
    """Small steps gain nothing from threads, and wait for each other for seconds when a neighbour takes a core."""
    threads = torch.get_num_threads()
    calm = stacked_bytes < _WORTH_THREADS and threads > 1
    if calm:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if calm:
            torch.set_num_threads(threads)


@contextmanager
def _own_randomness(key: int, device: torch.device) -> Iterator[None]:
    """Layers that draw from torch's own generator start from the device's key; the caller's generators are left as they were."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(key)
        if device.type == "cuda":
            torch.cuda.default_generators[device.index or 0].manual_seed(key)
        yield
