"""The protocol of a tool: a job file in, one line of JSON out. Needs numpy only."""

import json
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.workloads import Workload

Measurement = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One tool's task: `rounds` timed rounds after `warm_up` others.

    After `seconds` it stops early, but not before `min_rounds`.
    """

    workload: Workload
    folder: str
    rounds: int
    warm_up: int = 1
    min_rounds: int = 3
    seconds: float = 120.0
    device: str = "cpu"
    options: dict[str, str | int] = field(default_factory=dict)

    @property
    def all_rounds(self) -> int:
        """The largest number of rounds: on a GPU they are timed one by one, then in a row."""
        repeats = 1 if self.device == "cpu" else 2
        return self.warm_up + self.rounds * repeats

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Inputs (clients, examples, ...) and labels (clients, examples), mapped from disk."""
        folder = Path(self.folder)
        return np.load(folder / "x.npy", mmap_mode="c"), np.load(folder / "y.npy", mmap_mode="c")


def save(job: Job, path: Path) -> None:
    """Write a job where a tool can read it."""
    path.write_text(json.dumps(asdict(job)))


def load(path: str | Path) -> Job:
    """The job in a file."""
    values = json.loads(Path(path).read_text())
    workload = values.pop("workload")
    layers = tuple(tuple(layer) for layer in workload.pop("layers"))
    shape, shared = (tuple(workload.pop(name)) for name in ("shape", "shared"))
    return Job(Workload(**workload, layers=layers, shape=shape, shared=shared), **values)


def job_from_command_line() -> Job:
    """The job named on the command line."""
    return load(sys.argv[1])


def time_rounds(
    rounds: Iterator[object], job: Job, synchronize: Callable[[], object] | None = None
) -> Measurement:
    """Seconds of each timed round.

    With `synchronize`, which waits for a GPU, also the mean of rounds without waiting.
    """
    wait = synchronize or (lambda: None)
    for _ in range(job.warm_up):
        next(rounds)
    wait()
    seconds: list[float] = []
    while len(seconds) < job.rounds and (
        len(seconds) < job.min_rounds or sum(seconds) < job.seconds
    ):
        seconds.append(_seconds_of(rounds, 1, wait))
    in_a_row = _seconds_of(rounds, len(seconds), wait) / len(seconds) if synchronize else None
    return {
        "seconds_per_round": seconds,
        "in_a_row": in_a_row,
        "rounds": job.warm_up + len(seconds) * (2 if synchronize else 1),
    }


def _seconds_of(rounds: Iterator[object], count: int, wait: Callable[[], object]) -> float:
    started = perf_counter()
    for _ in range(count):
        next(rounds)
    wait()
    return perf_counter() - started


def print_measurement(result: Measurement) -> None:
    """Print the result as the last line of the output."""
    print(json.dumps({**result, "peak_memory_mb": round(own_peak_memory() / 1e6)}), flush=True)


def own_peak_memory() -> int:
    """The peak memory of this process in bytes.

    On Linux, ru_maxrss would also count the process that started this one.
    """
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
