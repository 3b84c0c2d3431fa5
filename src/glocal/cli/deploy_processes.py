"""The two commands that run until they are stopped, `deploy server` and `deploy client`.

They only supervise a process of ours, so that nothing heavy is imported here.
"""

import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from glocal.deploy.supervision import Notify, Program, owner_variables, supervise


def log_line(text: str) -> None:
    """Print a line with the time."""
    # one write, as several threads print
    sys.stdout.write(f"{time.strftime('%H:%M:%S')}  {text}\n")
    sys.stdout.flush()


def notify_as(source: str) -> Notify:
    """Print lines with the time and their source."""
    return lambda text: log_line(f"{source}: {text}")


def server_program(folder: Path) -> Program:
    """The server of a folder as a supervised program."""
    return Program("glocal.deploy.server_process", (folder,), folder / "logs/server.log")


def client_program(folders: Sequence[Path]) -> Program:
    """The clients of these folders as one supervised program."""
    variables = list[str]()
    for folder in folders:
        variables += owner_variables(folder)
    log = folders[0] / "logs/client.log"
    return Program("glocal.deploy.client_process", tuple(folders), log, tuple(variables))


@contextmanager
def until_stopped() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set, so that programs end in order."""
    stop = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_server(folder: Path) -> None:
    """Run a server until it is stopped."""
    with until_stopped() as stop:
        supervise(server_program(folder), stop, log_line)


def run_clients(folders: Sequence[Path]) -> None:
    """Run clients until they are stopped, all of them in one process."""
    with until_stopped() as stop:
        supervise(client_program(folders), stop, log_line)
