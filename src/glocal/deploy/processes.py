"""Flower's programs as children of ours: telemetry off, a home of their own, ended together with all that they started."""

import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from glocal.errors import InputError
from glocal.keep import alone as alone
from glocal.keep import write_text

QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1"}
_COLOURS = re.compile("\x1b\\[[0-9;]*m")
_HELD = "Its place may still be held for up to a minute after it was lost, or its key is not known there."
_LETTING_GO = 2.0  # seconds that a killed program's port may still be held
_PATIENCE = 5.0  # seconds that a program is given to end by itself


def require_flower() -> None:
    """Say how to get Flower where it is missing."""
    with suppress(ImportError):  # some finders raise for what they do not have
        if find_spec("flwr") is not None:
            return
    raise InputError("deploy: Flower is not installed; run: pip install 'glocal[flower]'")


def program(name: str) -> str:
    """Where one of Flower's programs is: beside the Python that runs us, or on the path."""
    require_flower()
    here = Path(sys.executable).parent / name
    found = str(here) if here.exists() else shutil.which(name)
    if found is None:
        raise InputError(f"deploy: the program {name} is not to be found; install Flower anew: pip install 'glocal[flower]'")
    return found


@dataclass
class Child:
    """A program in a process group of its own, its words in a log file."""

    process: subprocess.Popen[bytes]
    log: Path
    home: Path
    started: float

    @classmethod
    def start(cls, command: Sequence[str], *, home: Path, log: Path) -> "Child":
        """Start a program with Flower's own home in `home`."""
        home.mkdir(parents=True, exist_ok=True)
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, **QUIET, "FLWR_HOME": str(home.resolve()), "PYTHONUNBUFFERED": "1", "PATH": _path()}
        end_all(home)  # two with one key would push each other out
        with log.open("ab") as words:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=words, stderr=words, start_new_session=True, cwd=home
            )
        child = cls(process, log, home, time.monotonic())
        try:
            write_text(log.with_suffix(".pid"), str(process.pid))
        except InputError:
            child.stop()  # a full disk must not leave a program behind
            raise
        return child

    def running(self) -> bool:
        """Whether it still runs."""
        return self.process.poll() is None

    def stop(self) -> None:
        """End it and all that it started, politely first."""
        _signal_group(self.process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_PATIENCE)
        _signal_group(self.process.pid, signal.SIGKILL)
        end_all(self.home)
        self.process.wait(_PATIENCE)

    def last_words(self) -> str:
        """Why it ended, as far as its log says: Flower's own error, else its last line."""
        text = _COLOURS.sub("", self.log.read_text(errors="replace"))
        lines = [line.strip() for line in text.splitlines()[-40:] if line.strip()]
        errors = [line for line in lines if line.startswith(("[code:", "[SSL:"))]
        told = (errors or lines or ["nothing"])[-1][-200:]
        return f"{told} {_HELD}" if "Failed to activate" in told else told


def _path() -> str:
    """Where programs are looked for, this Python's own folder first: Flower's start others by name, and no shell need know them."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def end_all(home: Path) -> None:
    """End whatever still runs with this home: some of Flower's programs leave the group, and outlive a killed parent."""
    mark = f"FLWR_HOME={home.resolve()}".encode()
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (place / "environ").read_bytes().split(b"\0"):
                os.kill(int(place.name), signal.SIGKILL)


def require_free(bind: str, port: int) -> None:
    """Refuse a port that somebody else listens on; one that is just being let go of is waited for."""
    end = time.monotonic() + _LETTING_GO
    while True:
        try:
            return socket.create_server((bind, port)).close()
        except OSError as error:
            if time.monotonic() > end:
                raise InputError(
                    f"deploy: the server cannot listen on {bind}:{port} ({error.strerror or error}); stop what does, "
                    "or change server.port or server.bind in deploy.toml, on the devices too"
                ) from error
        time.sleep(0.1)


def _signal_group(leader: int, number: signal.Signals) -> None:
    try:
        os.killpg(leader, number)
    except ProcessLookupError:
        return


def superlink(*, bind: str, port: int, certificates: Path, database: Path) -> list[str]:
    """Flower's server, with TLS and only for registered keys."""
    paths = {"ca": certificates / "ca.crt", "cert": certificates / "server.crt", "key": certificates / "server.key"}
    options = ["--ssl-ca-certfile", str(paths["ca"]), "--ssl-certfile", str(paths["cert"]), "--ssl-keyfile", str(paths["key"])]
    guarded = ["--enable-supernode-auth", "--disable-runtime-dependency-installation", "--database", str(database)]
    return [program("flower-superlink"), "--host", bind, "--port", str(port), *options, *guarded]


def supernode(*, server: str, authority: Path, key: Path, folder: Path) -> list[str]:
    """Flower's device, which proves who it is by its key; its own port is on loopback only."""
    trust = ["--root-certificates", str(authority), "--superlink", server, "--auth-supernode-private-key", str(key)]
    own = ["--host", "127.0.0.1", "--port", str(free_port()), "--node-config", f'folder="{folder}"']
    return [program("flower-supernode"), *trust, *own]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(host: str, port: int, authority: Path, *, timeout: float = 5.0) -> str:
    """Whether a server with a certificate of this authority answers an HTTP request there: empty, or why not."""
    try:
        context = ssl.create_default_context(cafile=str(authority))
        with socket.create_connection((host, port), timeout) as plain, context.wrap_socket(plain, server_hostname=host) as safe:
            safe.sendall(f"GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            return "" if safe.recv(4) == b"HTTP" else "it closes the connection without an answer"
    except ssl.SSLCertVerificationError as error:
        return f"its certificate is not to be trusted ({error.reason or error})"
    except OSError as error:
        return str(error.strerror or error)
