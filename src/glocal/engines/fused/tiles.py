"""How the kernels divide their work into programs, by shape and number of clients."""

from dataclasses import dataclass
from typing import Literal, Protocol

KernelKind = Literal["forward", "loss", "backward", "update"]


@dataclass(frozen=True)
class Tile:
    """The work of one program: rows of the batch (or pixels), outputs, inputs.

    `warps` run it; `stages` loads are in flight at a time.
    """

    rows: int
    outputs: int
    inputs: int
    warps: int = 4
    stages: int = 1

    @property
    def kernel_args(self) -> dict[str, int]:
        """A kernel's arguments for it, except the rows."""
        return {
            "BN": self.outputs,
            "BK": self.inputs,
            "STAGES": self.stages,
            "num_warps": self.warps,
        }


@dataclass(frozen=True)
class KernelLaunch:
    """One launch: its kind, the number of clients, and the sizes of its matrix product."""

    kind: KernelKind
    clients: int
    rows: int
    outputs: int
    inputs: int


class TileChooser(Protocol):
    """Chooses the tile of a launch."""

    def __call__(self, job: KernelLaunch) -> Tile:
        """Its tile."""


SMALL_BATCH = 16  # up to this number of rows a layer's backward pass is one kernel
_PROGRAMS = 128  # about one for each multiprocessor of the GPU


def default_tile(job: KernelLaunch) -> Tile:
    """A tile that fills the GPU and whose sums stay in registers.

    The numbers are the best of `benchmarks/gpu_step.py --sweep` on an H200.
    """
    rows = min(max(power_of_two(job.rows), 16), 64)
    match job.kind:
        case "backward":
            fills_gpu = job.clients * ceil_div(job.inputs, 64) >= _PROGRAMS
            return Tile(rows, 8, 64, stages=3) if fills_gpu else Tile(rows, 16, 32, stages=3)
        case "loss":
            return Tile(16, max(power_of_two(job.outputs), 16), 64, stages=2)
        case "update":
            return Tile(rows, 64, 32)
        case "forward":
            fills_gpu = job.clients * ceil_div(job.outputs, 64) >= _PROGRAMS
            outputs = 32 if rows == 16 or fills_gpu else 16
            return Tile(rows, outputs, 64, stages=4)


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least the number."""
    return 1 << max(number - 1, 0).bit_length()


def ceil_div(number: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-number // divisor)
