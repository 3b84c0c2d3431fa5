"""What a federation remembers between rounds: the shared tree, and each device's private rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from glocal.core import trees
from glocal.core.trees import Params

_HOT_SHARE = 0.1  # of a GPU's memory; a row may keep those that were trained beside it


@dataclass(frozen=True)
class PrivateRows:
    """Private state of many devices, those that took part last at the end; one that never did has the initial row, at no cost.

    `room` is how many rows may stay on a GPU: those that took part longest ago wait in the host's memory.
    """

    initial: Params
    trained: Mapping[int, Params]
    room: int | None = None

    def of(self, device: int) -> Params:
        """One device's private tree, brought back if it waits elsewhere."""
        row = self.trained.get(device, self.initial)
        here = next((tensor.device for tensor in self.initial.values()), None)
        return row if here is None or all(tensor.device == here for tensor in row.values()) else trees.to(row, here)

    def put(self, devices: Sequence[int], rows: Sequence[Params]) -> "PrivateRows":
        """New rows for some devices; all others keep the very tensors they had."""
        new = dict(zip(devices, rows, strict=True))
        kept = {device: row for device, row in self.trained.items() if device not in new}
        return replace(self, trained=_cooled({**kept, **new}, self.room))

    def on(self, device: torch.device, room: int | None) -> "PrivateRows":
        """The same rows on a computing device, as many as there is room for."""
        trained = list(self.trained.items())
        cold = len(trained) - (len(trained) if room is None else min(room, len(trained)))
        placed = {number: row if place < cold else trees.to(row, device) for place, (number, row) in enumerate(trained)}
        return PrivateRows(trees.to(self.initial, device), placed, room)


class State(NamedTuple):
    """A federation between two rounds."""

    shared: Params
    private: PrivateRows

    def on(self, device: torch.device, room: int | None) -> "State":
        """The same state on a computing device."""
        return State(trees.to(self.shared, device), self.private.on(device, room))


def hot_rows(private: Params, federations: int = 1) -> int | None:
    """How many rows like this one may stay on the GPU that it is on, for each of several federations; None on a CPU."""
    size = trees.nbytes(private)
    if not size or not all(tensor.is_cuda for tensor in private.values()):
        return None
    memory = torch.cuda.get_device_properties(next(iter(private.values())).device).total_memory
    return max(1, int(_HOT_SHARE * memory / size / federations))


def _cooled(trained: dict[int, Params], room: int | None) -> dict[int, Params]:
    """Rows beyond what there is room for go to the host, those that took part longest ago first."""
    if room is None or len(trained) <= room:
        return trained
    host, cold = torch.device("cpu"), len(trained) - room
    return {device: trees.to(row, host) if place < cold else row for place, (device, row) in enumerate(trained.items())}
