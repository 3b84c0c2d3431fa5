"""Virtual environments of the peers, made once, outside the repository."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.processes import ROOT, ToolError

_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PFL_PYTORCH_DEVICE": "cpu",
    "JAX_PLATFORMS": "cpu",
}


def python_of(name: str) -> str:
    """The Python of a peer's environment, which is made if it does not exist."""
    requirements = ROOT / "benchmarks" / "peers" / f"{name}-requirements.txt"
    folder = _cache() / f"{name}-{_tag(requirements)}"
    python = folder / "bin" / "python"
    ready = folder / "ready"
    if not ready.exists():
        _run([sys.executable, "-m", "venv", "--clear", str(folder)], name)
        _run(
            [str(python), "-m", "pip", "install", "--quiet", "--requirement", str(requirements)],
            name,
        )
        ready.touch()
    return str(python)


def peer_environment(name: str) -> dict[str, str]:
    """A peer's environment variables: with this benchmark, without glocal and telemetry."""
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return {
        **variables,
        **_QUIET,
        "FLWR_HOME": str(_cache() / "flower-home"),
        "PYTHONPATH": str(ROOT),
    }


def _cache() -> Path:
    own = os.environ.get("GLOCAL_CACHE")
    base = (
        Path(own).expanduser()
        if own
        else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "glocal"
    )
    return base / "benchmarks"


def _tag(requirements: Path) -> str:
    """Changes with the requirements and with the Python."""
    return hashlib.sha256(requirements.read_bytes() + sys.version.encode()).hexdigest()[:10]


def _run(command: list[str], name: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = (
            [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            or done.stderr.splitlines()
            or ["no reason"]
        )
        raise ToolError(f"does not install: {name}: {lines[0][:200]}")
