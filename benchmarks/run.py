"""Every workload on every tool, each compared with the plain loop, in one run on one machine.

python -m benchmarks.run --workloads A B C --rounds 7 --out docs/results/benchmark.json
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks import machine, roofline
from benchmarks.job import Job, Measurement
from benchmarks.processes import ToolError
from benchmarks.tools import REFERENCE, Tool, all_tools
from benchmarks.workloads import WORKLOADS, Workload, write_arrays

Row = Measurement


def main() -> None:
    """Measure, print and write."""
    options, console = arguments(sys.argv[1:]), Console(width=None if sys.stdout.isatty() else 150)
    workloads = [WORKLOADS[name] for name in options.workloads]
    report = {
        "command": machine.command("benchmarks.run", sys.argv[1:]),
        "date": date.today().isoformat(),
        "machine": machine.describe(options.device),
        "roofline": roofline.measure(workloads, options.device),
        "data": {},
        "rows": [],
    }
    for workload in workloads:
        with tempfile.TemporaryDirectory() as folder:
            report["data"][workload.name] = write_arrays(workload, Path(folder))
            for row in measure_workload(workload, folder, options):
                report["rows"].append(with_floor(row, report["roofline"]))
                console.print(line(report["rows"][-1]), highlight=False)
                write(report, options.out)
    for workload in workloads:
        console.print(table(report, workload))


def arguments(words: list[str]) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument(
        "--rounds",
        type=int,
        default=7,
        help="timed rounds; one more round before them is not timed",
    )
    parser.add_argument("--out", type=Path, default=Path("benchmark.json"))
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="with cuda the peers are left out"
    )
    parser.add_argument(
        "--seeds", type=int, default=1, help="also measure this number of seeds side by side"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], help="only rows whose name contains one of these words"
    )
    return parser.parse_args(words)


def measure_workload(workload: Workload, folder: str, options: argparse.Namespace) -> Iterator[Row]:
    """A row for each tool, with the plain loop run before and after it."""
    job = Job(
        workload,
        folder,
        options.rounds,
        warm_up=3 if options.device == "cuda" else 1,
        device=options.device,
    )
    reference_job = Job(
        workload, folder, rounds=5, min_rounds=1, seconds=5.0, device=options.device
    )
    before = _seconds(REFERENCE.run(reference_job))
    for tool in all_tools(workload, device=options.device, seeds=options.seeds):
        if options.only and not any(
            word.lower() in f"{tool.name} {tool.setting}".lower() for word in options.only
        ):
            continue
        row = {
            "workload": workload.name,
            "tool": tool.name,
            "setting": tool.setting,
            "measure": tool.measure,
        }
        result = run_tool(tool, job)
        if "note" in result:
            yield {**row, **result}
            continue
        # nothing else runs on a GPU: the reference is measured once
        after = before if options.device == "cuda" else _seconds(REFERENCE.run(reference_job))
        yield {**row, **result, **with_reference(_seconds(result), before, after)}
        before = after


def run_tool(tool: Tool, job: Job) -> Measurement:
    """A tool's measurement, or a note in one line with the reason why there is none."""
    if tool.peer and job.device != "cpu":
        return {"note": "left out: measured on the CPU only"}
    try:
        return tool.run(job)
    except ToolError as error:
        reason = str(error)
        if not reason.startswith("does not install"):
            reason = f"does not run: {reason}"
        return {"note": reason}


def with_reference(seconds: float, before: float, after: float) -> Row:
    """The median round, and its speed relative to the plain loop just before and just after."""
    return {
        "median": seconds,
        "reference_before": before,
        "reference_after": after,
        "speed_up": (before + after) / 2 / seconds,
    }


def with_floor(row: Row, figures: roofline.Figures) -> Row:
    """Training rows also have their time as a multiple of the floor."""
    if "median" not in row or row["measure"] != "training":
        return {key: value for key, value in row.items() if key != "speed_up"}
    return {
        **row,
        "times_floor": 1e3 * row["median"] / figures["workloads"][row["workload"]]["floor_ms"],
    }


def _seconds(result: Measurement) -> float:
    """The median over rounds; the mean of rounds without waiting, if it is faster."""
    typical = median(result["seconds_per_round"])
    return min(typical, result.get("in_a_row") or typical)


def write(report: Measurement, path: Path) -> None:
    """Write the rows so far."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def line(row: Row) -> str:
    """Progress, one line a row."""
    about = f"{row['workload']}  {row['tool']}, {row['setting']}, {row['measure']}: "
    return about + (
        row.get("note")
        or f"{row['median']:.4f} s (plain loop {row['reference_before']:.3f}, "
        f"{row['reference_after']:.3f})"
    )


def table(report: Measurement, workload: Workload) -> Table:
    """One workload's rows."""
    floor = report["roofline"]["workloads"][workload.name]
    limit = f"floor {floor['floor_ms']:.1f} ms ({floor['bound']})"
    data = report["data"][workload.name]
    title = f"{workload.name}: {workload.summary}\n{data}; {limit}"
    shown = Table(title=title, title_justify="left")
    for heading in (
        "tool",
        "setting",
        "ms per round",
        "x plain loop",
        "x floor",
        "memory MB",
        "loss",
        "version or reason",
    ):
        shown.add_column(
            heading,
            justify="left" if heading in ("tool", "setting", "version or reason") else "right",
        )
    for row in report["rows"]:
        if row["workload"] == workload.name:
            shown.add_row(*cells(row))
    return shown


def cells(row: Row) -> list[str]:
    """A row as text; cells that do not apply are empty."""
    formats = {
        "speed_up": "{:.2f}",
        "times_floor": "{:.1f}",
        "peak_memory_mb": "{:.0f}",
        "loss": "{:.3f}",
    }
    figures = [
        form.format(row[key]) if row.get(key) is not None else "" for key, form in formats.items()
    ]
    setting = (
        row["setting"] if row["measure"] == "training" else f"{row['setting']}, {row['measure']}"
    )
    time = f"{1e3 * row['median']:.1f}" if "median" in row else ""
    return [row["tool"], setting, time, *figures, row.get("note") or row["version"]]


if __name__ == "__main__":
    main()
