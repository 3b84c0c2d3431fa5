"""What a federation remembers between rounds: the shared tree, and each device's private rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from glocal.trees import Params


@dataclass(frozen=True)
class PrivateRows:
    """Private state of many devices; a device that never took part has the initial row and costs nothing."""

    initial: Params
    trained: Mapping[int, Params]

    def of(self, device: int) -> Params:
        """One device's private tree."""
        return self.trained.get(device, self.initial)

    def put(self, devices: Sequence[int], rows: Sequence[Params]) -> "PrivateRows":
        """New rows for some devices; all others keep the very tensors they had."""
        return PrivateRows(self.initial, {**self.trained, **dict(zip(devices, rows, strict=True))})


class State(NamedTuple):
    """A federation between two rounds."""

    shared: Params
    private: PrivateRows
