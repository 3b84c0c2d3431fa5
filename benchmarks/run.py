"""One command: every workload on every tool, each beside the plain loop, in one run on one machine.

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
from benchmarks.job import Answer, Job
from benchmarks.processes import ToolError
from benchmarks.tools import REFERENCE, Tool, everything
from benchmarks.workloads import WORKLOADS, Workload, write_arrays

Row = Answer


def main() -> None:
    """Measure, print and write."""
    asked, console = arguments(sys.argv[1:]), Console(width=None if sys.stdout.isatty() else 150)
    workloads = [WORKLOADS[name] for name in asked.workloads]
    report = {
        "command": machine.command("benchmarks.run", sys.argv[1:]),
        "date": date.today().isoformat(),
        "machine": machine.describe(asked.device),
        "roofline": roofline.measure(workloads, asked.device),
        "data": {},
        "rows": [],
    }
    for workload in workloads:
        with tempfile.TemporaryDirectory() as folder:
            report["data"][workload.name] = write_arrays(workload, Path(folder))
            for row in measured(workload, folder, asked):
                report["rows"].append(with_floor(row, report["roofline"]))
                console.print(line(report["rows"][-1]), highlight=False)
                write(report, asked.out)
    for workload in workloads:
        console.print(table(report, workload))


def arguments(given: list[str]) -> argparse.Namespace:
    """What the user asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument(
        "--rounds",
        type=int,
        default=7,
        help="counted rounds; the first one is run besides and not counted",
    )
    parser.add_argument("--out", type=Path, default=Path("benchmark.json"))
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="with cuda the peers are left out"
    )
    parser.add_argument(
        "--seeds", type=int, default=1, help="also measure so many seeds side by side"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], help="rows whose name holds one of these words"
    )
    return parser.parse_args(given)


def measured(workload: Workload, folder: str, asked: argparse.Namespace) -> Iterator[Row]:
    """A row for each tool, with the plain loop run before and after it."""
    job = Job(
        workload,
        folder,
        asked.rounds,
        warm_up=3 if asked.device == "cuda" else 1,
        device=asked.device,
    )
    brief = Job(workload, folder, rounds=5, fewest=1, seconds=5.0, device=asked.device)
    before = _seconds(REFERENCE.ask(brief))
    for tool in everything(workload, device=asked.device, seeds=asked.seeds):
        if asked.only and not any(
            word.lower() in f"{tool.name} {tool.setting}".lower() for word in asked.only
        ):
            continue
        row = {
            "workload": workload.name,
            "tool": tool.name,
            "setting": tool.setting,
            "measure": tool.measure,
        }
        told = tried(tool, job)
        if "note" in told:
            yield {**row, **told}
            continue
        # a GPU is nobody else's: the reference is measured once
        after = before if asked.device == "cuda" else _seconds(REFERENCE.ask(brief))
        yield {**row, **told, **compared(_seconds(told), before, after)}
        before = after


def tried(tool: Tool, job: Job) -> Answer:
    """A tool's answer, or a note in one line why there is none."""
    if tool.peer and job.device != "cpu":
        return {"note": "left out: measured on the CPU only"}
    try:
        return tool.ask(job)
    except ToolError as error:
        told = str(error)
        return {"note": told if told.startswith("does not install") else f"does not run: {told}"}


def compared(seconds: float, before: float, after: float) -> Row:
    """The median round, and how many times as fast as the plain loop was just before and just after."""
    return {
        "median": seconds,
        "reference_before": before,
        "reference_after": after,
        "speed_up": (before + after) / 2 / seconds,
    }


def with_floor(row: Row, figures: roofline.Figures) -> Row:
    """Training rows also say how many times the floor they take."""
    if "median" not in row or row["measure"] != "training":
        return {key: value for key, value in row.items() if key != "speed_up"}
    return {
        **row,
        "times_floor": 1e3 * row["median"] / figures["workloads"][row["workload"]]["floor_ms"],
    }


def _seconds(told: Answer) -> float:
    """Median over rounds; rounds in a row, where they do not wait for each other, count if they are faster."""
    typical = median(told["seconds_per_round"])
    return min(typical, told.get("in_a_row") or typical)


def write(report: Answer, path: Path) -> None:
    """Keep what there is so far."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def line(row: Row) -> str:
    """Progress, one line a row."""
    about = f"{row['workload']}  {row['tool']}, {row['setting']}, {row['measure']}: "
    return about + (
        row.get("note")
        or f"{row['median']:.4f} s (plain loop {row['reference_before']:.3f}, {row['reference_after']:.3f})"
    )


def table(report: Answer, workload: Workload) -> Table:
    """One workload's rows."""
    floor = report["roofline"]["workloads"][workload.name]
    title = f"{workload.name}: {workload.summary}\n{report['data'][workload.name]}; floor {floor['floor_ms']:.1f} ms ({floor['bound']})"
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
    """A row as text; what does not apply is empty."""
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
