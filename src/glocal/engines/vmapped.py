"""All clients in one batched step, by `torch.vmap`."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

import torch

from glocal.core import trees
from glocal.core.data import Examples
from glocal.core.sampling import pad_and_stack
from glocal.core.training import Work
from glocal.core.trees import Params
from glocal.engines.attention import batchable_attention
from glocal.engines.protocol import (
    ClientFunction,
    ClientResults,
    ClientTask,
    ResultT,
    choose_num_threads,
    count_full_steps,
    tree_bytes,
    use_num_threads,
)


@dataclass(frozen=True)
class VmappedEngine(Generic[ResultT]):
    """Calls the function once for all tasks; the shorter ones end in padded steps."""

    function: ClientFunction[ResultT]

    def __call__(
        self, tasks: Sequence[ClientTask], examples: Examples, round_index: int
    ) -> ClientResults[ResultT]:
        """One stack of results."""
        work = _stacked_work(tasks, examples, round_index)
        shared = stack_rows([task.shared for task in tasks])
        private = stack_rows([task.private for task in tasks])
        with use_num_threads(choose_num_threads(tree_bytes(tasks[0]) * len(tasks))):
            return ClientResults(stack=vmap_clients(self.function, shared, private, work))

    def describe(self) -> str:
        """The engine in a few words."""
        return "vmapped, all clients in one batch"

    def close(self) -> None:
        """Nothing to release."""


def vmap_clients(
    function: ClientFunction[ResultT], shared: Params, private: Params, work: Work
) -> ResultT:
    """The function on trees (clients, ...) and on work with orders (clients, epochs, steps, batch).

    A model that draws from torch's own generator is refused by vmap (`randomness="error"`): its
    numbers would depend on which clients share the batch.
    """
    # of `work`, orders, keys and pad rows have an axis of clients; None: the same for all clients
    work_dims = Work(None, 0, 0, 0, 0, None, None, None)  # type: ignore[arg-type]
    batched = torch.vmap(function, in_dims=(0, 0, work_dims), randomness="error")
    with warnings.catch_warnings(), batchable_attention():
        # Where torch has no batching rule it loops over the clients inside, and warns. An error
        # instead lets the executor fall back to its own loop: as fast, and reported once.
        warnings.filterwarnings("error", message="There is a performance drop")
        return batched(shared, private, work)


def stack_rows(rows: Sequence[Params]) -> Params:
    """Rows as one tree (rows, ...); rows that are one and the same tree are not copied."""
    first = rows[0]
    if all(row is first for row in rows):
        return {name: tensor.expand(len(rows), *tensor.shape) for name, tensor in first.items()}
    return trees.stack(rows)


def _stacked_work(tasks: Sequence[ClientTask], examples: Examples, round_index: int) -> Work:
    """The work of all tasks, their orders padded to the longest one."""
    device = examples.device
    orders = pad_and_stack([task.order for task in tasks])
    keys = torch.tensor([task.key for task in tasks], device=device)
    round_tensor = torch.tensor(round_index, device=device)
    order_tensor = torch.from_numpy(orders).to(device)
    full_steps = count_full_steps(orders)
    return Work.of(examples, order_tensor, keys, round_tensor, full_steps=full_steps)
