"""One client's connection: it asks for messages, answers them, and comes back after every fault."""

import logging
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from glocal.core.errors import describe_error
from glocal.deploy.flower.client_internals import (
    HEARTBEAT,
    ClientAppRunner,
    FleetConnection,
    Message,
    ReceivedMessage,
    ServerRejectedError,
    ServerUnreachableError,
)

Notify = Callable[[str], None]
_MIN_POLL, _MAX_POLL = 0.1, 3.0  # seconds between questions: soon after a message, and much later
_RETRY = 1.0  # seconds before a server that does not answer is tried again, twice as many each time
_MAX_RETRY, _MAX_RETRY_UNAUTHORIZED = (
    10.0,
    60.0,
)  # at most: while it cannot be reached; while it does not know the client
_LOG = logging.getLogger("glocal")


@dataclass
class Connection:
    """Keeps a client connected through `fleet` until it is told to stop.

    `node_file` is a file with the number that the server gave this client: who is killed has not left,
    and goes on there. `lock` is held while a message is answered, by one client of a process at a
    time.
    """

    fleet: FleetConnection
    handler: ClientAppRunner
    node_file: Path
    notify: Notify
    lock: threading.Lock
    stop: threading.Event = field(default_factory=threading.Event)
    heartbeat_error: Exception | None = None  # what the heartbeat met with
    last_notice: str = ""

    def run(self) -> None:
        """Connect, and connect again, ever more patiently."""
        threading.Thread(target=self._heartbeat_loop, daemon=True).start()
        failures = 0
        while not self.stop.is_set():
            began, limit = time.monotonic(), _MAX_RETRY
            try:
                self._run_client()
            except (ServerRejectedError, ServerUnreachableError) as error:
                limit = (
                    _MAX_RETRY_UNAUTHORIZED
                    if isinstance(error, ServerRejectedError) and error.unauthorized
                    else _MAX_RETRY
                )
                self._report_error(error)
            except Exception as error:  # a fault of ours must not take a client off line for good
                _LOG.error("the connection has failed", exc_info=error)
                self._report_error(error)
            failures = 0 if time.monotonic() - began > _MAX_RETRY_UNAUTHORIZED else failures + 1
            wait = min(_RETRY * 2.0**failures, limit)
            self.stop.wait(wait * random.uniform(0.8, 1.2))
        self.fleet.disconnect()

    def _run_client(self) -> None:
        """Come in, and answer whatever comes, until something goes wrong."""
        node = self.fleet.connect(self._last_node())
        with suppress(OSError):  # on a full disk it would have to wait for its place
            self.node_file.write_text(str(node), encoding="ascii")
        self.heartbeat_error = None
        self.notify("connected again" if self.last_notice else "connected")
        self.last_notice = ""
        heard = time.monotonic()
        while not self.stop.is_set():
            if self.heartbeat_error is not None:
                raise self.heartbeat_error
            received = self.fleet.receive()
            if received is not None:
                self._answer(received, node)
                heard = time.monotonic()
            else:
                self.stop.wait(_poll_interval(time.monotonic() - heard))

    def _answer(self, received: ReceivedMessage, node: int) -> None:
        reply, seconds = self.handler.handle(received, node, self.lock)
        try:
            self._send(reply, received.run, seconds)
        except ServerRejectedError as error:
            if error.unauthorized:
                raise
            self.notify(f"an answer was not taken ({error})")  # the next message may be

    def _send(self, reply: Message, run: int, seconds: float) -> None:
        """Send an answer, again and again while the line is down: it may have taken long to make."""
        end, wait = time.monotonic() + 2 * HEARTBEAT, _RETRY
        while True:
            try:
                return self.fleet.send(reply, run, seconds)
            except ServerUnreachableError:
                if time.monotonic() > end or self.stop.wait(wait):
                    raise
                wait *= 2

    def _heartbeat_loop(self) -> None:
        """Signs of life, in a thread of their own: neither training nor a slow line is death."""
        while not self.stop.wait(HEARTBEAT * 0.6):
            if not self.fleet.node.node_id or self.heartbeat_error is not None:
                continue
            try:
                self.fleet.send_heartbeat()
            except ServerUnreachableError:
                continue  # the questions meet with it as well
            except Exception as error:
                self.heartbeat_error = error

    def _last_node(self) -> int:
        with suppress(OSError, ValueError):
            return int(self.node_file.read_text(encoding="ascii"))
        return 0

    def _report_error(self, error: Exception) -> None:
        """Say what is wrong, once."""
        if isinstance(error, ServerUnreachableError):
            words = f"the server does not answer ({error}); trying again"
        elif isinstance(error, ServerRejectedError) and error.unauthorized:
            words = (
                f"the server does not let this device in ({error}): its key may be unknown or "
                "revoked, its clock wrong, or the server starting; trying again, slowly"
            )
        elif isinstance(error, ServerRejectedError):
            words = f"the server refuses ({error}); trying again"
        else:
            words = f"the connection has failed ({describe_error(error)}); trying again"
        if words != self.last_notice:
            self.notify(words)
        self.last_notice = words


def _poll_interval(idle: float) -> float:
    """Seconds until the next question, after so many without a message.

    A twentieth of that time: a client that waits its turn costs the server little, and one in the
    middle of a run is quick.
    """
    return max(_MIN_POLL, min(_MAX_POLL, idle / 20)) * random.uniform(0.8, 1.2)
