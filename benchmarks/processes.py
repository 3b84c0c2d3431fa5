"""Run a tool in a fresh process; measure its memory, its children included."""

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

from benchmarks.job import Job, Measurement, save

ROOT = Path(__file__).resolve().parents[1]
_PAUSE = 0.05
_BETWEEN_READINGS = 1.0  # seconds; reading the memory of many processes slows the tool
_MEGABYTE = 1e6


class ToolError(Exception):
    """A tool did not install or run; the message is one line."""


def run(
    command: Sequence[str], job: Job, *, environment: Mapping[str, str], limit: float = 900.0
) -> Measurement:
    """A tool's measurement for a job, and the peak memory of all its processes together."""
    with tempfile.TemporaryDirectory() as scratch:
        save(job, Path(scratch) / "job.json")
        with open(Path(scratch) / "output", "w+") as output:
            status, peak = _watch(
                [*command, f"{scratch}/job.json"], output.fileno(), environment, limit
            )
            output.seek(0)
            text = output.read()
    results = [line for line in text.splitlines() if line.startswith('{"')]
    if status != 0 or not results:
        raise ToolError(_reason(text, status))
    result = json.loads(results[-1])
    memory = max(result["peak_memory_mb"], round(peak / _MEGABYTE))
    return {**result, "peak_memory_mb": memory}


def module(name: str) -> list[str]:
    """The command that runs a module of ours in this Python."""
    return [sys.executable, "-m", f"benchmarks.{name}"]


def our_environment() -> dict[str, str]:
    """For processes that need glocal: they import this repository."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}


def _watch(
    command: Sequence[str], output: int, environment: Mapping[str, str], limit: float
) -> tuple[int, int]:
    """Exit status and peak memory in bytes; at the limit all processes are killed."""
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
                peak, due = (
                    max(peak, _family_memory(child.pid)),
                    time.monotonic() + _BETWEEN_READINGS,
                )
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


def _family_memory(pid: int) -> int:
    """Memory of a process and its descendants, shared pages counted once.

    0 without descendants: a single process reports its own peak.
    """
    family = list(_family(pid))
    return sum(map(_proportional_memory, family)) if len(family) > 1 else 0


def _family(pid: int) -> Iterator[int]:
    """A process and its descendants."""
    yield pid
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in path.read_text().split():
                yield from _family(int(child))


def _proportional_memory(pid: int) -> int:
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("Pss:")).split()[1])
    return 0


def _reason(text: str, status: int) -> str:
    """Why it failed, in one line: the last line with an error, else the last line."""
    if status == -signal.SIGKILL:
        return "killed: it exceeded the time limit or the memory"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "error:" in line.lower()]
    return (errors or lines or [f"exit status {status}, no output"])[-1][:200]
