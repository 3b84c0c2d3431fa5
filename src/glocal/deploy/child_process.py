"""What a supervised program has in common with others: how it speaks, and when it ends."""

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
from glocal.deploy.supervision import EXIT_REFUSED

ChildMain = Callable[[Sequence[Path], Callable[[str], None], threading.Event], None]
_FROM_SUPERVISOR, _TO_SUPERVISOR = 0, 1  # file descriptors
ALIVE_INTERVAL = 5.0  # seconds between signs of life, which every program gives from its main loop


def send_to_supervisor(**words: str) -> None:
    """A line to the supervisor, in one piece: several threads speak. No words are a sign of life."""
    os.write(_TO_SUPERVISOR, (json.dumps(words) + "\n").encode())


def run(main: ChildMain) -> None:
    """Run a program on the folders of the command line until it is told to stop.

    Whatever it writes is for its owner alone to read. It ends with its supervisor, who holds the
    other end of its input. What an owner's functions print goes to the log, and they cannot ask.
    """
    os.umask(0o077)
    sys.stdout, sys.stdin = sys.stderr, StringIO()
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s")  # warnings and errors
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    threading.Thread(target=_end_with_supervisor, daemon=True).start()
    try:
        main(
            [Path(name) for name in sys.argv[1:]],
            lambda words: send_to_supervisor(notify=words),
            stop,
        )
    except InputError as error:
        send_to_supervisor(refused=str(error))
        sys.exit(EXIT_REFUSED)


def _end_with_supervisor() -> None:
    while os.read(_FROM_SUPERVISOR, 1):
        pass
    os._exit(1)
