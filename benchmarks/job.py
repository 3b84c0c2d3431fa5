"""What a tool is told and what it answers: a job file in, one line of JSON out. Needs numpy only."""

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

Answer = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One tool's task: so many counted rounds after `warm_up` others; fewer, but `fewest`, once `seconds` have gone by."""

    workload: Workload
    folder: str
    rounds: int
    warm_up: int = 1
    fewest: int = 3
    seconds: float = 120.0
    device: str = "cpu"
    options: dict[str, str | int] = field(default_factory=dict)

    @property
    def all_rounds(self) -> int:
        """Rounds that may be run, counted or not: on an accelerator they are timed one by one, then in a row."""
        return self.warm_up + self.rounds * (1 if self.device == "cpu" else 2)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Inputs (devices, examples, ...) and labels (devices, examples), mapped from disk: nobody pays for loading."""
        x, y = (np.load(Path(self.folder) / name, mmap_mode="c") for name in ("x.npy", "y.npy"))
        return x, y


def save(job: Job, path: Path) -> None:
    """Write a job where a tool can read it."""
    path.write_text(json.dumps(asdict(job)))


def load(path: str | Path) -> Job:
    """The job in a file."""
    told = json.loads(Path(path).read_text())
    workload = told.pop("workload")
    layers = tuple(tuple(layer) for layer in workload.pop("layers"))
    shape, shared = (tuple(workload.pop(name)) for name in ("shape", "shared"))
    return Job(Workload(**workload, layers=layers, shape=shape, shared=shared), **told)


def given() -> Job:
    """The job named on the command line."""
    return load(sys.argv[1])


def timed(rounds: Iterator[object], job: Job, settle: Callable[[], object] | None = None) -> Answer:
    """Seconds of each counted round; with `settle`, which waits for an accelerator, also the mean of rounds that do not wait."""
    wait = settle or (lambda: None)
    for _ in range(job.warm_up):
        next(rounds)
    wait()
    seconds: list[float] = []
    while len(seconds) < job.rounds and (len(seconds) < job.fewest or sum(seconds) < job.seconds):
        seconds.append(_clocked(rounds, 1, wait))
    in_a_row = _clocked(rounds, len(seconds), wait) / len(seconds) if settle else None
    return {
        "seconds_per_round": seconds,
        "in_a_row": in_a_row,
        "rounds": job.warm_up + len(seconds) * (2 if settle else 1),
    }


def _clocked(rounds: Iterator[object], count: int, wait: Callable[[], object]) -> float:
    started = perf_counter()
    for _ in range(count):
        next(rounds)
    wait()
    return perf_counter() - started


def answer(told: Answer) -> None:
    """Say how it went, as the last line of the output."""
    print(json.dumps({**told, "peak_memory_mb": round(own_peak() / 1e6)}), flush=True)


def own_peak() -> int:
    """The most bytes this process has held; ru_maxrss would on Linux also count the process that started this one."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
