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
from glocal.core.files import alone, read_rows, write_secret
from glocal.deploy import child
from glocal.deploy.certificates import SERVER, SERVER_KEY, days_left, require_server_certificate
from glocal.deploy.conductor import ROWS, RUNS, RunConductor
from glocal.deploy.flower.gate import FleetGate, OperatorGate
from glocal.deploy.flower.inner_server import Grid, SuperLink, key_bytes, run_tasks
from glocal.deploy.flower.server import conduct
from glocal.deploy.layout import CERTIFICATES, SECRET, SOCKET
from glocal.deploy.operating import address_of, require_accountant
from glocal.deploy.processes import require_free
from glocal.deploy.project import Project
from glocal.deploy.roster import ROSTER, active, read_roster
from glocal.deploy.words import told_row
from glocal.studies.run import slug

Say = Callable[[str], None]
_RENEW = 30  # days before its end at which a certificate is worth a word
_LONGEST_PATH = 100  # bytes of a socket's path; the system takes 107, and 103 elsewhere
_SLACK = 2**20  # bytes of a reply beside its tensors
_LOOK = 1.0  # seconds between looks at who is connected
_GRACE = 2  # seconds that requests under way are given when the server ends


@dataclass
class Registry:
    """Who may connect, as the roster says at this moment."""

    folder: Path
    link: SuperLink
    say: Say
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
                self.say(f"{error}; until then, those may connect who could before")
        return self._nodes

    def names(self) -> dict[int, str]:
        """What nodes are called."""
        return dict(self._names)

    def _stamped(self) -> tuple[int, ...]:
        try:
            found = (self.folder / ROSTER).stat()
        except OSError:
            return ()
        return found.st_mtime_ns, found.st_ino, found.st_size

    def _read(self) -> None:
        entries = {key_bytes(entry.key): entry for entry in active(read_roster(self.folder)).values()}
        for key in [key for key in self._nodes if key not in entries]:
            node = self._nodes.pop(key)
            self.link.unregister(node)
            self.say(f"{self._names.pop(node)} may connect no longer")
        for key, entry in entries.items():
            if key not in self._nodes:
                self._nodes[key] = self.link.register(key, entry.name)
                self._names[self._nodes[key]] = entry.name
                self.say(f"{entry.name} may connect")


def prepare(folder: Path, say: Say) -> Project:
    """Refuse what could not be served; a certificate that ends soon is worth a word."""
    project = Project.at(folder)
    for entry in read_roster(project.folder).values():  # refuses what is no server's folder
        key_bytes(entry.key)  # refuses what is no key
    certificates, server = project.folder / CERTIFICATES, project.deployment.server
    require_server_certificate(certificates, [server.host])
    left = days_left(certificates / SERVER)
    if left < _RENEW:
        renew = f"glocal deploy renew {shlex.quote(str(project.folder))}"
        say(f"the server's certificate ends in {left} days; make a new one with `{renew}`")
    project.kit  # noqa: B018 (what is wrong with the model or the study is said now)
    require_accountant(project)
    length = len(str(project.folder / SOCKET).encode())
    if length > _LONGEST_PATH:
        raise InputError(
            f"deploy: the path of {project.folder / SOCKET} has {length} bytes; "
            f"at most {_LONGEST_PATH} are possible, move the folder to a shorter one"
        )
    return project


def main(folders: Sequence[Path], say: Say, stop: threading.Event) -> None:
    """Serve one folder until told to stop."""
    with alone(folders[0].resolve()):
        project = prepare(folders[0], say)
        server = project.deployment.server
        require_free(server.bind, server.port)
        bound = "all of this machine's addresses" if server.bind == "0.0.0.0" else server.bind
        say(f"the server listens on {bound}, port {server.port}, for devices at {address_of(project)}")
        say("only devices of the roster pass its gate")
        asyncio.run(_serve(project, say, stop))


