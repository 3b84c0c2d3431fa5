"""The clients' process: one client, or as many as have their folders on this machine.

No port is listened on, no program is started, and nothing that comes over the wire is run: what
trains is the library that is installed, and the Python files that the owner put into the client's
folder. Each client has its own folder, key, private state and connection; they take turns.
"""

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path

from glocal.core.errors import InputError
from glocal.core.files import lock_folder, restrict_permissions
from glocal.deploy import child_process
from glocal.deploy.certificates import CA, read_client_key, require_authority
from glocal.deploy.client import STATE, RunClient
from glocal.deploy.connection import Connection
from glocal.deploy.flower.client_app import client_app
from glocal.deploy.flower.client_internals import ClientAppRunner, FleetConnection
from glocal.deploy.formatting import format_journal_entry
from glocal.deploy.scaffold import KEY

Notify = Callable[[str], None]
LOGS, NODE_FILE = "logs", "node"
CURRENT_FOLDER: ContextVar[Path | None] = ContextVar("folder of the client at work", default=None)


def prepare_client(folder: Path, notify: Notify) -> RunClient:
    """A client whose model, data and keys are as they should be; what is wrong is refused here."""
    member = RunClient.from_folder(folder, on_entry=lambda row: notify(format_journal_entry(row)))
    own = member.project.folder
    for name in (STATE, LOGS):
        (own / name).mkdir(exist_ok=True)
    for path in restrict_permissions(
        [own, own / STATE, own / LOGS], [own / KEY, *own.glob(f"{STATE}/*")]
    ):
        notify(f"{path} could be read by others; now it cannot")
    require_authority(own / CA)
    read_client_key(own / KEY)
    with member.project.importable():
        member.data()
    return member


def main(folders: Sequence[Path], notify: Notify, stop: threading.Event) -> None:
    """Keep all these clients connected until told to stop."""
    own = [folder.resolve() for folder in folders]
    if len({*own}) < len(own):
        raise InputError("deploy: a folder was given twice; give the folder of every device once")
    lock = threading.Lock()
    with ExitStack() as held:
        connections = list[Connection]()
        for folder in own:
            held.enter_context(_at_work_in(folder))
            prefix = f"{folder.name}: " if len(own) > 1 else ""
            named = partial(_notify_prefixed, prefix, notify)
            connections.append(_make_connection(prepare_client(folder, named), named, lock))
        CURRENT_FOLDER.set(None)
        threads = [
            threading.Thread(target=_run_connection, args=pair)
            for pair in zip(own, connections, strict=False)
        ]
        for thread in threads:
            thread.start()
        while not stop.wait(child_process.ALIVE_INTERVAL):
            child_process.send_to_supervisor()
        for connection in connections:
            connection.stop.set()
        for thread in threads:
            thread.join()


@contextmanager
def _at_work_in(folder: Path) -> Iterator[None]:
    """Hold a client's folder; whatever happens in it then is its own doing."""
    CURRENT_FOLDER.set(folder)
    with lock_folder(folder):
        try:
            yield
        finally:
            CURRENT_FOLDER.set(folder)


def _notify_prefixed(prefix: str, notify: Notify, words: str) -> None:
    notify(prefix + words)


def _make_connection(member: RunClient, notify: Notify, lock: threading.Lock) -> Connection:
    own, server = member.project.folder, member.project.deployment.server
    weight = "" if member.equal_weights else ", and on how many examples it trained"
    metrics = "losses and accuracies leave it too"
    consent = metrics if member.settings.share_metrics else f"no {metrics.removesuffix(' too')}"
    federation = f"{member.settings.name} of '{member.project.deployment.name}'"
    notify(f"{federation}: only the shared part of its model leaves it{weight}; {consent}")
    notify(f"connecting to {server.host}:{server.port}")
    fleet = FleetConnection.to(
        f"{server.host}:{server.port}", (own / CA).read_bytes(), read_client_key(own / KEY)
    )
    handler = ClientAppRunner(
        client_app(lambda _: member), {"folder": str(own)}, member.project.importable
    )
    return Connection(fleet, handler, own / STATE / NODE_FILE, notify, lock)


def _run_connection(folder: Path, connection: Connection) -> None:
    CURRENT_FOLDER.set(folder)
    connection.run()


class _PerClientLogs(logging.Handler):
    """What happens while a client is at work goes to its own log, all else to the process's."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        folder, line = CURRENT_FOLDER.get(), self.format(record) + "\n"
        with suppress(OSError):  # a full disk; there is nobody left to tell
            if folder is None:
                sys.stderr.write(line)
                return
            with (folder / LOGS / "client.log").open("a", encoding="utf-8") as log:
                log.write(line)


if __name__ == "__main__":
    logging.getLogger().addHandler(_PerClientLogs())
    child_process.run(main)
