"""How cost grows with the work: time and memory of LG-FedAvg against cohort, devices, width and seeds.

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
from benchmarks.job import Answer, Job
from benchmarks.processes import ToolError
from benchmarks.tools import Tool
from benchmarks.workloads import MLP, Workload, parameters, widened, write_arrays

COHORTS = (5, 10, 20, 40, 80)
DEVICES = (100, 1_000, 10_000)
WIDTHS = (0.25, 0.5, 1.0, 2.0, 4.0)
SEEDS = (1, 2, 5, 10)
DEVICE_ROUNDS = 20  # enough rounds for private parts to pile up, which is what costs memory


@dataclass(frozen=True)
class Point:
    """One measurement: a place on one of the axes."""

    axis: str
    value: float
    workload: Workload
    rounds: int
    seeds: int = 1


def points(rounds: int) -> Iterator[Point]:
    """Every place on every axis; the MNIST workload where nothing else is said."""
    for cohort in COHORTS:
        yield Point("clients_per_round", cohort, replace(MLP, clients_per_round=cohort), rounds)
    for clients in DEVICES:
        # the same 60,000 examples in ever smaller hands
        yield Point(
            "devices",
            clients,
            replace(MLP, clients=clients, examples=60_000 // clients),
            DEVICE_ROUNDS,
        )
    for width in WIDTHS:
        yield Point("width", width, widened(MLP, width), rounds)
    for seeds in SEEDS:
        yield Point("seeds", seeds, MLP, rounds, seeds)


def measure(point: Point, engine: str, device: str) -> Answer:
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
            told = Tool("glocal lg_fedavg", engine, "ours", options).ask(job)
        except ToolError as error:
            return {**row, "note": f"does not run: {error}"}
    kept = {key: told[key] for key in ("peak_memory_mb", "peak_device_memory_mb") if key in told}
    return {**row, "seconds": point.seeds * median(told["seconds_per_round"]), **kept}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        help=f"counted rounds; {DEVICE_ROUNDS} on the axis of devices",
    )
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--axes",
        nargs="+",
        choices=("clients_per_round", "devices", "width", "seeds"),
        default=["clients_per_round", "devices", "width", "seeds"],
    )
    parser.add_argument("--out", type=Path, default=Path("scaling.json"))
    asked = parser.parse_args()
    report: Answer = {
        "command": machine.command("benchmarks.scaling", sys.argv[1:]),
        "machine": machine.describe(asked.device),
    }
    report["rows"] = []
    for point in points(asked.rounds):
        if point.axis in asked.axes:
            report["rows"].append(measure(point, asked.engine, asked.device))
            print(json.dumps(report["rows"][-1]), flush=True)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