async def _serve(project: Project, say: Say, stop: threading.Event) -> None:
    secret = secrets.token_urlsafe(32)  # a new one at every start
    link = SuperLink(secret)
    registry = Registry(project.folder, link, say)
    gate = FleetGate(link.app, registry.nodes, link.awaits, _largest_reply(project))
    work = partial(_conduct, project.folder, gate)
    threading.Thread(target=run_tasks, args=(link, work, stop), daemon=True).start()
    with _operators_socket(project.folder / SOCKET) as door:
        public = _Server(_public(project, gate))
        private = _Server(_private(OperatorGate(link.app, secret)))
        write_secret(project.folder / SECRET, secret.encode())
        watch = _Watch(project, registry, link, say)
        await asyncio.gather(public.serve(), private.serve(sockets=[door]), _until(stop, watch, public, private))


async def _until(stop: threading.Event, watch: "_Watch", *servers: "_Server") -> None:
    """Look after the server until it is told to stop, or ends by itself."""
    last = time.monotonic()
    while not stop.is_set() and not any(server.should_exit for server in servers):
        await asyncio.sleep(0.1)
        if time.monotonic() - last > _LOOK and all(server.started for server in servers):
            last = time.monotonic()
            watch.registry.nodes()  # a new device is let in before it asks
            with suppress(InputError, OSError, LookupError):  # who reads damaged rows names them
                await asyncio.to_thread(watch.look)
            child.tell()
    for server in servers:
        server.should_exit = True


class _Server(uvicorn.Server):
    """A web server that leaves signals to us."""

    def capture_signals(self) -> Any:
        return nullcontext()


def _public(project: Project, gate: FleetGate) -> uvicorn.Config:
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


def _private(gate: OperatorGate) -> uvicorn.Config:
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
    "timeout_graceful_shutdown": _GRACE,
}


@contextmanager
def _operators_socket(path: Path) -> Iterator[socket.socket]:
    """A socket file that its owner alone may open; there is no moment at which others could."""
    path.unlink(missing_ok=True)  # of a server that was killed; this folder is ours alone
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.bind(str(path))  # made under the process's umask, 0600
        path.chmod(0o600)
        try:
            yield door
        finally:
            path.unlink(missing_ok=True)


def _largest_reply(project: Project) -> int:
    """The bytes of the largest part of a reply: masked numbers take twice as many as plain ones."""
    shared = project.kit.algorithm.init(project.kit.params)[0]
    return 2 * trees.nbytes(shared) + _SLACK


def _conduct(folder: Path, gate: FleetGate, grid: Grid, config: Mapping[str, object]) -> None:
    """One run of this folder, as it stands now; whoever starts a run chooses its name alone."""
    run = str(config.get("run", ""))
    if not run or slug(run) != run:
        raise InputError(f"run: '{run[:40]}' is no plain name of a run")
    project = Project.at(folder)
    project.forget_modules()  # they may have changed since the last run
    gate.largest = _largest_reply(project)
    conduct(grid, RunConductor(project, run, visiting=bool(config.get("visit", False))))


@dataclass
class _Watch:
    """What an operator is told: devices that come and go, rounds."""

    project: Project
    registry: Registry
    link: SuperLink
    say: Say
    here: set[str] = field(default_factory=set)
    sizes: dict[Path, int] = field(default_factory=dict)
    rows: dict[Path, int] = field(default_factory=dict)
    ready: bool = False

    def __post_init__(self) -> None:
        for path in self._changed():  # what was there before is no news
            self.rows[path] = len(read_rows(path))

    def look(self) -> None:
        """Look once."""
        if not self.ready:
            self.ready = True
            self.say("the server is up")
        names = self.registry.names()
        here = {names[node] for node in self.link.connected() if node in names}
        for name in sorted(here ^ self.here):
            came = "has connected" if name in here else "is gone"
            self.say(f"{name} {came} ({len(here)} of {len(names)} devices are there)")
        self.here = here
        for path in self._changed():
            rows = read_rows(path)
            for row in rows[self.rows.get(path, 0) :]:
                self.say(f"{path.parent.name}: {told_row(row)}")
            self.rows[path] = len(rows)

    def _changed(self) -> list[Path]:
        """The rows of all runs that are longer or shorter than at the last look."""
        found = sorted((self.project.folder / RUNS).glob(f"*/{ROWS}"))
        sizes = {path: path.stat().st_size for path in found}
        changed = [path for path, size in sizes.items() if self.sizes.get(path) != size]
        self.sizes = sizes
        return changed


if __name__ == "__main__":
    child.run(main)
