"""The two commands that run until they are stopped, `deploy server` and `deploy device`.

They only look after a process of ours: nothing heavy is imported here.
"""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from glocal.deploy.supervision import Program, owner_variables, supervise


def log_line(words: str) -> None:
    """A line with the time."""
    sys.stdout.write(
        f"{time.strftime('%H:%M:%S')}  {words}\n"
    )  # in one piece: several threads speak
    sys.stdout.flush()


def notify_as(who: str) -> Callable[[str], None]:
    """A line with the time, and who says it."""
    return lambda words: log_line(f"{who}: {words}")


def server_program(folder: Path) -> Program:
    """The server of a folder, as a program to be kept running."""
    return Program("glocal.deploy.server_process", (folder,), folder / "logs/server.log")


def client_program(folders: Sequence[Path]) -> Program:
    """The devices of these folders, as one program to be kept running."""
    named = tuple(name for folder in folders for name in owner_variables(folder))
    log = folders[0] / "logs/client.log"
    return Program("glocal.deploy.client_process", tuple(folders), log, named)


@contextmanager
def until_stopped() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set, so that programs are ended in order."""
    stop = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_server(folder: Path) -> None:
    """Keep a server running until it is stopped."""
    with until_stopped() as stop:
        supervise(server_program(folder), stop, log_line)


def run_clients(folders: Sequence[Path]) -> None:
    """Keep devices connected until they are stopped, all of them in one process."""
    with until_stopped() as stop:
        supervise(client_program(folders), stop, log_line)
