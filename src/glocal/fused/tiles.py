"""How the kernels cut their work into programs, by shape and number of devices; chosen from register counts, not yet measured."""

from dataclasses import dataclass
from typing import Literal, Protocol

Kind = Literal["forward", "loss", "backward", "update", "conv_forward", "conv_slopes", "conv_back"]


@dataclass(frozen=True)
class Tile:
    """A program's share: rows of the batch (or pixels), outputs, inputs; how many warps; how many loads run ahead."""

    rows: int
    outputs: int
    inputs: int
    warps: int = 4
    stages: int = 1


@dataclass(frozen=True)
class Job:
    """One launch: what kind, for how many devices, and the sizes of the product behind it."""

    kind: Kind
    devices: int
    rows: int
    outputs: int
    inputs: int


class Choose(Protocol):
    """How to cut a job."""

    def __call__(self, job: Job) -> Tile:
        """Its tile."""


SMALL_BATCH = 16  # up to so many rows a layer's backward pass is one kernel whose sums stay in registers
_PROGRAMS = 264  # two for each of the GPU's 132 processors


def tile_for(job: Job) -> Tile:
    """A tile that fills the GPU and whose sums stay in registers."""
    rows = min(max(power_of_two(job.rows), 16), 64)
    match job.kind:
        case "backward":
            many = job.devices * -(-job.inputs // 64) >= _PROGRAMS
            return Tile(rows, 8, 64) if many else Tile(rows, 64, 16, warps=8)
        case "loss":
            return Tile(16, max(power_of_two(job.outputs), 16), 64, stages=2)
        case "update":
            return Tile(rows, 32, 32)
        case "forward":
            outputs = 32 if job.devices * -(-job.outputs // 32) >= _PROGRAMS else 16
            return Tile(rows, outputs, 64, stages=4) if rows == 16 else Tile(rows, outputs, 32, stages=2)
    return _tile_for_conv(job)


def _tile_for_conv(job: Job) -> Tile:
    """Sizes whose sums stay in registers; a tile as wide as the channels, so that each pixel is gathered once."""
    channels = min(max(power_of_two(job.outputs), 16), 64)
    if job.kind == "conv_slopes":
        taps = min(max(power_of_two(job.inputs), 16), 128 if channels <= 16 else 64)
        return Tile(32, channels, taps)
    if job.kind == "conv_back":
        return Tile(128, channels, 32 if job.inputs > 16 else 16, stages=2)
    return Tile(128, channels, 32, stages=2)


def splits_for(programs: int) -> int:
    """Into how many parts a sum is split that so many programs would share otherwise."""
    return -(-2 * _PROGRAMS // programs)


def power_of_two(number: int) -> int:
    """The least power of two that is not below the number."""
    return 1 << max(number - 1, 0).bit_length()
