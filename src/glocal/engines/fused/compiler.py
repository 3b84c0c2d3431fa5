"""The C++ step, compiled for this machine on first use and kept in the cache."""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from glocal.core.errors import describe_error
from glocal.core.paths import cache_folder

SOURCE = Path(__file__).with_name("step.cpp")
# no -ffast-math: a diverged loss must come out as NaN
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-shared",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
)
_NATIVE_FLAGS = (("-march=native",), ("-mcpu=native",), ())  # the first that the compiler takes
_COMPILERS = ("c++", "g++", "clang++")
_TIMEOUT = 300.0  # seconds


class NoFusedStepError(RuntimeError):
    """Why there is no compiled step on this machine, in one line."""


def load_step() -> ctypes.CDLL:
    """The compiled step, from the cache if it was compiled before."""
    path = compile_library(_compiler())
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NoFusedStepError(
            f"the compiled step could not be loaded ({describe_error(error)})"
        ) from error


def compile_library(compiler: Sequence[str]) -> Path:
    """The library of this source, compiler and processor; another of any of them has another name."""
    marks = (
        SOURCE.read_text(),
        *_FLAGS,
        *map(str, _NATIVE_FLAGS),
        *compiler,
        _version(compiler),
        _processor_id(),
    )
    name = hashlib.sha256("\0".join(marks).encode()).hexdigest()[:16]
    target = cache_folder() / "fused" / f"step-{name}.so"
    if not target.exists():
        logging.getLogger("glocal").info(
            "compiling the fused steps for this machine, once; this takes some seconds"
        )
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            _compile(compiler, target)
        except OSError as error:
            raise NoFusedStepError(
                f"the C++ step could not be compiled ({describe_error(error)})"
            ) from error
    return target


def _compile(compiler: Sequence[str], target: Path) -> None:
    """Compile beside the target and put it in place in one step: another process may be doing the same."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made, said = Path(folder) / "step.so", ""
        for tuned in _NATIVE_FLAGS:
            done = _run([*compiler, *_FLAGS, *tuned, str(SOURCE), "-o", str(made)])
            if done.returncode == 0:
                os.replace(made, target)
                return
            said = said or _first_error(done.stderr)
        raise NoFusedStepError(f"{compiler[0]} could not compile the C++ step ({said})")


def _compiler() -> list[str]:
    """What CXX names, else the machine's own."""
    named = shlex.split(os.environ.get("CXX", ""))
    for candidate in [named] if named else [[name] for name in _COMPILERS]:
        if shutil.which(candidate[0]):
            return candidate
    tried = named[0] if named else ", ".join(_COMPILERS)
    raise NoFusedStepError(f"there is no C++ compiler (looked for {tried}; CXX may name another)")


def _version(compiler: Sequence[str]) -> str:
    return _run([*compiler, "--version"]).stdout


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_TIMEOUT, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoFusedStepError(
            f"{command[0]} could not be run ({describe_error(error)})"
        ) from error


def _first_error(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return next(
        (line for line in lines if "error" in line), lines[0] if lines else "it said nothing"
    )[:160]


def _processor_id() -> str:
    """Model and abilities of the processor: what -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
