"""What stands before Flower's server: who may ask it what, decided before it reads a body.

Two doors. The public one (`FleetGate`) is for registered clients, who sign the time with their key;
the private one (`OperatorGate`) is a socket file of the operator's, and asks for a secret as well.
Whatever is not on a door's list of routes is not there.
"""

import hmac
from base64 import b64decode
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from glocal.deploy.flower.server_internals import (
    CONTROL_ROUTES,
    FLEET_ROUTES,
    KEY_HEADER,
    PUSH_MESSAGES,
    PUSH_OBJECT,
    SIGNATURE_HEADER,
    TIME_HEADER,
    is_signed_by,
    read_pushed_messages,
)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = Mapping[bytes, bytes]

MAX_AGE, MIN_AGE = 60.0, -5.0  # seconds: how old a signed time may be, and how far ahead a clock
MAX_BODY = 2**20  # bytes: of a request that holds no tensors
MAX_SENDS = 4  # times that a reply's tensors may be sent, for a line may break


class HttpError(Exception):
    """A request that goes no further: HTTP status, and a reason for those who may know it."""

    def __init__(self, status: int, why: str = "") -> None:
        super().__init__(why)
        self.status = status


@dataclass
class _Budget:
    """What a client may still send: one reply to each message that it was asked to answer."""

    replies: dict[str, bytes] = field(default_factory=dict)  # message answered -> the body it got
    size: int = 0


@dataclass
class FleetGate:
    """Lets registered clients through to Flower's fleet interface.

    `nodes` gives the registered public keys and their nodes now, so that a key that is revoked is
    refused at once. `awaits(node, message)` says whether a reply is still waited for. `max_object_bytes` is
    the most bytes that one part of a reply may have. A signed time is accepted once: it must be newer than
    this gate, and is remembered until it is too old, so that a recorded request is of no use.
    """

    application: Application
    nodes: Callable[[], Mapping[bytes, int]]
    awaits_reply: Callable[[int, str], bool]
    max_object_bytes: int
    opened_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    _seen: set[tuple[bytes, bytes]] = field(default_factory=set)
    _by_age: deque[tuple[datetime, tuple[bytes, bytes]]] = field(default_factory=deque)
    _budgets: dict[int, _Budget] = field(default_factory=dict)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or hand it on."""
        if scope["type"] == "lifespan":
            return await self.application(scope, receive, send)
        try:
            if scope["type"] != "http":
                raise HttpError(404)
            if scope["path"] == "/health":
                return await _respond(send, 200, "")
            if scope["path"] not in FLEET_ROUTES or scope["method"] != "POST":
                raise HttpError(404)
            headers = _headers(scope)
            node = self.authenticate(headers)
            receive = await self._admit(scope["path"], headers, receive, node)
        except HttpError as refusal:
            return await _respond(send, refusal.status, str(refusal))
        return await self.application(scope, receive, send)

    def authenticate(self, headers: Headers) -> int:
        """The node whose key signed this request a moment ago, and not before."""
        try:
            key = b64decode(headers[KEY_HEADER], validate=True)
            signature = b64decode(headers[SIGNATURE_HEADER], validate=True)
            stamp = headers[TIME_HEADER]
            node = self.nodes()[key]
            if not is_signed_by(key, stamp, signature):
                raise HttpError(401)
            signed_at = datetime.fromisoformat(stamp.decode("ascii"))
            age = (datetime.now(UTC) - signed_at).total_seconds()
            before_start = signed_at <= self.opened_at
        except (KeyError, ValueError, TypeError) as error:
            raise HttpError(401) from error
        if not MIN_AGE < age < MAX_AGE:
            raise HttpError(401, f"the request was signed {age:.0f} s ago by the server's clock")
        if before_start:  # what came to an earlier server is not known here
            raise HttpError(401, "the request was signed before this server started")
        # the key and the time alone: of one signature, anybody can make a second that is valid
        if (key, stamp) in self._seen:
            raise HttpError(401, "a request that was signed at this time has come before")
        self._remember(signed_at, (key, stamp))
        return node

    def _remember(self, signed_at: datetime, request: tuple[bytes, bytes]) -> None:
        """Note a request, and forget those whose time would be refused by now."""
        self._seen.add(request)
        self._by_age.append((signed_at, request))
        now = datetime.now(UTC)
        while (now - self._by_age[0][0]).total_seconds() > MAX_AGE - MIN_AGE:
            self._seen.discard(self._by_age.popleft()[1])

    async def _admit(self, path: str, headers: Headers, receive: Receive, node: int) -> Receive:
        """The body of a request that may go on, within what this client may send now."""
        budget = self._budgets.setdefault(node, _Budget())
        if path == PUSH_OBJECT:
            budget.size -= _length(headers, at_most=min(budget.size, self.max_object_bytes))
            return receive
        _length(headers, at_most=MAX_BODY)
        if path != PUSH_MESSAGES:
            return receive
        body = await _read(receive)
        self._require_own_reply(body, node, budget)
        return _replay(body)

    def _require_own_reply(self, body: bytes, node: int, budget: _Budget) -> None:
        """A client speaks for itself, once to each message it was asked to answer."""
        try:
            pushed = read_pushed_messages(body)
        except Exception as error:  # protobuf's own
            raise HttpError(400) from error
        if pushed.senders != {node}:
            raise HttpError(403, "a client may reply for itself alone")
        for message in pushed.answers:
            if not self.awaits_reply(node, message):
                raise HttpError(409, "this reply is not waited for any more")
            if message not in budget.replies:
                budget.replies[message], budget.size = body, MAX_SENDS * self.max_object_bytes
            elif budget.replies[message] != body:
                raise HttpError(409, "this message has another reply already")
        budget.replies = {
            message: kept
            for message, kept in budget.replies.items()
            if self.awaits_reply(node, message)
        }


@dataclass(frozen=True)
class OperatorGate:
    """Lets who knows the operator's secret through to the routes that glocal's commands use."""

    application: Application
    secret: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or hand it on."""
        try:
            if scope["type"] != "http" or scope["path"] not in CONTROL_ROUTES:
                raise HttpError(404)
            headers = _headers(scope)
            shown = headers.get(b"authorization", b"")
            if not hmac.compare_digest(shown, f"Bearer {self.secret}".encode()):
                raise HttpError(401)
            _length(headers, at_most=MAX_BODY)
        except HttpError as refusal:
            return await _respond(send, refusal.status, str(refusal))
        return await self.application(scope, receive, send)


