"""The server's process: Flower's SuperLink behind our gates, and the runs.

Clients use one port (TLS, registered keys, the fleet interface alone), the operator uses a socket
file. Runs take place in threads of this process, with the installed library and the Python files in
the server's own folder. Code that is sent with a run is ignored.
"""

import asyncio
import secrets
import shlex
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from glocal.core import trees
from glocal.core.errors import InputError
from glocal.core.files import lock_folder, read_rows, restrict_permissions, write_secret
from glocal.deploy import child_process
from glocal.deploy.certificates import (
    CA_KEY,
    SERVER,
    SERVER_KEY,
    days_left,
    require_server_certificate,
)
from glocal.deploy.flower.gate import FleetGate, OperatorGate
from glocal.deploy.flower.server_app import run_to_end
from glocal.deploy.flower.server_internals import Grid, SuperLink, public_key_bytes, run_tasks
from glocal.deploy.formatting import format_round
from glocal.deploy.preflight import require_free_port
from glocal.deploy.project import Project
from glocal.deploy.public_server import (
    PublicServer,
    WebServer,
    max_connections,
    raise_file_limit,
)
from glocal.deploy.registry import REGISTRY, active_entries, read_registry
from glocal.deploy.runtime import require_accountant, server_address
from glocal.deploy.scaffold import CERTIFICATES, SECRET, SOCKET
from glocal.deploy.server import RunServer
from glocal.deploy.server_files import ROWS, RUNS
from glocal.deploy.supervision import Notify
from glocal.studies.run import slug
from glocal.wire.schema import empty_message

_RENEW_DAYS = 30  # days before its end from which an expiring certificate is reported
_MAX_SOCKET_PATH = 100  # bytes; Linux allows 107, other systems 103
_REPLY_OVERHEAD = 2**20  # bytes of a reply beside its tensors
_POLL_INTERVAL = 1.0  # seconds between checks of the connected nodes
_SHUTDOWN_TIMEOUT = 2  # seconds for open requests when the server ends


