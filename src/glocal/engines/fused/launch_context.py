"""What all kernel launches of a local training share, and its trained tensors."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from glocal.engines.fused.tiles import KernelKind, KernelLaunch, Tile, TileChooser


class LaunchContext(NamedTuple):
    """What all launches share.

    rows and labels (clients, steps, batch) of every step; the label is -1 in padding. counts
    (clients, steps) are the real rows, lrs (clients,) the learning rates. `precision` is Triton's
    word for the precision of matrix products.
    """

    rows: Tensor
    labels: Tensor
    counts: Tensor
    lrs: Tensor
    momentum: float
    weight_decay: float
    precision: str
    choose_tile: TileChooser

    @property
    def clients(self) -> int:
        """The number of clients."""
        return self.rows.shape[0]

    @property
    def steps(self) -> int:
        """The number of steps."""
        return self.rows.shape[1]

    @property
    def batch(self) -> int:
        """Rows in a step, padding included."""
        return self.rows.shape[2]

    @property
    def images(self) -> int:
        """Rows in a step of all clients together."""
        return self.clients * self.batch

    def tile(self, kind: KernelKind, rows: int, outputs: int, inputs: int) -> Tile:
        """The tile of a launch."""
        return self.choose_tile(KernelLaunch(kind, self.clients, rows, outputs, inputs))

    def update_args(self, step: int) -> dict[str, Any]:
        """The arguments of a kernel that updates weights."""
        return {
            "counts": self.counts,
            "lrs": self.lrs,
            "step": step,
            "steps": self.steps,
            "momentum": self.momentum,
            "weight_decay": self.weight_decay,
        }

    def empty(self, *shape: int) -> Tensor:
        """A tensor (clients, batch, *shape) on the GPU."""
        return torch.empty(self.clients, self.batch, *shape, device=self.lrs.device)


@dataclass
class TrainedTensor:
    """One trained tensor of all clients (clients, ...).

    `start` is the caller's and is never written, `current` holds the result of each step. Without
    momentum there is no velocity, without a proximal term no anchor.
    """

    start: Tensor
    current: Tensor
    velocity: Tensor | None
    anchor: Tensor | None
    strength: float

    def source(self, step: int) -> Tensor:
        """Where a step reads the weights: the first step from `start`, so that none is copied."""
        return self.start if step == 0 else self.current

    def update_args(self, step: int, name: str, prefix: str = "") -> dict[str, Any]:
        """The arguments of a kernel that updates it; the kernel calls it by this name."""
        source = self.source(step)
        return {
            name: source,
            f"{name}_stride": source.stride(0),
            f"{name}_out": self.current,
            f"{prefix}velocity": self.velocity,
            f"{prefix}anchor": self.anchor,
            f"{prefix}anchor_stride": 0 if self.anchor is None else self.anchor.stride(0),
            f"{prefix}strength": self.strength,
        }
