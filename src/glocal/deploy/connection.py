"""One client's connection: it polls for messages, answers them and reconnects after errors."""

import logging
import random
import threading
import time
from dataclasses import dataclass, field

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
from glocal.deploy.supervision import Notify

_MIN_POLL, _MAX_POLL = 0.1, 3.0  # seconds between polls: just after a message, and much later
_RETRY = 1.0  # seconds before the first retry; the wait doubles each time
_MAX_RETRY = 10.0  # seconds between retries at most
_MAX_RETRY_UNAUTHORIZED = 60.0  # the same while the server does not know the client
_LOG = logging.getLogger("glocal")


@dataclass
class Connection:
    """Keeps a client connected through `fleet` until it is stopped.

    `lock` is held while a message is handled, so that clients of one process take turns.
    """

    fleet: FleetConnection
    runner: ClientAppRunner
    notify: Notify
    lock: threading.Lock
    stop: threading.Event = field(default_factory=threading.Event)
    heartbeat_error: Exception | None = None
    last_notice: str = ""

    def run(self) -> None:
        """Connect, and reconnect after errors with growing waits."""
        threading.Thread(target=self._heartbeat_loop, daemon=True).start()
        failures = 0
        while not self.stop.is_set():
            start, max_retry = time.monotonic(), _MAX_RETRY
            try:
                self._run_client()
            except (ServerRejectedError, ServerUnreachableError) as error:
                if isinstance(error, ServerRejectedError) and error.unauthorized:
                    max_retry = _MAX_RETRY_UNAUTHORIZED
                self._report_error(error)
            except Exception as error:  # a bug here must not take the client offline for good
                _LOG.error("the connection has failed", exc_info=error)
                self._report_error(error)
            was_stable = time.monotonic() - start > _MAX_RETRY_UNAUTHORIZED
            failures = 0 if was_stable else failures + 1
            wait = min(_RETRY * 2.0**failures, max_retry)
            self.stop.wait(wait * random.uniform(0.8, 1.2))
        self.fleet.disconnect()

    def _run_client(self) -> None:
        """Connect and handle messages until an error occurs."""
        node = self.fleet.connect()
        self.heartbeat_error = None
        self.notify("connected again" if self.last_notice else "connected")
        self.last_notice = ""
        last_message = time.monotonic()
        while not self.stop.is_set():
            if self.heartbeat_error is not None:
                raise self.heartbeat_error
            received = self.fleet.receive()
            if received is not None:
                self._answer(received, node)
                last_message = time.monotonic()
            else:
                self.stop.wait(_poll_interval(time.monotonic() - last_message))

    def _answer(self, received: ReceivedMessage, node: int) -> None:
        reply, seconds = self.runner.handle(received, node, self.lock)
        try:
            self._send(reply, received.run, seconds)
        except ServerRejectedError as error:
            if error.unauthorized:
                raise
            self.notify(f"the server rejected a reply ({error})")  # it may accept the next one

    def _send(self, reply: Message, run: int, seconds: float) -> None:
        """Send a reply, and retry while the server is unreachable: training may have taken long."""
        end, wait = time.monotonic() + 2 * HEARTBEAT, _RETRY
        while True:
            try:
                return self.fleet.send(reply, run, seconds)
            except ServerUnreachableError:
                if time.monotonic() > end or self.stop.wait(wait):
                    raise
                wait *= 2

    def _heartbeat_loop(self) -> None:
        """Send heartbeats from a thread of their own, so that long training never stops them."""
        while not self.stop.wait(HEARTBEAT * 0.6):
            if not self.fleet.node.node_id or self.heartbeat_error is not None:
                continue
            try:
                self.fleet.send_heartbeat()
            except ServerUnreachableError:
                continue  # the next poll fails as well and reports it
            except Exception as error:
                self.heartbeat_error = error

    def _report_error(self, error: Exception) -> None:
        """Report an error once, not at every retry."""
        if isinstance(error, ServerUnreachableError):
            notice = f"the server does not answer ({error}); trying again"
        elif isinstance(error, ServerRejectedError) and error.unauthorized:
            notice = (
                f"the server does not accept this client ({error}): its key may be unknown or "
                "revoked, its clock wrong, or the server starting; trying again, slowly"
            )
        elif isinstance(error, ServerRejectedError):
            notice = f"the server rejects requests ({error}); trying again"
        else:
            notice = f"the connection has failed ({describe_error(error)}); trying again"
        if notice != self.last_notice:
            self.notify(notice)
        self.last_notice = notice


def _poll_interval(idle: float) -> float:
    """Seconds until the next poll, after `idle` seconds without a message.

    It is a twentieth of the idle time: an idle client costs the server little, and one in the
    middle of a run reacts fast.
    """
    return max(_MIN_POLL, min(_MAX_POLL, idle / 20)) * random.uniform(0.8, 1.2)
