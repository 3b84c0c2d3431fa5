"""Run a tool in a fresh process and see how much memory it takes, its children included."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.job import Answer, Job, save

ROOT = Path(__file__).resolve().parents[1]
_PAUSE = 0.05
_BETWEEN_READINGS = 1.0  # reading the memory of many processes takes milliseconds: too often, and it would be timed too
_MEGABYTE = 1e6


class ToolError(Exception):
    """A tool that did not install or run; the message is one line."""


def ask(
    command: Sequence[str], job: Job, *, environment: Mapping[str, str], limit: float = 900.0
) -> Answer:
    """A tool's answer to a job, and the largest memory of all its processes together."""
    with tempfile.TemporaryDirectory() as scratch:
        save(job, Path(scratch) / "job.json")
        with open(Path(scratch) / "output", "w+") as output:
            status, peak = _watched(
                [*command, f"{scratch}/job.json"], output.fileno(), environment, limit
            )
            output.seek(0)
            told = output.read()
    answers = [line for line in told.splitlines() if line.startswith('{"')]
    if status != 0 or not answers:
        raise ToolError(_reason(told, status))
    answer = json.loads(answers[-1])
    return {**answer, "peak_memory_mb": max(answer["peak_memory_mb"], round(peak / _MEGABYTE))}


def module(name: str) -> list[str]:
    """The command that runs a module of ours in this Python."""
    return [sys.executable, "-m", f"benchmarks.{name}"]


def our_environment() -> dict[str, str]:
    """For processes that need glocal: the tree that this benchmark lies in."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}


def _watched(
    command: Sequence[str], output: int, environment: Mapping[str, str], limit: float
) -> tuple[int, int]:
    """Exit status and peak bytes of a command; it and its children are ended when the limit has passed."""
    child = subprocess.Popen(
        command,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
        cwd=ROOT,
        start_new_session=True,
    )
    timer = threading.Timer(limit, _end, [child.pid])
    timer.start()
    peak, due = 0, time.monotonic() + _BETWEEN_READINGS
    try:
        while child.poll() is None:
            if time.monotonic() > due:
                peak, due = max(peak, _together(child.pid)), time.monotonic() + _BETWEEN_READINGS
            time.sleep(_PAUSE)
        return child.returncode, peak
    except BaseException:
        _end(child.pid)
        raise
    finally:
        timer.cancel()


def _end(pid: int) -> None:
    for each in [*_family(pid)]:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def _together(pid: int) -> int:
    """Memory of a process and all below it, pages they share counted once; 0 for one alone: it tells its peak itself."""
    family = list(_family(pid))
    return sum(map(_proportional, family)) if len(family) > 1 else 0


def _family(pid: int) -> Iterator[int]:
    """A process and all below it."""
    yield pid
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in path.read_text().split():
                yield from _family(int(child))


def _proportional(pid: int) -> int:
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("Pss:")).split()[1])
    return 0


def _reason(told: str, status: int) -> str:
    """Why it failed, in one line: the last line that speaks of an error, else the last one."""
    if status == -signal.SIGKILL:
        return "stopped: it took too long, or too much memory"
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "error:" in line.lower()]
    return (errors or lines or [f"exit status {status}, no output"])[-1][:200]
