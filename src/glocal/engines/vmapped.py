"""All devices in one batched step, by `torch.vmap`."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

import torch

from glocal.core import trees
from glocal.core.data import Examples
from glocal.core.sampling import padded
from glocal.core.training import Work
from glocal.core.trees import Params
from glocal.engines.tasks import OneDevice, Outcome, Result, Task, calm, full_steps, nbytes, threads


@dataclass(frozen=True)
class Vmapped(Generic[Result]):
    """The function, called once for all tasks; the short ones end in padded steps."""

    function: OneDevice[Result]

    def __call__(self, tasks: Sequence[Task], examples: Examples, round_index: int) -> Outcome[Result]:
        """One stack of results."""
        device = examples.y.device
        orders = padded([task.order for task in tasks])
        keys, number = torch.tensor([task.key for task in tasks], device=device), torch.tensor(round_index, device=device)
        work = Work(examples, torch.from_numpy(orders).to(device), keys, number, full_steps(orders))
        trees_of_all = stacked([t.shared for t in tasks]), stacked([t.private for t in tasks])
        with threads(calm(nbytes(tasks[0]) * len(tasks))):
            return Outcome(stack=batched(self.function, *trees_of_all, work))

    def about(self) -> str:
        """What it is."""
        return "all devices in one batched step"

    def close(self) -> None:
        """It holds nothing."""


def batched(function: OneDevice[Result], shared: Params, private: Params, work: Work) -> Result:
    """The function on trees (devices, ...) and work with orders (devices, steps, batch).

    A model that draws from torch's own generator is refused by vmap: its numbers would depend on who else is in the batch.
    """
    in_dims = (0, 0, Work(None, 0, 0, None, None, None))  # type: ignore[arg-type]
    with warnings.catch_warnings():
        # where torch has no batched rule it loops inside, and warns: our own loop is as fast and says so once
        warnings.filterwarnings("error", message="There is a performance drop")
        return torch.vmap(function, in_dims=in_dims, randomness="error")(shared, private, work)


def stacked(rows: Sequence[Params]) -> Params:
    """Rows as one tree; rows that are one and the same tree are not copied."""
    if all(row is rows[0] for row in rows):
        return {name: tensor.expand(len(rows), *tensor.shape) for name, tensor in rows[0].items()}
    return trees.stack(rows)
