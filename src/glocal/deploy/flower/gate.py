"""The gates before Flower's server: they accept or refuse a request before its body is read.

The public gate (`FleetGate`) is for registered clients, which sign the time with their key. The
private gate (`OperatorGate`) is behind a socket file of the operator and asks for a secret as well.
Each has a list of routes; every other path is not found.
"""

import hmac
from base64 import b64decode
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol, TypeVar

from glocal.deploy.flower.server_internals import (
    CONFIRM,
    CONTROL_ROUTES,
    FLEET_ROUTES,
    KEY_HEADER,
    PULL_OBJECT,
    PUSH_MESSAGES,
    PUSH_OBJECT,
    SIGNATURE_HEADER,
    TIME_HEADER,
    is_signed_by,
    read_object_id,
    read_pushed_message,
)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = Mapping[bytes, bytes]
ResultT = TypeVar("ResultT")

MAX_AGE, MIN_AGE = 60.0, -5.0  # seconds: how old a signed time may be, and how far in the future
MAX_BODY = 2**20  # bytes of a request that holds no tensors
MAX_SENDS = 4  # times that a reply's tensors may be sent, as a connection may break


class HttpError(Exception):
    """A refused request: the HTTP status, and a reason for senders that may know it."""

    def __init__(self, status: int, reason: str = "") -> None:
        super().__init__(reason)
        self.status = status


@dataclass
class _Budget:
    """What a client may still send: one reply to each message that was sent to it."""

    replies: dict[str, bytes] = field(default_factory=dict)  # message id -> body of its reply
    size: int = 0  # bytes of tensors


class SentMessages(Protocol):
    """The server's messages to clients."""

    def awaits_reply(self, node: int, message: str) -> bool:
        """Whether that message was sent to that node and has no reply yet."""

    def has_sent(self, node: int, object_id: str) -> bool:
        """Whether an object is part of a message to that node which is not yet answered."""


