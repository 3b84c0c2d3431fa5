"""How the kernels cut their work into programs, by shape and number of devices; chosen from register counts, not yet measured."""

from dataclasses import dataclass
from typing import Literal, Protocol

KernelKind = Literal["forward", "loss", "backward", "update"]


@dataclass(frozen=True)
class Tile:
    """A program's share: rows of the batch (or pixels), outputs, inputs; how many warps; how many loads run ahead."""

    rows: int
    outputs: int
    inputs: int
    warps: int = 4
    stages: int = 1


@dataclass(frozen=True)
class KernelLaunch:
    """One launch: what kind, for how many devices, and the sizes of the product behind it."""

    kind: KernelKind
    clients: int
    rows: int
    outputs: int
    inputs: int


class TileChooser(Protocol):
    """How to cut a job."""

    def __call__(self, job: KernelLaunch) -> Tile:
        """Its tile."""


SMALL_BATCH = (
    16  # up to so many rows a layer's backward pass is one kernel whose sums stay in registers
)
_PROGRAMS = 128  # about one for each of the GPU's processors


def default_tile(job: KernelLaunch) -> Tile:
    """A tile that fills the GPU and whose sums stay in registers: what `benchmarks/gpu_step.py --sweep` found on an H200."""
    rows = min(max(power_of_two(job.rows), 16), 64)
    match job.kind:
        case "backward":
            many = job.clients * -(-job.inputs // 64) >= _PROGRAMS
            return Tile(rows, 8, 64, stages=3) if many else Tile(rows, 16, 32, stages=3)
        case "loss":
            return Tile(16, max(power_of_two(job.outputs), 16), 64, stages=2)
        case "update":
            return Tile(rows, 64, 32)
        case "forward":
            many = job.clients * -(-job.outputs // 64) >= _PROGRAMS
            outputs = 32 if rows == 16 or many else 16
            return Tile(rows, outputs, 64, stages=4)


def power_of_two(number: int) -> int:
    """The least power of two that is not below the number."""
    return 1 << max(number - 1, 0).bit_length()
