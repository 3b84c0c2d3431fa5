"""The tools to measure, in every setting, as a command and its options."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from benchmarks import environments, processes
from benchmarks.job import Job, Measurement
from benchmarks.workloads import Workload

CORES = os.cpu_count() or 1


@dataclass(frozen=True)
class Tool:
    """One row of the table: a module of this benchmark, its options, and a peer's environment."""

    name: str
    setting: str
    module: str
    options: dict[str, str | int] = field(default_factory=dict)
    peer: str | None = None

    @property
    def measure(self) -> str:
        """What is timed: "training" or "local test"."""
        return "local test" if self.options.get("measure") == "local test" else "training"

    def run(self, job: Job) -> Measurement:
        """Run the job in a fresh process."""
        job = replace(job, options=self.options)
        if not self.peer:
            return processes.run(
                processes.module(self.module), job, environment=processes.our_environment()
            )
        command = [environments.python_of(self.peer), "-m", f"benchmarks.{self.module}"]
        return processes.run(command, job, environment=environments.peer_environment(self.peer))


REFERENCE = Tool("plain loop", "1 thread", "plain", {"threads": 1})
PEERS = (
    Tool("Flower", "Ray, 1 CPU per client", "peers.flower", {"cpus": 1, "threads": 1}, "flower"),
    Tool("pfl", "1 process", "peers.pfl_research", {"processes": 1}, "pfl"),
    Tool("pfl", f"{CORES} processes", "peers.pfl_research", {"processes": CORES}, "pfl"),
    Tool("FedJAX", "jit", "peers.fedjax_peer", {}, "fedjax"),
)


def all_tools(workload: Workload, *, device: str, seeds: int) -> Iterator[Tool]:
    """All rows for one workload, in the order of the table."""
    yield REFERENCE
    if device == "cpu" and CORES > 1:
        yield Tool("plain loop", f"{CORES} threads", "plain", {"threads": CORES})
    yield from _glocal(workload, device, seeds)
    yield from PEERS
    if workload.name == "A":
        yield from _local_tests(device)


def _glocal(workload: Workload, device: str, seeds: int) -> Iterator[Tool]:
    algorithms = ("fedavg",) if workload.name == "C" else ("fedavg", "lg_fedavg")
    for algorithm in algorithms:
        for setting, engine in ENGINES[device].items():
            if device == "cuda" and setting != "auto" and algorithm != "fedavg":
                continue
            options: dict[str, str | int] = {**engine, "algorithm": algorithm}
            yield Tool(f"glocal {algorithm}", setting, "ours", {**options, "measure": "training"})
            if seeds > 1 and setting == "auto" and workload.name != "C":
                many = f"{setting}, {seeds} seeds, each"
                yield Tool(
                    f"glocal {algorithm}",
                    many,
                    "ours",
                    {**options, "measure": "seeds", "seeds": seeds},
                )


def _local_tests(device: str) -> Iterator[Tool]:
    yield Tool("plain loop", "1 thread", "plain", {"threads": 1, "measure": "local test"})
    yield Tool(
        "glocal",
        "auto",
        "ours",
        {**ENGINES[device]["auto"], "algorithm": "lg_fedavg", "measure": "local test"},
    )


# the engines of each device: with their default settings, and without fused steps
ENGINES: dict[str, dict[str, dict[str, str | int]]] = {
    "cpu": {
        "auto": {"engine": "auto"},
        "workers, general steps": {"engine": "workers", "fused": 0},
        "vmapped": {"engine": "vmapped"},
        "looped": {"engine": "looped"},
    },
    "cuda": {
        "auto": {"engine": "auto"},
        "graphed, general steps": {"engine": "graphed", "fused": 0},
    },
}
