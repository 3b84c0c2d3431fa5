"""All devices in one batched step, by `torch.vmap`."""

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
    """The function, called once for all tasks; the short ones end in padded steps."""

    function: ClientFunction[ResultT]

    def __call__(
        self, tasks: Sequence[ClientTask], examples: Examples, round_index: int
    ) -> ClientResults[ResultT]:
        """One stack of results."""
        device = examples.y.device
        orders = pad_and_stack([task.order for task in tasks])
        keys, number = (
            torch.tensor([task.key for task in tasks], device=device),
            torch.tensor(round_index, device=device),
        )
        work = Work(
            examples, torch.from_numpy(orders).to(device), keys, number, count_full_steps(orders)
        )
        trees_of_all = stack_rows([t.shared for t in tasks]), stack_rows([t.private for t in tasks])
        with use_num_threads(choose_num_threads(tree_bytes(tasks[0]) * len(tasks))):
            return ClientResults(stack=vmap_clients(self.function, *trees_of_all, work))

    def describe(self) -> str:
        """What it is."""
        return "all devices in one batched step"

    def close(self) -> None:
        """It holds nothing."""


def vmap_clients(
    function: ClientFunction[ResultT], shared: Params, private: Params, work: Work
) -> ResultT:
    """The function on trees (devices, ...) and work with orders (devices, steps, batch).

    A model that draws from torch's own generator is refused by vmap: its numbers would depend on who else is in the batch.
    """
    in_dims = (0, 0, Work(None, 0, 0, None, None, None))  # type: ignore[arg-type]
    with warnings.catch_warnings():
        # where torch has no batched rule it loops inside, and warns: our own loop is as fast and says so once
        warnings.filterwarnings("error", message="There is a performance drop")
        return torch.vmap(function, in_dims=in_dims, randomness="error")(shared, private, work)


def stack_rows(rows: Sequence[Params]) -> Params:
    """Rows as one tree; rows that are one and the same tree are not copied."""
    if all(row is rows[0] for row in rows):
        return {name: tensor.expand(len(rows), *tensor.shape) for name, tensor in rows[0].items()}
    return trees.stack(rows)
