"""The state of a federation between rounds: what the server holds, and a tree for each client."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from glocal.core import trees
from glocal.core.trees import Params

_GPU_SHARE = 0.1  # the fraction of a GPU's memory for trees that wait for their next round


@dataclass(frozen=True)
class PerClient:
    """A tree for each of many clients, the one that was stored last at the end.

    A client without a stored tree has the initial one, at no cost. At most `max_gpu_rows` trees
    stay on a GPU: those that were stored longest ago wait in the host's memory.
    """

    initial: Params = field(default_factory=dict)
    stored: Mapping[int, Params] = field(default_factory=dict)
    max_gpu_rows: int | None = None

    def of(self, client: int) -> Params:
        """The tree of one client, moved back to the GPU if it waits on the host."""
        row = self.stored.get(client, self.initial)
        device = next((tensor.device for tensor in self.initial.values()), None)
        if device is None or all(tensor.device == device for tensor in row.values()):
            return row
        return trees.to(row, device)

    def put(self, clients: Sequence[int], rows: Sequence[Params]) -> "PerClient":
        """New trees for some clients; all others keep the very tensors they had."""
        new = dict(zip(clients, rows, strict=True))
        others = {client: row for client, row in self.stored.items() if client not in new}
        return replace(self, stored=_offload({**others, **new}, self.max_gpu_rows))

    def only(self, clients: set[int]) -> "PerClient":
        """The same without the trees of all other clients."""
        stored = {client: row for client, row in self.stored.items() if client in clients}
        return replace(self, stored=stored)

    def to(self, device: torch.device, max_gpu_rows: int | None) -> "PerClient":
        """The same trees on another device, at most `max_gpu_rows` of them."""
        num_waiting = 0 if max_gpu_rows is None else max(0, len(self.stored) - max_gpu_rows)
        placed = {}
        for place, (client, row) in enumerate(self.stored.items()):
            placed[client] = row if place < num_waiting else trees.to(row, device)
        return PerClient(trees.to(self.initial, device), placed, max_gpu_rows)


class GroupState(NamedTuple):
    """The state of one group of clients: models are made of `shared` and of `private` trees."""

    shared: Params
    private: PerClient
    server: Params = {}  # noqa: RUF012  (never changed)
    profiles: PerClient = PerClient()

    def alone(self) -> "TrainingState":
        """The state of a federation of this group."""
        return TrainingState(self.shared, self.server, (self.private,), (self.profiles,))


class TrainingState(NamedTuple):
    """A federation between two rounds.

    `server` is the server's own state, `private` and `profiles` have an entry per group of clients
    with one model.
    """

    shared: Params
    server: Params
    private: tuple[PerClient, ...]
    profiles: tuple[PerClient, ...]

    def group(self, place: int = 0) -> GroupState:
        """One group's state."""
        return GroupState(self.shared, self.private[place], self.server, self.profiles[place])

    def to(self, device: torch.device, like: "TrainingState") -> "TrainingState":
        """The same state on another device, with as many trees on a GPU as `like` allows."""
        moved: list[tuple[PerClient, ...]] = []
        for own, limits in ((self.private, like.private), (self.profiles, like.profiles)):
            pairs = zip(own, limits, strict=True)
            moved.append(tuple(each.to(device, limit.max_gpu_rows) for each, limit in pairs))
        shared, server = trees.to(self.shared, device), trees.to(self.server, device)
        return TrainingState(shared, server, *moved)


def fitting_gpu_rows(row: Params, federations: int = 1) -> int | None:
    """The number of such trees that may stay on their GPU, per federation; None on a CPU."""
    size = trees.nbytes(row)
    if not size or not all(tensor.is_cuda for tensor in row.values()):
        return None
    device = next(iter(row.values())).device
    memory = torch.cuda.get_device_properties(device).total_memory
    return max(1, int(_GPU_SHARE * memory / size / federations))


def _offload(stored: dict[int, Params], max_gpu_rows: int | None) -> dict[int, Params]:
    """Move trees beyond the maximum to the host, those of the longest-waiting clients first."""
    if max_gpu_rows is None or len(stored) <= max_gpu_rows:
        return stored
    host, num_waiting = torch.device("cpu"), len(stored) - max_gpu_rows
    placed = {}
    for place, (client, row) in enumerate(stored.items()):
        placed[client] = trees.to(row, host) if place < num_waiting else row
    return placed
