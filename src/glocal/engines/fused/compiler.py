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

SOURCE = Path(__file__).parent / "cpp" / "step.cpp"  # includes the headers beside it
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
_NATIVE_FLAGS = (("-march=native",), ("-mcpu=native",), ())  # the first that the compiler accepts
_COMPILERS = ("c++", "g++", "clang++")
_TIMEOUT = 300.0  # seconds
# the lines of /proc/cpuinfo that say what -march=native means
_PROCESSOR_FIELDS = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU")


class NoFusedStepError(RuntimeError):
    """Why there is no compiled step on this machine, in one line."""


def load_step() -> ctypes.CDLL:
    """The compiled step, from the cache if it was compiled before."""
    path = compile_library(_find_compiler())
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise _failed("the compiled step could not be loaded", error) from error


def _failed(message: str, error: Exception) -> NoFusedStepError:
    return NoFusedStepError(f"{message} ({describe_error(error)})")


def compile_library(compiler: Sequence[str]) -> Path:
    """The library of these sources, compiled at most once per compiler and processor."""
    target = cache_folder() / "fused" / f"step-{_fingerprint(compiler)}.so"
    if not target.exists():
        logging.getLogger("glocal").info(
            "compiling the fused steps for this machine, once; this takes some seconds"
        )
        try:
            _compile(compiler, target)
        except OSError as error:
            raise _failed("the C++ step could not be compiled", error) from error
    return target


def _fingerprint(compiler: Sequence[str]) -> str:
    """Changes with any source file, the flags, the compiler and the processor."""
    sources = [path.read_text() for path in _source_files()]
    machine = [*compiler, _compiler_version(compiler), _processor_id()]
    return _hash([*sources, *_FLAGS, str(_NATIVE_FLAGS), *machine])


def _hash(parts: list[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _source_files() -> list[Path]:
    """The file to compile and every header beside it."""
    return [SOURCE, *sorted(SOURCE.parent.glob("*.h"))]


def _compile(compiler: Sequence[str], target: Path) -> None:
    """Compile in a folder beside the target, then replace the target in one step.

    Another process may compile the same library at the same time.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        library = Path(folder) / "step.so"
        _compile_to(compiler, library)
        os.replace(library, target)


def _compile_to(compiler: Sequence[str], library: Path) -> None:
    """Compile with the first native flags that work."""
    errors = []
    for native in _NATIVE_FLAGS:
        process = _run([*compiler, *_FLAGS, *native, str(SOURCE), "-o", str(library)])
        if process.returncode == 0:
            return
        errors.append(_first_error(process.stderr))
    raise NoFusedStepError(f"{compiler[0]} could not compile the C++ step ({errors[0]})")


def _find_compiler() -> list[str]:
    """The command in CXX, else the machine's own compiler."""
    candidates = _compiler_candidates()
    for candidate in candidates:
        if shutil.which(candidate[0]):
            return candidate
    names = ", ".join(candidate[0] for candidate in candidates)
    raise NoFusedStepError(f"there is no C++ compiler (looked for {names}; CXX may name another)")


def _compiler_candidates() -> list[list[str]]:
    from_environment = shlex.split(os.environ.get("CXX", ""))
    if from_environment:
        return [from_environment]
    return [[name] for name in _COMPILERS]


def _compiler_version(compiler: Sequence[str]) -> str:
    return _run([*compiler, "--version"]).stdout


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_TIMEOUT, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _failed(f"{command[0]} could not be run", error) from error


def _first_error(output: str) -> str:
    """The first line with an error, else the first line."""
    lines = _nonempty_lines(output) or ["no output"]
    with_error = [line for line in lines if "error" in line]
    return (with_error or lines)[0][:160]


def _nonempty_lines(text: str) -> list[str]:
    lines = [line.strip() for line in text.splitlines()]
    return [line for line in lines if line]


def _processor_id() -> str:
    """Model and features of the processor: what -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(_relevant_lines(lines))


def _relevant_lines(lines: list[str]) -> list[str]:
    """The lines that -march=native depends on, without repetitions."""
    return sorted({line for line in lines if line.startswith(_PROCESSOR_FIELDS)})
