"""One client's connection: it asks for messages, answers them, and comes back after every fault."""

import logging
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from glocal.core.errors import brief
from glocal.deploy.flower.inner_client import BEAT, Fleet, Handler, Message, Received, RefusedError, UnreachableError

Say = Callable[[str], None]
_BUSY, _IDLE = 0.1, 3.0  # seconds between questions: soon after a message, and much later
_AGAIN = 1.0  # seconds before a server that does not answer is tried again, twice as many each time
_SOON, _SLOWLY = 10.0, 60.0  # at most: while it cannot be reached; while it does not know the client
_LOG = logging.getLogger("glocal")


@dataclass
class Connection:
    """Keeps a client connected through `fleet` until it is told to stop.

    `place` is a file with the number that the server gave this client: who is killed has not left,
    and goes on there. `turn` is held while a message is answered, by one client of a process at a
    time.
    """

    fleet: Fleet
    handler: Handler
    place: Path
    say: Say
    turn: threading.Lock
    stop: threading.Event = field(default_factory=threading.Event)
    trouble: Exception | None = None  # what the heartbeat met with
    told: str = ""

    def keep(self) -> None:
        """Connect, and connect again, ever more patiently."""
        threading.Thread(target=self._keep_beating, daemon=True).start()
        failures = 0
        while not self.stop.is_set():
            began, limit = time.monotonic(), _SOON
            try:
                self._attend()
            except (RefusedError, UnreachableError) as error:
                limit = _SLOWLY if isinstance(error, RefusedError) and error.unknown else _SOON
                self._tell(error)
            except Exception as error:  # a fault of ours must not take a client off line for good
                _LOG.error("the connection has failed", exc_info=error)
                self._tell(error)
            failures = 0 if time.monotonic() - began > _SLOWLY else failures + 1
            wait = min(_AGAIN * 2.0**failures, limit)
            self.stop.wait(wait * random.uniform(0.8, 1.2))
        self.fleet.leave()

    def _attend(self) -> None:
        """Come in, and answer whatever comes, until something goes wrong."""
        node = self.fleet.enter(self._last_place())
        with suppress(OSError):  # on a full disk it would have to wait for its place
            self.place.write_text(str(node), encoding="ascii")
        self.trouble = None
        self.say("connected again" if self.told else "connected")
        self.told = ""
        heard = time.monotonic()
        while not self.stop.is_set():
            if self.trouble is not None:
                raise self.trouble
            received = self.fleet.receive()
            if received is not None:
                self._answer(received, node)
                heard = time.monotonic()
            else:
                self.stop.wait(_patience(time.monotonic() - heard))

    def _answer(self, received: Received, node: int) -> None:
        reply, seconds = self.handler.answer(received, node, self.turn)
        try:
            self._send(reply, received.run, seconds)
        except RefusedError as error:
            if error.unknown:
                raise
            self.say(f"an answer was not taken ({error})")  # the next message may be

    def _send(self, reply: Message, run: int, seconds: float) -> None:
        """Send an answer, again and again while the line is down: it may have taken long to make."""
        end, wait = time.monotonic() + 2 * BEAT, _AGAIN
        while True:
            try:
                return self.fleet.send(reply, run, seconds)
            except UnreachableError:
                if time.monotonic() > end or self.stop.wait(wait):
                    raise
                wait *= 2

    def _keep_beating(self) -> None:
        """Signs of life, in a thread of their own: neither training nor a slow line is death."""
        while not self.stop.wait(BEAT * 0.6):
            if not self.fleet.node.node_id or self.trouble is not None:
                continue
            try:
                self.fleet.beat()
            except UnreachableError:
                continue  # the questions meet with it as well
            except Exception as error:
                self.trouble = error

    def _last_place(self) -> int:
        with suppress(OSError, ValueError):
            return int(self.place.read_text(encoding="ascii"))
        return 0

    def _tell(self, error: Exception) -> None:
        """Say what is wrong, once."""
        if isinstance(error, UnreachableError):
            words = f"the server does not answer ({error}); trying again"
        elif isinstance(error, RefusedError) and error.unknown:
            words = (
                f"the server does not let this device in ({error}): its key may be unknown or "
                "revoked, its clock wrong, or the server starting; trying again, slowly"
            )
        elif isinstance(error, RefusedError):
            words = f"the server refuses ({error}); trying again"
        else:
            words = f"the connection has failed ({brief(error)}); trying again"
        if words != self.told:
            self.say(words)
        self.told = words


def _patience(idle: float) -> float:
    """Seconds until the next question, after so many without a message.

    A twentieth of that time: a client that waits its turn costs the server little, and one in the
    middle of a run is quick.
    """
    return max(_BUSY, min(_IDLE, idle / 20)) * random.uniform(0.8, 1.2)
