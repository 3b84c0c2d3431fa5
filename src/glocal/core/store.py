"""The state of a federation between rounds: the shared tree, and each client's private tree."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from glocal.core import trees
from glocal.core.trees import Params

_GPU_SHARE = 0.1  # the fraction of a GPU's memory for rows that wait for their next round


@dataclass(frozen=True)
class PrivateStates:
    """The private states (rows) of many clients, the client that trained last at the end.

    A client that never trained has the initial row, at no cost. At most `max_gpu_rows` rows stay
    on a GPU: those of the clients that trained longest ago wait in the host's memory.
    """

    initial: Params
    trained: Mapping[int, Params]
    max_gpu_rows: int | None = None

    def of(self, client: int) -> Params:
        """The private tree of one client, moved back to the GPU if it waits on the host."""
        row = self.trained.get(client, self.initial)
        device = next((tensor.device for tensor in self.initial.values()), None)
        if device is None or all(tensor.device == device for tensor in row.values()):
            return row
        return trees.to(row, device)

    def put(self, clients: Sequence[int], rows: Sequence[Params]) -> "PrivateStates":
        """New rows for some clients; all others keep the very tensors they had."""
        new = dict(zip(clients, rows, strict=True))
        others = {client: row for client, row in self.trained.items() if client not in new}
        return replace(self, trained=_offload({**others, **new}, self.max_gpu_rows))

    def to(self, device: torch.device, max_gpu_rows: int | None) -> "PrivateStates":
        """The same rows on another device, at most `max_gpu_rows` of them."""
        num_waiting = 0 if max_gpu_rows is None else max(0, len(self.trained) - max_gpu_rows)
        placed = {}
        for place, (client, row) in enumerate(self.trained.items()):
            placed[client] = row if place < num_waiting else trees.to(row, device)
        return PrivateStates(trees.to(self.initial, device), placed, max_gpu_rows)


class State(NamedTuple):
    """A federation between two rounds."""

    shared: Params
    private: PrivateStates

    def to(self, device: torch.device, max_gpu_rows: int | None) -> "State":
        """The same state on another device."""
        return State(trees.to(self.shared, device), self.private.to(device, max_gpu_rows))


def fitting_gpu_rows(private: Params, federations: int = 1) -> int | None:
    """The number of such rows that may stay on their GPU, per federation; None on a CPU."""
    size = trees.nbytes(private)
    if not size or not all(tensor.is_cuda for tensor in private.values()):
        return None
    device = next(iter(private.values())).device
    memory = torch.cuda.get_device_properties(device).total_memory
    return max(1, int(_GPU_SHARE * memory / size / federations))


def _offload(trained: dict[int, Params], max_gpu_rows: int | None) -> dict[int, Params]:
    """Move rows beyond the maximum to the host, those of the longest-waiting clients first."""
    if max_gpu_rows is None or len(trained) <= max_gpu_rows:
        return trained
    host, num_waiting = torch.device("cpu"), len(trained) - max_gpu_rows
    placed = {}
    for place, (client, row) in enumerate(trained.items()):
        placed[client] = trees.to(row, host) if place < num_waiting else row
    return placed