@dataclass
class FleetGate:
    """Lets registered clients through to Flower's fleet interface.

    `nodes` returns the registered public keys and their nodes at this moment, so that a revoked key
    is refused at once. `sent` are the server's messages, which alone a client may read and answer.
    `max_object_bytes` limits one part of a reply. A signed time is accepted once: it must be newer
    than this gate and is remembered until it is too old, so that a recorded request is useless.
    """

    application: Application
    nodes: Callable[[], Mapping[bytes, int]]
    sent: SentMessages
    max_object_bytes: int
    opened_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    _seen: set[tuple[bytes, bytes]] = field(default_factory=set)
    _by_age: deque[tuple[datetime, tuple[bytes, bytes]]] = field(default_factory=deque)
    _budgets: dict[int, _Budget] = field(default_factory=dict)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, or pass it on."""
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
            admitted = await self._admit(scope["path"], headers, receive, node)
        except HttpError as refusal:
            return await _respond(send, refusal.status, str(refusal))
        if admitted is None:
            return await _respond(send, 200, "")
        return await self.application(scope, admitted, send)

    def authenticate(self, headers: Headers) -> int:
        """The node whose key has just signed this request, for the first time."""
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
        if before_start:  # an earlier server may have seen it
            raise HttpError(401, "the request was signed before this server started")
        # Key and time alone identify a request: anyone can turn one ECDSA signature into a second
        # valid one, so that the signature itself would not.
        if (key, stamp) in self._seen:
            raise HttpError(401, "a request that was signed at this time has come before")
        self._remember(signed_at, (key, stamp))
        return node

    def _remember(self, signed_at: datetime, request: tuple[bytes, bytes]) -> None:
        """Remember a request, and forget those that are too old to be accepted again."""
        self._seen.add(request)
        self._by_age.append((signed_at, request))
        now = datetime.now(UTC)
        while (now - self._by_age[0][0]).total_seconds() > MAX_AGE - MIN_AGE:
            self._seen.discard(self._by_age.popleft()[1])

    async def _admit(
        self, path: str, headers: Headers, receive: Receive, node: int
    ) -> Receive | None:
        """The body of an accepted request, within what this client may send now.

        None if it is about an object that is not this client's, as if there were no such object:
        the number of an object is the hash of its content, so that its presence would say what
        another client has sent.
        """
        budget = self._budgets.setdefault(node, _Budget())
        if path == PUSH_OBJECT:
            budget.size -= _length(headers, at_most=min(budget.size, self.max_object_bytes))
            return receive
        _length(headers, at_most=MAX_BODY)
        if path not in (PUSH_MESSAGES, PULL_OBJECT, CONFIRM):
            return receive
        body = await _read(receive)
        if path == PUSH_MESSAGES:
            self._require_own_reply(body, node, budget)
        elif not self.sent.has_sent(node, _parsed(read_object_id, path, body)):
            return None
        return _replay(body)

    def _require_own_reply(self, body: bytes, node: int, budget: _Budget) -> None:
        """Refuse a reply of another sender, an unexpected one, and a second one to a message."""
        pushed = _parsed(read_pushed_message, body)
        if pushed.senders != {node}:
            raise HttpError(403, "a client may reply for itself alone")
        if not self.sent.awaits_reply(node, pushed.answers):
            raise HttpError(409, "the server does not wait for this reply any more")
        if pushed.answers not in budget.replies:
            budget.replies[pushed.answers] = body
            budget.size = MAX_SENDS * self.max_object_bytes
        elif budget.replies[pushed.answers] != body:
            raise HttpError(409, "this message has another reply already")
        for message in list(budget.replies):
            if not self.sent.awaits_reply(node, message):
                del budget.replies[message]


@dataclass(frozen=True)
class OperatorGate:
    """Lets the holder of the operator's secret through to the routes that glocal's commands use."""

    application: Application
    secret: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, or pass it on."""
        try:
            if scope["type"] != "http" or scope["path"] not in CONTROL_ROUTES:
                raise HttpError(404)
            headers = _headers(scope)
            authorization = headers.get(b"authorization", b"")
            if not hmac.compare_digest(authorization, f"Bearer {self.secret}".encode()):
                raise HttpError(401)
            _length(headers, at_most=MAX_BODY)
        except HttpError as refusal:
            return await _respond(send, refusal.status, str(refusal))
        return await self.application(scope, receive, send)


def _headers(scope: Scope) -> dict[bytes, bytes]:
    """The headers; of a repeated one, gate and application could read different values."""
    headers = dict(scope["headers"])
    if len(headers) < len(scope["headers"]):
        raise HttpError(400, "a header is given twice")
    return headers


def _length(headers: Headers, *, at_most: int) -> int:
    """A body's size according to its header; the web server reads no more than that."""
    if b"transfer-encoding" in headers:  # it would make the web server ignore the length
        raise HttpError(411, "a request must give its content-length")
    try:
        size = int(headers[b"content-length"])
    except (KeyError, ValueError) as error:
        raise HttpError(411, "a request must give its content-length") from error
    if not 0 <= size <= at_most:
        raise HttpError(413, f"the body has {size} bytes, and at most {at_most} are accepted now")
    return size


def _parsed(read: Callable[..., ResultT], *arguments: object) -> ResultT:
    """What a body says; one that cannot be read is refused."""
    try:
        return read(*arguments)
    except Exception as error:  # protobuf's own
        raise HttpError(400) from error


async def _read(receive: Receive) -> bytes:
    """A whole body."""
    body, more = bytearray(), True
    while more:
        event = await receive()
        body += event.get("body", b"")
        more = event["type"] == "http.request" and event.get("more_body", False)
    return bytes(body)


def _replay(body: bytes) -> Receive:
    """A body that the gate has read, for the application to read again."""
    events = deque([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> MutableMapping[str, Any]:
        return events.popleft() if events else {"type": "http.disconnect"}

    return receive


async def _respond(send: Send, status: int, reason: str) -> None:
    """Send a short response and close the connection, so that a body on its way is not read."""
    text = reason.encode()
    headers = [(b"content-length", str(len(text)).encode()), (b"connection", b"close")]
    headers.append((b"content-type", b"text/plain; charset=utf-8"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text})
