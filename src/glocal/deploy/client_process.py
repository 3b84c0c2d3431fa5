"""The clients' process: one client, or several whose folders are on this machine.

It listens on no port and starts no program. It runs nothing that comes over the wire: training uses
the installed library and the Python files in the client's folder. Each client has its own folder,
key, private state and connection. Clients of one process take turns.
"""

import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path

from glocal.core.errors import InputError
from glocal.core.files import Json, lock_folder, restrict_permissions
from glocal.deploy import child_process
from glocal.deploy.certificates import CA, read_client_key, require_authority
from glocal.deploy.client import STATE, RunClient
from glocal.deploy.connection import Connection
from glocal.deploy.flower.client_app import client_app
from glocal.deploy.flower.client_internals import ClientAppRunner, FleetConnection
from glocal.deploy.formatting import format_journal_entry
from glocal.deploy.scaffold import KEY
from glocal.deploy.supervision import Notify

LOGS = "logs"
CURRENT_FOLDER: ContextVar[Path | None] = ContextVar("folder of the current client", default=None)


def prepare_client(folder: Path, notify: Notify) -> RunClient:
    """A client whose model, data and keys can be used; anything else is refused here."""

    def show_entry(entry: Json) -> None:
        notify(format_journal_entry(entry))

    client = RunClient.from_folder(folder, on_entry=show_entry)
    own = client.project.folder
    for name in (STATE, LOGS):
        (own / name).mkdir(exist_ok=True)
    private_folders = [own, own / STATE, own / LOGS]
    private_files = [own / KEY, *own.glob(f"{STATE}/*")]
    for path in restrict_permissions(private_folders, private_files):
        notify(f"other users could read {path}; this is corrected")
    require_authority(own / CA)
    read_client_key(own / KEY)
    with client.project.importable():
        client.data()
    return client


def main(folders: Sequence[Path], notify: Notify, stop: threading.Event) -> None:
    """Keep all these clients connected until stopped."""
    paths = [folder.resolve() for folder in folders]
    if len({*paths}) < len(paths):
        raise InputError("deploy: a folder is given twice; give the folder of every client once")
    lock = threading.Lock()
    with ExitStack() as locks:
        connections = list[Connection]()
        for folder in paths:
            locks.enter_context(_locked_client_folder(folder))
            prefix = f"{folder.name}: " if len(paths) > 1 else ""
            notify_client = partial(_notify_prefixed, prefix, notify)
            client = prepare_client(folder, notify_client)
            connections.append(_make_connection(client, notify_client, lock))
        CURRENT_FOLDER.set(None)
        threads = list[threading.Thread]()
        for pair in zip(paths, connections, strict=True):
            threads.append(threading.Thread(target=_run_connection, args=pair))
            threads[-1].start()
        while not stop.wait(child_process.ALIVE_INTERVAL):
            child_process.send_to_supervisor()
        for connection in connections:
            connection.stop.set()
        for thread in threads:
            thread.join()


@contextmanager
def _locked_client_folder(folder: Path) -> Iterator[None]:
    """Lock a client's folder; what is logged until the next client starts goes to its log."""
    CURRENT_FOLDER.set(folder)
    with lock_folder(folder):
        try:
            yield
        finally:
            CURRENT_FOLDER.set(folder)


def _notify_prefixed(prefix: str, notify: Notify, text: str) -> None:
    notify(prefix + text)


def _make_connection(client: RunClient, notify: Notify, lock: threading.Lock) -> Connection:
    own, server = client.project.folder, client.project.deployment.server
    sent = "how the shared part of its model has changed"
    if not client.setup.equal_weights:
        sent += " and its number of training examples"
    are_sent = "are sent too" if client.settings.share_metrics else "are not sent"
    name = f"{client.settings.name} of '{client.project.deployment.name}'"
    notify(f"{name}: sends {sent}; losses and metrics {are_sent}")
    address = f"{server.host}:{server.port}"
    notify(f"connecting to {address}")
    fleet = FleetConnection.to(address, (own / CA).read_bytes(), read_client_key(own / KEY))
    app = client_app(lambda _: client)
    runner = ClientAppRunner(app, {"folder": str(own)}, client.project.importable)
    return Connection(fleet, runner, notify, lock)


def _run_connection(folder: Path, connection: Connection) -> None:
    CURRENT_FOLDER.set(folder)
    connection.run()


class _PerClientLogs(logging.Handler):
    """Writes what a client logs to the log in its own folder, all else to standard error."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        folder, line = CURRENT_FOLDER.get(), self.format(record) + "\n"
        with suppress(OSError):  # a full disk: there is nowhere left to report it
            if folder is None:
                sys.stderr.write(line)
                return
            with (folder / LOGS / "client.log").open("a", encoding="utf-8") as log:
                log.write(line)


if __name__ == "__main__":
    logging.getLogger().addHandler(_PerClientLogs())
    child_process.run(main)
