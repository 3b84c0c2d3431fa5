"""Keep a program running: start it again when it ends, ever more patiently, and when it is cut off while its server is there."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from glocal.deploy.processes import Child

# a SuperLink holds a lost device's place for a minute, and refuses it until then
WAITS = (2.0, 5.0, 15.0, 35.0, 65.0)
_LONG = 120.0  # a program that ran for so many seconds had started well
_OFFLINE = 45.0  # seconds that a device gets to come back by itself once the server is there again


def wait_before(failures: int) -> float:
    """Seconds to wait before the next start, after so many failures in a row.

    >>> [wait_before(failures) for failures in (1, 2, 9)]
    [2.0, 5.0, 65.0]
    """
    return WAITS[min(failures, len(WAITS)) - 1]


@dataclass(frozen=True)
class Care:
    """What is to be kept running, how to tell whether it is cut off (why, or nothing), and whom to tell."""

    start: Callable[[], Child]
    cut_off: Callable[[], str]
    say: Callable[[str], None]
    watch: Callable[[], None]
    every: float = 5.0
    offline: float = _OFFLINE


def supervise(care: Care, stop: threading.Event) -> None:
    """Until it is told to stop; the program is ended then, whatever happens."""
    failures = 0
    while not stop.is_set():
        child = care.start()
        try:
            why = _until_it_fails(care, child, stop)
        finally:
            child.stop()
        if stop.is_set():
            return
        failures = 1 if time.monotonic() - child.started > _LONG else failures + 1
        care.say(f"{why}; starting again in {wait_before(failures):.0f} s")
        stop.wait(wait_before(failures))


def _until_it_fails(care: Care, child: Child, stop: threading.Event) -> str:
    """Watch until the program ends, or stays cut off for too long; why."""
    since: float | None = None
    while not stop.wait(care.every):
        if not child.running():
            return f"it ended ({child.last_words()})"
        care.watch()
        why = care.cut_off()
        if not why:
            since = None
        elif since is None:
            since = time.monotonic()
        elif time.monotonic() - since > care.offline:
            return f"it has been cut off for {time.monotonic() - since:.0f} s ({why})"
    return "stopped"
