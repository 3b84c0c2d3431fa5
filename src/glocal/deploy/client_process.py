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
from glocal.core.files import alone, make_private
from glocal.deploy import child
from glocal.deploy.certificates import CA, read_device_key, require_authority
from glocal.deploy.connection import Connection
from glocal.deploy.device import STATE, Member
from glocal.deploy.flower.client import client_app
from glocal.deploy.flower.inner_client import Fleet, Handler
from glocal.deploy.layout import KEY
from glocal.deploy.words import told_entry

Say = Callable[[str], None]
LOGS, PLACE = "logs", "node"
CURRENT: ContextVar[Path | None] = ContextVar("folder of the client at work", default=None)


def prepare(folder: Path, say: Say) -> Member:
    """A client whose model, data and keys are as they should be; what is wrong is refused here."""
    member = Member.at(folder, tell=lambda row: say(told_entry(row)))
    own = member.project.folder
    for name in (STATE, LOGS):
        (own / name).mkdir(exist_ok=True)
    for path in make_private([own, own / STATE, own / LOGS], [own / KEY, *own.glob(f"{STATE}/*")]):
        say(f"{path} could be read by others; now it cannot")
    require_authority(own / CA)
    read_device_key(own / KEY)
    with member.project.importable():
        member.data()
    return member


def main(folders: Sequence[Path], say: Say, stop: threading.Event) -> None:
    """Keep all these clients connected until told to stop."""
    own = [folder.resolve() for folder in folders]
    if len({*own}) < len(own):
        raise InputError("deploy: a folder was given twice; give the folder of every device once")
    turn = threading.Lock()
    with ExitStack() as held:
        connections = list[Connection]()
        for folder in own:
            held.enter_context(_at_work_in(folder))
            prefix = f"{folder.name}: " if len(own) > 1 else ""
            named = partial(_said_by, prefix, say)
            connections.append(_connection(prepare(folder, named), named, turn))
        CURRENT.set(None)
        threads = [threading.Thread(target=_keep, args=pair) for pair in zip(own, connections, strict=False)]
        for thread in threads:
            thread.start()
        while not stop.wait(child.ALIVE):
            child.tell()
        for connection in connections:
            connection.stop.set()
        for thread in threads:
            thread.join()


@contextmanager
def _at_work_in(folder: Path) -> Iterator[None]:
    """Hold a client's folder; whatever happens in it then is its own doing."""
    CURRENT.set(folder)
    with alone(folder):
        try:
            yield
        finally:
            CURRENT.set(folder)


def _said_by(prefix: str, say: Say, words: str) -> None:
    say(prefix + words)


def _connection(member: Member, say: Say, turn: threading.Lock) -> Connection:
    own, server = member.project.folder, member.project.deployment.server
    weight = "" if member.equal else ", and on how many examples it trained"
    metrics = "losses and accuracies leave it too"
    consent = metrics if member.settings.metrics else f"no {metrics.removesuffix(' too')}"
    federation = f"{member.settings.name} of '{member.project.deployment.name}'"
    say(f"{federation}: only the shared part of its model leaves it{weight}; {consent}")
    say(f"connecting to {server.host}:{server.port}")
    fleet = Fleet.to(f"{server.host}:{server.port}", (own / CA).read_bytes(), read_device_key(own / KEY))
    handler = Handler(client_app(lambda _: member), {"folder": str(own)}, member.project.importable)
    return Connection(fleet, handler, own / STATE / PLACE, say, turn)


def _keep(folder: Path, connection: Connection) -> None:
    CURRENT.set(folder)
    connection.keep()


class _OwnLogs(logging.Handler):
    """What happens while a client is at work goes to its own log, all else to the process's."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        folder, line = CURRENT.get(), self.format(record) + "\n"
        with suppress(OSError):  # a full disk; there is nobody left to tell
            if folder is None:
                sys.stderr.write(line)
                return
            with (folder / LOGS / "client.log").open("a", encoding="utf-8") as log:
                log.write(line)


if __name__ == "__main__":
    logging.getLogger().addHandler(_OwnLogs())
    child.run(main)
