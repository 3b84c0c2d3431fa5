"""The server's process: Flower's SuperLink behind our gates, and the runs that it conducts.

One port for clients (TLS, registered keys, the fleet interface alone) and one socket file for the
operator. Runs are conducted in threads of this process, by the code that is installed and the
Python files in the server's own folder: what a run brings along is not looked at.
"""

import asyncio
import secrets
import shlex
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from glocal.core import trees
from glocal.core.errors import InputError
from glocal.core.files import lock_folder, read_rows, write_secret
from glocal.deploy import child_process
from glocal.deploy.certificates import SERVER, SERVER_KEY, days_left, require_server_certificate
from glocal.deploy.flower.gate import FleetGate, OperatorGate
from glocal.deploy.flower.server_app import run_to_end
from glocal.deploy.flower.server_internals import Grid, SuperLink, public_key_bytes, run_tasks
from glocal.deploy.formatting import format_round
from glocal.deploy.preflight import require_free_port
from glocal.deploy.project import Project
from glocal.deploy.registry import REGISTRY, active_entries, read_registry
from glocal.deploy.runtime import require_accountant, server_address
from glocal.deploy.scaffold import CERTIFICATES, SECRET, SOCKET
from glocal.deploy.server import ROWS, RUNS, RunServer
from glocal.studies.run import slug

Notify = Callable[[str], None]
_RENEW_DAYS = 30  # days before its end at which a certificate is worth a word
_LONGEST_PATH = 100  # bytes of a socket's path; the system takes 107, and 103 elsewhere
_SLACK = 2**20  # bytes of a reply beside its tensors
_POLL_INTERVAL = 1.0  # seconds between looks at who is connected
_SHUTDOWN_TIMEOUT = 2  # seconds that requests under way are given when the server ends


@dataclass
class RegisteredNodes:
    """Who may connect, as the roster says at this moment."""

    folder: Path
    link: SuperLink
    notify: Notify
    _stamp: tuple[int, ...] = ()
    _nodes: dict[bytes, int] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)

    def nodes(self) -> Mapping[bytes, int]:
        """Registered public keys and their nodes; asked for by every request."""
        stamp = self._stamped()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._read()
            except InputError as error:  # whoever was let in stays, until it can be read again
                self.notify(f"{error}; until then, those may connect who could before")
        return self._nodes

    def names(self) -> dict[int, str]:
        """What nodes are called."""
        return dict(self._names)

    def _stamped(self) -> tuple[int, ...]:
        try:
            found = (self.folder / REGISTRY).stat()
        except OSError:
            return ()
        return found.st_mtime_ns, found.st_ino, found.st_size

    def _read(self) -> None:
        entries = {
            public_key_bytes(entry.key): entry
            for entry in active_entries(read_registry(self.folder)).values()
        }
        for key in [key for key in self._nodes if key not in entries]:
            node = self._nodes.pop(key)
            self.link.unregister(node)
            self.notify(f"{self._names.pop(node)} may connect no longer")
        for key, entry in entries.items():
            if key not in self._nodes:
                self._nodes[key] = self.link.register(key, entry.name)
                self._names[self._nodes[key]] = entry.name
                self.notify(f"{entry.name} may connect")


def prepare_server(folder: Path, notify: Notify) -> Project:
    """Refuse what could not be served; a certificate that ends soon is worth a word."""
    project = Project.from_folder(folder)
    for entry in read_registry(project.folder).values():  # refuses what is no server's folder
        public_key_bytes(entry.key)  # refuses what is no key
    certificates, server = project.folder / CERTIFICATES, project.deployment.server
    require_server_certificate(certificates, [server.host])
    left = days_left(certificates / SERVER)
    if left < _RENEW_DAYS:
        renew = f"glocal deploy renew {shlex.quote(str(project.folder))}"
        notify(f"the server's certificate ends in {left} days; make a new one with `{renew}`")
    project.setup  # noqa: B018 (what is wrong with the model or the study is said now)
    require_accountant(project)
    length = len(str(project.folder / SOCKET).encode())
    if length > _LONGEST_PATH:
        raise InputError(
            f"deploy: the path of {project.folder / SOCKET} has {length} bytes; "
            f"at most {_LONGEST_PATH} are possible, move the folder to a shorter one"
        )
    return project


def main(folders: Sequence[Path], notify: Notify, stop: threading.Event) -> None:
    """Serve one folder until told to stop."""
    with lock_folder(folders[0].resolve()):
        project = prepare_server(folders[0], notify)
        server = project.deployment.server
        require_free_port(server.bind, server.port)
        bound = "all of this machine's addresses" if server.bind == "0.0.0.0" else server.bind
        notify(
            f"the server listens on {bound}, port {server.port}, for devices at {server_address(project)}"
        )
        notify("only devices of the roster pass its gate")
        asyncio.run(_serve(project, notify, stop))


