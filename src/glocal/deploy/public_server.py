"""The web server of the public port: how many connections may be open, and for how long in silence.

A connection costs memory and a file before any key is checked. So a request's header must be whole
within seconds, from the first byte of the TLS handshake on. Where too many connections are open, a
new one takes the place of the oldest without a request, so that strangers push each other out.
After a response, only connections of registered clients stay open: the gate closes all others.
"""

import asyncio
import resource
import socket
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

MAX_STRANGERS = 256  # connections beside those of the registered clients
PER_CLIENT = 4  # connections for each registered client, which needs two
HEADER_TIMEOUT = 10.0  # seconds for a request's header, the TLS handshake included
_OTHER_FILES = 64  # files that the server may open beside its connections
_CLOSE_TIMEOUT = 5.0  # seconds in which the other side may take note of the connection's end
_BACKLOG = 128  # connections that wait to be accepted
_ACCEPT_RETRY = 1.0  # seconds
_REPORT_INTERVAL = 60.0  # seconds between two reports of errors in connections


def raise_file_limit() -> None:
    """Let this process open as many files as the system allows it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # some systems state more than they allow
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def max_connections(clients: int) -> int:
    """How many connections may be open, of this many registered clients and of strangers."""
    wanted = MAX_STRANGERS + PER_CLIENT * clients
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if files == resource.RLIM_INFINITY else min(wanted, files - _OTHER_FILES)


class RareErrors:
    """Reports errors in the event loop, and no more than one a minute: strangers can cause them."""

    def __init__(self) -> None:
        self._last = -_REPORT_INTERVAL

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Report an error, or skip it."""
        if loop.time() - self._last >= _REPORT_INTERVAL:
            self._last = loop.time()
            loop.default_exception_handler(context)


class WebServer(uvicorn.Server):
    """A web server that does not handle signals: the process does."""

    def capture_signals(self) -> Any:
        """Leave signals as they are."""
        return nullcontext()


class PublicServer(WebServer):
    """A web server with limits; `max_connections()` says how many connections may be open."""

    def __init__(self, config: uvicorn.Config, max_connections: Callable[[], int]) -> None:
        super().__init__(config)
        self._max_connections = max_connections
        self._open = dict[_Connection, asyncio.Task[None]]()  # the oldest first

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections here: uvicorn accepts any number, each for a minute."""
        await super().startup(sockets=[])
        asyncio.get_running_loop().set_exception_handler(RareErrors())
        self._listener = socket.create_server(
            (self.config.host, self.config.port), backlog=_BACKLOG
        )
        self._listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more, and finish the requests that have begun."""
        self._accepting.cancel()
        while self._drop_one():
            pass
        await super().shutdown(sockets=[self._listener])

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                plain, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # for example, no file is left
                context = {"message": "a connection was not accepted", "exception": error}
                loop.call_exception_handler(context)
                await asyncio.sleep(_ACCEPT_RETRY)
                continue
            if len(self._open) < self._max_connections() or await self._make_room():
                self._begin(plain)
            else:
                plain.close()

    def _begin(self, plain: socket.socket) -> None:
        connection = _Connection(self.config, self.server_state, self.lifespan.state)
        self._open[connection] = asyncio.create_task(self._serve_one(connection, plain))
        # also if it is dropped before it has begun
        self._open[connection].add_done_callback(lambda _: plain.close())

    async def _serve_one(self, connection: "_Connection", plain: socket.socket) -> None:
        """One connection until its end."""
        loop = asyncio.get_running_loop()
        try:
            with suppress(OSError):  # its handshake has failed or takes too long
                await loop.connect_accepted_socket(
                    lambda: connection,
                    plain,
                    ssl=self.config.ssl,
                    ssl_handshake_timeout=HEADER_TIMEOUT,
                    ssl_shutdown_timeout=_CLOSE_TIMEOUT,
                )
                await connection.lost.wait()
        finally:
            connection.abort()
            self._open.pop(connection, None)

    async def _make_room(self) -> bool:
        """Drop a connection, and wait until its file is closed; False if none can be dropped."""
        dropped = self._drop_one()
        if dropped is not None:
            await asyncio.wait([dropped])
        return dropped is not None

    def _drop_one(self) -> asyncio.Task[None] | None:
        """Drop the oldest connection without a request, if there is one."""
        for connection in self._open:
            if connection.is_without_request:
                dropped = self._open.pop(connection)
                dropped.cancel()
                return dropped
        return None


class _Connection(H11Protocol):
    """A connection that is cut when a request's header has not arrived in time."""

    def __init__(self, config: uvicorn.Config, state: ServerState, app_state: Any) -> None:
        super().__init__(config, state, app_state)
        self.lost = asyncio.Event()
        self._header_timer: asyncio.TimerHandle | None = None
        self._start_header_timer()

    @property
    def is_without_request(self) -> bool:
        """Whether it has had no request yet, or has had its last response."""
        return self.cycle is None or self.transport.is_closing()

    def data_received(self, data: bytes) -> None:
        """Read a part of a request; any part that begins a header starts the time for it."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_header_timer()
        elif self._header_timer is None:
            self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note the end of the connection."""
        super().connection_lost(exc)
        self._stop_header_timer()
        self.lost.set()

    def abort(self) -> None:
        """Cut the connection; what has not been sent is lost."""
        self._stop_header_timer()
        if self.transport is not None:
            self.transport.abort()

    def _start_header_timer(self) -> None:
        self._header_timer = self.loop.call_later(HEADER_TIMEOUT, self.abort)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
