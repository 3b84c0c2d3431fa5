"""What the supervised programs share: how they report to the supervisor, and when they end."""

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path

from glocal.core.errors import InputError
from glocal.deploy.supervision import EXIT_REFUSED, Notify

ChildMain = Callable[[Sequence[Path], Notify, threading.Event], None]
_FROM_SUPERVISOR, _TO_SUPERVISOR = 0, 1  # file descriptors
ALIVE_INTERVAL = 5.0  # seconds between the signs of life that a program's main loop sends


def send_to_supervisor(**fields: str) -> None:
    """Send a line of JSON, whole even when several threads send; no fields is a sign of life."""
    os.write(_TO_SUPERVISOR, (json.dumps(fields) + "\n").encode())


def run(main: ChildMain) -> None:
    """Run a program on the folders of the command line until it is asked to stop.

    Files that it writes are readable by their owner alone. It ends with its supervisor, which holds
    the other end of its standard input. The owner's functions print to the log and cannot read
    input.
    """
    os.umask(0o077)
    sys.stdout, sys.stdin = sys.stderr, StringIO()
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s")  # warnings and errors
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    threading.Thread(target=_end_with_supervisor, daemon=True).start()
    folders = [Path(name) for name in sys.argv[1:]]
    try:
        main(folders, lambda text: send_to_supervisor(notify=text), stop)
    except InputError as error:
        send_to_supervisor(refused=str(error))
        sys.exit(EXIT_REFUSED)


def _end_with_supervisor() -> None:
    while os.read(_FROM_SUPERVISOR, 1):
        pass
    os._exit(1)