async def _serve(project: Project, notify: Notify, stop: threading.Event) -> None:
    secret = secrets.token_urlsafe(32)  # a new one at every start
    link = SuperLink(secret)
    registered = RegisteredNodes(project.folder, link, notify)
    gate = FleetGate(link.app, registered.nodes, link.awaits_reply, _max_reply_bytes(project))
    work = partial(_run_to_end, project.folder, gate)
    threading.Thread(target=run_tasks, args=(link, work, stop), daemon=True).start()
    with _operator_socket(project.folder / SOCKET) as door:
        public = _Server(_public_config(project, gate))
        private = _Server(_operator_config(OperatorGate(link.app, secret)))
        write_secret(project.folder / SECRET, secret.encode())
        watch = _StatusMonitor(project, registered, link, notify)
        await asyncio.gather(
            public.serve(),
            private.serve(sockets=[door]),
            _serve_until_stopped(stop, watch, public, private),
        )


async def _serve_until_stopped(
    stop: threading.Event, watch: "_StatusMonitor", *servers: "_Server"
) -> None:
    """Look after the server until it is told to stop, or ends by itself."""
    last = time.monotonic()
    while not stop.is_set() and not any(server.should_exit for server in servers):
        await asyncio.sleep(0.1)
        if time.monotonic() - last > _POLL_INTERVAL and all(server.started for server in servers):
            last = time.monotonic()
            watch.registered.nodes()  # a new device is let in before it asks
            with suppress(InputError, OSError, LookupError):  # who reads damaged rows names them
                await asyncio.to_thread(watch.poll)
            child_process.send_to_supervisor()
    for server in servers:
        server.should_exit = True


class _Server(uvicorn.Server):
    """A web server that leaves signals to us."""

    def capture_signals(self) -> Any:
        return nullcontext()


def _public_config(project: Project, gate: FleetGate) -> uvicorn.Config:
    server, certificates = project.deployment.server, project.folder / CERTIFICATES
    return uvicorn.Config(
        gate,
        host=server.bind,
        port=server.port,
        ssl_certfile=certificates / SERVER,
        ssl_keyfile=certificates / SERVER_KEY,
        lifespan="on",
        **_COMMON,
    )


def _operator_config(gate: OperatorGate) -> uvicorn.Config:
    return uvicorn.Config(gate, lifespan="off", **_COMMON)


# h11, for it bounds the headers of a request; nothing about a proxy is believed
_COMMON: dict[str, Any] = {
    "http": "h11",
    "ws": "none",
    "access_log": False,
    "log_config": None,
    "server_header": False,
    "proxy_headers": False,
    "timeout_keep_alive": 75,
    "timeout_graceful_shutdown": _SHUTDOWN_TIMEOUT,
}


@contextmanager
def _operator_socket(path: Path) -> Iterator[socket.socket]:
    """A socket file that its owner alone may open; there is no moment at which others could."""
    path.unlink(missing_ok=True)  # of a server that was killed; this folder is ours alone
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.bind(str(path))  # made under the process's umask, 0600
        path.chmod(0o600)
        try:
            yield door
        finally:
            path.unlink(missing_ok=True)


def _max_reply_bytes(project: Project) -> int:
    """The bytes of the largest part of a reply: masked numbers take twice as many as plain ones."""
    shared = project.setup.algorithm.init(project.setup.params)[0]
    return 2 * trees.nbytes(shared) + _SLACK


def _run_to_end(folder: Path, gate: FleetGate, grid: Grid, config: Mapping[str, object]) -> None:
    """One run of this folder, as it stands now; whoever starts a run chooses its name alone."""
    run = str(config.get("run", ""))
    if not run or slug(run) != run:
        raise InputError(f"run: '{run[:40]}' is no plain name of a run")
    project = Project.from_folder(folder)
    project.unload_modules()  # they may have changed since the last run
    gate.max_object_bytes = _max_reply_bytes(project)
    run_to_end(
        grid, RunServer(project, run, skip_training=bool(config.get("skip_training", False)))
    )


@dataclass
class _StatusMonitor:
    """What an operator is told: devices that come and go, rounds."""

    project: Project
    registered: RegisteredNodes
    link: SuperLink
    notify: Notify
    here: set[str] = field(default_factory=set)
    sizes: dict[Path, int] = field(default_factory=dict)
    rows: dict[Path, int] = field(default_factory=dict)
    ready: bool = False

    def __post_init__(self) -> None:
        for path in self._changed():  # what was there before is no news
            self.rows[path] = len(read_rows(path))

    def poll(self) -> None:
        """Look once."""
        if not self.ready:
            self.ready = True
            self.notify("the server is up")
        names = self.registered.names()
        here = {names[node] for node in self.link.connected_nodes() if node in names}
        for name in sorted(here ^ self.here):
            came = "has connected" if name in here else "is gone"
            self.notify(f"{name} {came} ({len(here)} of {len(names)} devices are there)")
        self.here = here
        for path in self._changed():
            rows = read_rows(path)
            for row in rows[self.rows.get(path, 0) :]:
                self.notify(f"{path.parent.name}: {format_round(row)}")
            self.rows[path] = len(rows)

    def _changed(self) -> list[Path]:
        """The rows of all runs that are longer or shorter than at the last look."""
        found = sorted((self.project.folder / RUNS).glob(f"*/{ROWS}"))
        sizes = {path: path.stat().st_size for path in found}
        changed = [path for path, size in sizes.items() if self.sizes.get(path) != size]
        self.sizes = sizes
        return changed


if __name__ == "__main__":
    child_process.run(main)