def _headers(scope: Scope) -> dict[bytes, bytes]:
    """The headers; one that is given twice could be read otherwise by the application behind."""
    headers = dict(scope["headers"])
    if len(headers) < len(scope["headers"]):
        raise HttpError(400, "a header was given twice")
    return headers


def _length(headers: Headers, *, at_most: int) -> int:
    """The size of a body as its header says it; the web server reads no more than that."""
    if b"transfer-encoding" in headers:  # it would make the web server ignore the length
        raise HttpError(411, "a request must say how long it is")
    try:
        size = int(headers[b"content-length"])
    except (KeyError, ValueError) as error:
        raise HttpError(411, "a request must say how long it is") from error
    if not 0 <= size <= at_most:
        raise HttpError(413, f"{size} bytes are sent, and at most {at_most} are accepted now")
    return size


async def _read(receive: Receive) -> bytes:
    """A whole body."""
    body, more = bytearray(), True
    while more:
        event = await receive()
        body += event.get("body", b"")
        more = event["type"] == "http.request" and event.get("more_body", False)
    return bytes(body)


def _replay(body: bytes) -> Receive:
    """A body that was read already, for the application to read."""
    events = deque([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> MutableMapping[str, Any]:
        return events.popleft() if events else {"type": "http.disconnect"}

    return receive


async def _respond(send: Send, status: int, why: str) -> None:
    """A short answer, after which the connection is closed: a body on its way is not read."""
    text = why.encode()
    headers = [(b"content-length", str(len(text)).encode()), (b"connection", b"close")]
    headers.append((b"content-type", b"text/plain; charset=utf-8"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text})
