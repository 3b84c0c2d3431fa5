"""What a federation remembers between rounds: the shared tree, and each device's private rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from glocal.core import trees
from glocal.core.trees import Params

_GPU_SHARE = 0.1  # of a GPU's memory; a row may keep those that were trained beside it


@dataclass(frozen=True)
class PrivateStates:
    """Private state of many devices, those that took part last at the end; one that never did has the initial row, at no cost.

    `max_gpu_rows` is how many rows may stay on a GPU: those that took part longest ago wait in the host's memory.
    """

    initial: Params
    trained: Mapping[int, Params]
    max_gpu_rows: int | None = None

    def of(self, client: int) -> Params:
        """One device's private tree, brought back if it waits elsewhere."""
        row = self.trained.get(client, self.initial)
        here = next((tensor.device for tensor in self.initial.values()), None)
        return (
            row
            if here is None or all(tensor.device == here for tensor in row.values())
            else trees.to(row, here)
        )

    def put(self, clients: Sequence[int], rows: Sequence[Params]) -> "PrivateStates":
        """New rows for some devices; all others keep the very tensors they had."""
        new = dict(zip(clients, rows, strict=True))
        kept = {client: row for client, row in self.trained.items() if client not in new}
        return replace(self, trained=_offload({**kept, **new}, self.max_gpu_rows))

    def to(self, device: torch.device, max_gpu_rows: int | None) -> "PrivateStates":
        """The same rows on a computing device, as many as there is room for."""
        trained = list(self.trained.items())
        cold = len(trained) - (
            len(trained) if max_gpu_rows is None else min(max_gpu_rows, len(trained))
        )
        placed = {
            number: row if place < cold else trees.to(row, device)
            for place, (number, row) in enumerate(trained)
        }
        return PrivateStates(trees.to(self.initial, device), placed, max_gpu_rows)


class State(NamedTuple):
    """A federation between two rounds."""

    shared: Params
    private: PrivateStates

    def to(self, device: torch.device, max_gpu_rows: int | None) -> "State":
        """The same state on a computing device."""
        return State(trees.to(self.shared, device), self.private.to(device, max_gpu_rows))


def fitting_gpu_rows(private: Params, federations: int = 1) -> int | None:
    """How many rows like this one may stay on the GPU that it is on, for each of several federations; None on a CPU."""
    size = trees.nbytes(private)
    if not size or not all(tensor.is_cuda for tensor in private.values()):
        return None
    memory = torch.cuda.get_device_properties(next(iter(private.values())).device).total_memory
    return max(1, int(_GPU_SHARE * memory / size / federations))


def _offload(trained: dict[int, Params], max_gpu_rows: int | None) -> dict[int, Params]:
    """Rows beyond what there is room for go to the host, those that took part longest ago first."""
    if max_gpu_rows is None or len(trained) <= max_gpu_rows:
        return trained
    host, cold = torch.device("cpu"), len(trained) - max_gpu_rows
    return {
        device: trees.to(row, host) if place < cold else row
        for place, (device, row) in enumerate(trained.items())
    }
