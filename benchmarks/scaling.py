"""Time and memory of LG-FedAvg by clients per round, number of clients, width and seeds.

python -m benchmarks.scaling --out docs/results/scaling.json
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks import machine
from benchmarks.job import Job, Measurement
from benchmarks.processes import ToolError
from benchmarks.tools import Tool
from benchmarks.workloads import MLP, Workload, parameters, widened, write_arrays

CLIENTS_PER_ROUND = (5, 10, 20, 40, 80)
CLIENTS = (100, 1_000, 10_000)
WIDTHS = (0.25, 0.5, 1.0, 2.0, 4.0)
SEEDS = (1, 2, 5, 10)
CLIENTS_AXIS_ROUNDS = 20  # private parts must accumulate: they are what costs memory


@dataclass(frozen=True)
class Point:
    """One measurement: a point on one of the axes."""

    axis: str
    value: float
    workload: Workload
    rounds: int
    seeds: int = 1


def points(rounds: int) -> Iterator[Point]:
    """Every point of every axis; the MNIST workload except for what the axis changes."""
    for sampled in CLIENTS_PER_ROUND:
        yield Point("clients_per_round", sampled, replace(MLP, clients_per_round=sampled), rounds)
    for clients in CLIENTS:
        # the same 60,000 examples, divided among the clients
        yield Point(
            "clients",
            clients,
            replace(MLP, clients=clients, examples=60_000 // clients),
            CLIENTS_AXIS_ROUNDS,
        )
    for width in WIDTHS:
        yield Point("width", width, widened(MLP, width), rounds)
    for seeds in SEEDS:
        yield Point("seeds", seeds, MLP, rounds, seeds)


def measure(point: Point, engine: str, device: str) -> Measurement:
    """Seconds per round (all seeds together) and peak memory, in a fresh process."""
    kind = "seeds" if point.axis == "seeds" else "training"
    options = {"engine": engine, "algorithm": "lg_fedavg", "measure": kind, "seeds": point.seeds}
    row = {
        "axis": point.axis,
        "value": point.value,
        "engine": engine,
        "parameters": parameters(point.workload),
    }
    with tempfile.TemporaryDirectory() as folder:
        write_arrays(point.workload, Path(folder))
        job = Job(point.workload, folder, point.rounds, seconds=600.0, device=device)
        try:
            result = Tool("glocal lg_fedavg", engine, "ours", options).run(job)
        except ToolError as error:
            return {**row, "note": f"does not run: {error}"}
    memory = {
        key: result[key] for key in ("peak_memory_mb", "peak_device_memory_mb") if key in result
    }
    return {**row, "seconds": point.seeds * median(result["seconds_per_round"]), **memory}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        help=f"timed rounds; {CLIENTS_AXIS_ROUNDS} on the axis of clients",
    )
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--axes",
        nargs="+",
        choices=("clients_per_round", "clients", "width", "seeds"),
        default=["clients_per_round", "clients", "width", "seeds"],
    )
    parser.add_argument("--out", type=Path, default=Path("scaling.json"))
    options = parser.parse_args()
    report: Measurement = {
        "command": machine.command("benchmarks.scaling", sys.argv[1:]),
        "machine": machine.describe(options.device),
    }
    report["rows"] = []
    for point in points(options.rounds):
        if point.axis in options.axes:
            report["rows"].append(measure(point, options.engine, options.device))
            print(json.dumps(report["rows"][-1]), flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