@dataclass
class RegisteredNodes:
    """The nodes that may connect, as the registry says at this moment."""

    folder: Path
    superlink: SuperLink
    notify: Notify
    _stamp: tuple[int, ...] = ()
    _nodes: dict[bytes, int] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)
    _problem: str = ""

    def nodes(self) -> Mapping[bytes, int]:
        """Registered public keys and their nodes; called for every request."""
        stamp = self._file_stamp()
        if stamp != self._stamp:
            try:
                self._read()
                self._stamp, self._problem = stamp, ""
            except (InputError, OSError) as error:  # it is read again at the next call
                self._report(str(error))
        return self._nodes

    def _report(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            self.notify(f"{problem}; until then, the clients registered before may connect")

    def names(self) -> dict[int, str]:
        """The clients' names by node."""
        return dict(self._names)

    def _file_stamp(self) -> tuple[int, ...]:
        try:
            status = (self.folder / REGISTRY).stat()
        except OSError:
            return ()
        return status.st_mtime_ns, status.st_ino, status.st_size

    def _read(self) -> None:
        active = active_entries(read_registry(self.folder))
        entries = {public_key_bytes(entry.key): entry for entry in active.values()}
        for key in list(self._nodes):
            if key not in entries:
                node = self._nodes.pop(key)
                self.superlink.unregister(node)
                self.notify(f"{self._names.pop(node)} may not connect any more")
        for key, entry in entries.items():
            if key not in self._nodes:
                node = self.superlink.register(key, entry.name)
                self._nodes[key], self._names[node] = node, entry.name
                self.notify(f"{entry.name} may connect")


def prepare_server(folder: Path, notify: Notify) -> Project:
    """Refuse a project that cannot be served; report a certificate that expires soon."""
    project = Project.from_folder(folder)
    for entry in read_registry(project.folder).values():  # refuses a folder that is not a server's
        public_key_bytes(entry.key)  # refuses an invalid key
    certificates, server = project.folder / CERTIFICATES, project.deployment.server
    for path in restrict_permissions(
        [project.folder], [certificates / CA_KEY, certificates / SERVER_KEY]
    ):
        notify(f"other users could read {path}; this is corrected")
    require_server_certificate(certificates, [server.host])
    left = days_left(certificates / SERVER)
    if left < _RENEW_DAYS:
        renew = f"glocal deploy renew {shlex.quote(str(project.folder))}"
        notify(f"the server's certificate expires in {left} days; make a new one with `{renew}`")
    project.setup  # noqa: B018 (refuses an unusable model or study)
    require_accountant(project)
    length = len(str(project.folder / SOCKET).encode())
    if length > _MAX_SOCKET_PATH:
        raise InputError(
            f"deploy: the path of {project.folder / SOCKET} has {length} bytes; "
            f"at most {_MAX_SOCKET_PATH} are possible, move the folder to a shorter path"
        )
    return project


def main(folders: Sequence[Path], notify: Notify, stop: threading.Event) -> None:
    """Serve one folder until stopped."""
    with lock_folder(folders[0].resolve()):
        project = prepare_server(folders[0], notify)
        server = project.deployment.server
        require_free_port(server.bind, server.port)
        bound = "all of this machine's addresses" if server.bind == "0.0.0.0" else server.bind
        address = server_address(project)
        notify(f"the server listens on {bound}, port {server.port}; clients connect to {address}")
        notify("only registered clients may connect")
        asyncio.run(_serve(project, notify, stop))


async def _serve(project: Project, notify: Notify, stop: threading.Event) -> None:
    raise_file_limit()
    secret = secrets.token_urlsafe(32)  # a new one at every start
    superlink = SuperLink(secret)
    registered = RegisteredNodes(project.folder, superlink, notify)
    max_bytes = _max_reply_bytes(project)
    gate = FleetGate(superlink.app, registered.nodes, superlink, max_bytes)
    run = partial(_run_to_end, project.folder, gate)
    threading.Thread(target=run_tasks, args=(superlink, run, stop), daemon=True).start()
    with _operator_socket(project.folder / SOCKET) as operator_socket:
        limit = lambda: max_connections(len(registered.names()))  # noqa: E731
        public = PublicServer(_public_config(project, gate), limit)
        private = WebServer(_operator_config(OperatorGate(superlink.app, secret)))
        write_secret(project.folder / SECRET, secret.encode())
        monitor = _StatusMonitor(project, registered, superlink, notify)
        await asyncio.gather(
            public.serve(),
            private.serve(sockets=[operator_socket]),
            _serve_until_stopped(stop, monitor, public, private),
        )


async def _serve_until_stopped(
    stop: threading.Event, monitor: "_StatusMonitor", *servers: WebServer
) -> None:
    """Monitor the web servers until they are stopped, or end by themselves."""
    last = time.monotonic()
    while not stop.is_set() and not any(server.should_exit for server in servers):
        await asyncio.sleep(0.1)
        if time.monotonic() - last > _POLL_INTERVAL and all(server.started for server in servers):
            last = time.monotonic()
            monitor.registered.nodes()  # registers a new client before its first request
            with suppress(InputError, OSError, LookupError):  # `status` reports damaged rows
                await asyncio.to_thread(monitor.poll)
            child_process.send_to_supervisor()
    for server in servers:
        server.should_exit = True


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


# h11 limits the headers of a request; headers of proxies are not trusted
_COMMON: dict[str, Any] = {
    "http": "h11",
    "ws": "none",
    "access_log": False,
    "log_config": None,
    "log_level": "error",  # not a line for every invalid request of a stranger
    "server_header": False,
    "proxy_headers": False,
    "timeout_keep_alive": 75,
    "timeout_graceful_shutdown": _SHUTDOWN_TIMEOUT,
}


@contextmanager
def _operator_socket(path: Path) -> Iterator[socket.socket]:
    """A socket file that only its owner can open, from the moment that it exists."""
    path.unlink(missing_ok=True)  # left by a killed server; the folder's lock is ours
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as operator_socket:
        operator_socket.bind(str(path))  # made under the process's umask, 0600
        path.chmod(0o600)
        try:
            yield operator_socket
        finally:
            path.unlink(missing_ok=True)


def _max_reply_bytes(project: Project) -> int:
    """The bytes of the largest part of a reply; masked numbers take twice as many as plain ones."""
    payload = project.setup.wire.payload
    return 2 * trees.nbytes(empty_message(payload)) + _REPLY_OVERHEAD


def _run_to_end(folder: Path, gate: FleetGate, grid: Grid, config: Mapping[str, object]) -> None:
    """One run of this folder with its current files; an operator can only choose the run's name."""
    run = str(config.get("run", ""))
    if not run or slug(run) != run:
        raise InputError(f"run: '{run[:40]}' is not a valid run name")
    project = Project.from_folder(folder)
    project.unload_modules()  # they may have changed since the last run
    gate.max_object_bytes = _max_reply_bytes(project)
    skip_training = bool(config.get("skip_training", False))
    run_to_end(grid, RunServer(project, run, skip_training=skip_training))


@dataclass
class _StatusMonitor:
    """Reports to the operator which clients connect and disconnect, and every round."""

    project: Project
    registered: RegisteredNodes
    superlink: SuperLink
    notify: Notify
    connected: set[str] = field(default_factory=set)
    sizes: dict[Path, int] = field(default_factory=dict)
    rows: dict[Path, int] = field(default_factory=dict)
    ready: bool = False

    def __post_init__(self) -> None:
        for path in self._changed():  # rows of earlier runs are not reported
            self.rows[path] = len(read_rows(path))

    def poll(self) -> None:
        """Report what has changed since the last call."""
        if not self.ready:
            self.ready = True
            self.notify("the server is up")
        names = self.registered.names()
        nodes = self.superlink.connected_nodes()
        connected = {names[node] for node in nodes if node in names}
        for name in sorted(connected ^ self.connected):
            change = "has connected" if name in connected else "has disconnected"
            self.notify(f"{name} {change} ({len(connected)} of {len(names)} clients connected)")
        self.connected = connected
        for path in self._changed():
            rows = read_rows(path)
            for row in rows[self.rows.get(path, 0) :]:
                self.notify(f"{path.parent.name}: {format_round(row)}")
            self.rows[path] = len(rows)

    def _changed(self) -> list[Path]:
        """The files of rows whose size has changed since the last call."""
        paths = sorted((self.project.folder / RUNS).glob(f"*/{ROWS}"))
        sizes = {path: path.stat().st_size for path in paths}
        changed = [path for path, size in sizes.items() if self.sizes.get(path) != size]
        self.sizes = sizes
        return changed


if __name__ == "__main__":
    child_process.run(main)
