"""Two checkouts of glocal, measured in turn: is the second slower than the first?

git worktree add /tmp/before COMMIT
python -m benchmarks.between /tmp/before --workloads A B C --repeats 9 --out between.json

Each repeat runs a job on either checkout in a fresh process, in alternating order, so that a busy
machine slows both. A ratio above 1 is slower. The spread of the first one, between the medians of
its odd and its even repeats, says what this machine can tell apart.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks import machine
from benchmarks.workloads import WORKLOADS, write_arrays

ROOT = Path(__file__).resolve().parents[1]
# runs in a checkout, by names that all versions have
SAVE_JOB = """
import sys, json
from pathlib import Path
from benchmarks.job import Job, save
from benchmarks.workloads import WORKLOADS

name, folder, rounds, options, path = sys.argv[1:]
save(Job(WORKLOADS[name], folder, int(rounds), options=json.loads(options)), Path(path))
"""
SETTINGS = {
    "FedAvg, auto": {"algorithm": "fedavg", "engine": "auto"},
    "LG-FedAvg, auto": {"algorithm": "lg_fedavg", "engine": "auto"},
    "FedAvg, without fused steps": {"algorithm": "fedavg", "engine": "workers", "fused": 0},
    "FedAvg, vmapped": {"algorithm": "fedavg", "engine": "vmapped"},
}
LIMIT = 900.0  # seconds of one job


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="the folder of the other checkout")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds of each repeat")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for name in options.workloads:
        with tempfile.TemporaryDirectory() as folder:
            write_arrays(WORKLOADS[name], Path(folder))
            for setting in options.settings:
                rows.append(compare(options, name, setting, folder))
                print(line(rows[-1]), flush=True)
    report = {
        "command": machine.command("benchmarks.between", sys.argv[1:]),
        "machine": machine.describe("cpu"),
        "rows": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


def compare(
    options: argparse.Namespace, name: str, setting: str, folder: str
) -> dict[str, str | float]:
    """One workload in one setting, both checkouts in turn."""
    checkouts = {"before": options.before.resolve(), "after": ROOT}
    seconds: dict[str, list[float]] = {"before": [], "after": []}
    for repeat in range(options.repeats):
        order = list(checkouts) if repeat % 2 == 0 else list(checkouts)[::-1]
        for which in order:
            job = (name, folder, options.rounds, SETTINGS[setting])
            seconds[which].append(measure(checkouts[which], *job))
    before, after = seconds["before"], seconds["after"]
    return {
        "workload": name,
        "setting": setting,
        "before": median(before),
        "after": median(after),
        "ratio": median(after) / median(before),
        "spread": abs(median(before[::2]) / median(before[1::2]) - 1),
    }


def measure(
    checkout: Path, name: str, folder: str, rounds: int, options: dict[str, str | int]
) -> float:
    """The median seconds of a round of a job in a checkout."""
    environment = {**os.environ, "PYTHONPATH": f"{checkout}{os.pathsep}{checkout / 'src'}"}
    about = json.dumps({"measure": "training", **options})
    with tempfile.TemporaryDirectory() as scratch:
        path = f"{scratch}/job.json"
        words = [name, folder, str(rounds), about, path]
        saving = [sys.executable, "-c", SAVE_JOB, *words]
        subprocess.run(saving, cwd=checkout, env=environment, check=True)
        output = subprocess.run(
            [sys.executable, "-m", "benchmarks.ours", path],
            cwd=checkout,
            env=environment,
            check=True,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        ).stdout
    last = [text for text in output.splitlines() if text.startswith('{"')][-1]
    return median(json.loads(last)["seconds_per_round"])


def line(row: dict[str, str | float]) -> str:
    """A row for the terminal."""
    return (
        f"{row['workload']}  {row['setting']:<28} {1e3 * row['before']:8.1f} ms -> "
        f"{1e3 * row['after']:8.1f} ms  x {row['ratio']:.3f}  (spread {row['spread']:.3f})"
    )


if __name__ == "__main__":
    main()
