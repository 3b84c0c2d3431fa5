"""Keep one of our programs running in a separate process, and pass on its notices.

The supervisor is small: it never imports torch and does nothing else. Its child gets only the
environment variables that it needs, sends lines of JSON, and ends when the supervisor has ended. A
child that ends or sends nothing is restarted, after growing waits.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from glocal.core.errors import InputError

Notify = Callable[[str], None]
EXIT_REFUSED = 2  # the exit code of a child that refuses its input
RESTART_DELAYS = (0.2, 2.0, 5.0, 15.0, 30.0)
_HEALTHY = 60.0  # seconds of running after which a start counts as a success
_MAX_SILENCE = 60.0  # seconds without a line after which a child is restarted
_STOP_TIMEOUT = 5.0  # seconds in which a child may end by itself
_MAX_LOG = 10_000_000  # bytes of a log, beside as many of the time before
# The environment variables that a child needs; all others may be secrets.
_INHERITED = {"HOME", "LANG", "LANGUAGE", "LOGNAME", "PATH", "SHELL", "TMPDIR", "TZ", "USER"}
_INHERITED |= {
    "LD_LIBRARY_PATH",
    "DYLD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "SSL_CERT_DIR",
    "SSL_CERT_FILE",
}
_INHERITED_PREFIXES = ("CUDA_", "GLOCAL_", "KMP_", "LC_", "MKL_", "NVIDIA_", "OMP_", "PYTHON")
_FLOWER_VARIABLES = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "PYTHONUNBUFFERED": "1",
}


def child_environment(home: Path, variables: Iterable[str] = ()) -> dict[str, str]:
    """The variables that a child gets: those that it needs, and those that its owner names.

    `home` is the folder of Flower's settings, apart from those of the user's other programs.
    """
    names = {*_INHERITED, *variables}
    inherited = {}
    for name, value in os.environ.items():
        if name in names or name.startswith(_INHERITED_PREFIXES):
            inherited[name] = value
    return {**inherited, **_FLOWER_VARIABLES, "FLWR_HOME": str(home)}


def owner_variables(folder: Path) -> list[str]:
    """The variables that a client's own client.toml names; the child reports errors in it."""
    try:
        table = tomllib.loads((folder / "client.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    names = table.get("environment", [])
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


@dataclass(frozen=True)
class Program:
    """A program to keep running: a module of ours, the folders it works on, its log."""

    module: str
    folders: tuple[Path, ...]
    log: Path
    variables: tuple[str, ...] = ()


@dataclass
class ChildProcess:
    """A running child."""

    process: subprocess.Popen[bytes]
    notify: Notify
    started: float = field(default_factory=time.monotonic)
    last_heard: float = field(default_factory=time.monotonic)
    refusal: str = ""
    listener: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.listener = threading.Thread(target=self._listen, daemon=True)

    @classmethod
    def start(cls, program: Program, notify: Notify) -> "ChildProcess":
        """Start a child, in a session of its own: Ctrl-C is for the supervisor."""
        program.log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        log = os.open(program.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        # -P: no modules from the current folder, where anybody may have put some
        command = [sys.executable, "-P", "-m", program.module, *map(str, program.folders)]
        home = program.folders[0].resolve() / ".flower"
        try:
            process = subprocess.Popen(
                command,
                env=child_environment(home, program.variables),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        finally:
            os.close(log)
        child = cls(process, notify)
        child.listener.start()
        return child

    def _listen(self) -> None:
        """Pass on its notices until it ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.last_heard = time.monotonic()
            with suppress(ValueError):
                fields = json.loads(line)
                if isinstance(fields, Mapping):
                    self._pass_on(fields)

    def _pass_on(self, fields: Mapping[str, object]) -> None:
        if "refused" in fields:
            self.refusal = str(fields["refused"])
        if "notify" in fields:
            self.notify(str(fields["notify"]))

    def failure(self) -> str:
        """Why the child must be restarted, or ""."""
        code = self.process.poll()
        if code is not None:
            self.listener.join(1.0)  # its last lines
            return self.refusal or f"it ended ({_exit_reason(code)})"
        silent = time.monotonic() - self.last_heard
        return f"it has been silent for {silent:.0f} s" if silent > _MAX_SILENCE else ""

    def stop(self) -> None:
        """Ask the child to end, then kill it."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_STOP_TIMEOUT)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.listener.join(1.0)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def _exit_reason(code: int) -> str:
    """How a program ended, by its exit code.

    >>> _exit_reason(-9), _exit_reason(3)
    ('SIGKILL', 'exit code 3')
    """
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def restart_delay(failures: int) -> float:
    """Seconds to wait before the next start, after a number of failures in a row.

    >>> [restart_delay(failures) for failures in (1, 2, 9)]
    [0.2, 2.0, 30.0]
    """
    return RESTART_DELAYS[min(failures, len(RESTART_DELAYS)) - 1]


def require_project(folder: Path) -> None:
    """Refuse a folder that is not a project before anything is written to it."""
    if not (folder / "study.toml").is_file():
        raise InputError(
            f"deploy: cannot read {folder / 'study.toml'}; "
            "give a folder that `glocal deploy init` or `add-client` made"
        )


def _drop_empty(log: Path) -> None:
    """Remove an empty log and its folder: a refused start leaves nothing behind."""
    with suppress(OSError):
        if not log.stat().st_size:
            log.unlink()
            log.parent.rmdir()


def limit_log(log: Path) -> None:
    """Move a log that is too long to LOG.1, of which there is one; the child goes on writing.

    The child holds the file open and appends to it, so that the file is emptied and not renamed.
    """
    with suppress(OSError):  # it is tried again
        size = log.stat().st_size
        if size <= _MAX_LOG:
            return
        with log.open("rb") as file:
            file.seek(size - _MAX_LOG)
            last = file.read(_MAX_LOG)
        earlier = os.open(f"{log}.1", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(earlier, "wb") as file:
            file.write(last)
        os.truncate(log, 0)


def supervise(
    program: Program, stop: threading.Event, notify: Notify, *, every: float = 0.1
) -> None:
    """Keep a program running until stopped; what its first start refuses is raised."""
    for folder in program.folders:
        require_project(folder)
    failures, new_log = 0, not program.log.exists()
    while not stop.is_set():
        child = ChildProcess.start(program, notify)
        try:
            while not stop.wait(every) and not child.failure():
                limit_log(program.log)
            reason = child.failure()
        finally:
            child.stop()
        if stop.is_set():
            return
        if child.refusal and not failures:
            if new_log:  # otherwise it belongs to a program that is running
                _drop_empty(program.log)
            raise InputError(child.refusal)
        failures = 1 if time.monotonic() - child.started > _HEALTHY else failures + 1
        delay = restart_delay(failures)
        notify(f"{reason}; restarting in {delay:g} s; see {program.log}")
        stop.wait(delay)
