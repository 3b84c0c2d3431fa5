"""The gates before Flower's server, request by request: who gets through, and what is never read."""

import asyncio
from base64 import b64encode
from datetime import UTC, datetime, timedelta

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import (
    decode_dss_signature,
    encode_dss_signature,
)
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import Message, Metadata
from flwr.proto.node_pb2 import Node

from glocal.deploy.flower import gate, server_internals

ORDER_P384 = int(
    "ffffffffffffffffffffffffffffffffffffffffffffffffc7634d81f4372ddf581a0db248b0a77aecec196accc52973",
    16,
)
PULL, PUSH, OBJECT = (
    f"/v1/fleet/{name}" for name in ("pull-messages", "push-messages", "push-object")
)
ASKED = {"message-to-7": 7, "message-to-8": 8}


class Key:
    """A client's key, and requests that it signs."""

    def __init__(self):
        self.private = ec.generate_private_key(ec.SECP384R1())
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        self.public = self.private.public_key().public_bytes(serialization.Encoding.PEM, form)

    def headers(self, at=None, *, length=0, stamp=None):
        stamp = (at or datetime.now(UTC)).isoformat().encode() if stamp is None else stamp
        signature = self.private.sign(stamp, ec.ECDSA(hashes.SHA256()))
        return [
            (server_internals.KEY_HEADER, b64encode(self.public)),
            (server_internals.TIME_HEADER, stamp),
            (server_internals.SIGNATURE_HEADER, b64encode(signature)),
            (b"content-length", str(length).encode()),
        ]


class Application:
    """What stands behind a gate: it counts the requests, and the bytes of their bodies."""

    def __init__(self):
        self.paths, self.bodies = [], []

    async def __call__(self, scope, receive, send):
        self.paths.append(scope["path"])
        self.bodies.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


class Door:
    """A gate with two registered clients, nodes 7 and 8, and an application behind it."""

    def __init__(self, make=None):
        self.first, self.second = Key(), Key()
        self.nodes = {self.first.public: 7, self.second.public: 8}
        self.behind, self.read = Application(), 0
        awaits_reply = lambda node, message: ASKED.get(message) == node  # noqa: E731
        opened = datetime.now(UTC) - timedelta(seconds=600)
        self.gate = gate.FleetGate(self.behind, lambda: self.nodes, awaits_reply, 1000, opened)

    def ask(self, path, headers, body=b"", method="POST"):
        """The status of the answer."""
        answered = []

        async def receive():
            self.read += len(body)
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(event):
            answered.append(event)

        scope = {"type": "http", "method": method, "path": path, "headers": headers}
        asyncio.run(self.gate(scope, receive, send))
        self.why = answered[-1]["body"].decode()
        return answered[0]["status"]

    def push(self, key, body):
        return self.ask(PUSH, key.headers(length=len(body)), body)


@pytest.fixture
def door():
    return Door()


def reply(node=7, sender=7, answers="message-to-7", run=1):
    metadata = Metadata(run_id=run, src_node_id=sender, reply_to_message_id=answers)
    request = PushMessagesRequest(
        node=Node(node_id=node), messages_list=[Message(metadata=metadata)]
    )
    return request.SerializeToString()


def test_a_registered_client_gets_through(door):
    assert door.ask(PULL, door.first.headers(length=4), b"body") == 200
    assert door.behind.bodies == [b"body"]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/start-run",
        "/v1/control/list-nodes",
        "/v1/runtime/acquire-task",
        "/v1/runtime/pull-task-input",
        "/v1/fleet/register-node",
        "/v1/fleet/unregister-node",
        "/v1/fleet/../control/start-run",
        "/v1/fleet//pull-messages",
        "/docs",
        "/openapi.json",
        "/",
    ],
)
def test_nobody_finds_another_route_than_those_of_the_fleet(path, door):
    """A registered client neither; and its body is not read."""
    assert door.ask(path, door.first.headers(length=4), b"body") == 404
    assert not door.behind.paths
    assert not door.read


def test_every_route_that_flower_has_is_behind_the_gate_but_the_ten_of_the_fleet(door):
    routes = server_internals.SuperLink("secret").app.openapi()["paths"]
    let_through = {path for path in routes if door.ask(path, door.first.headers()) == 200}
    assert let_through - {"/health"} == {*server_internals.FLEET_ROUTES} - {PUSH}
    assert {*server_internals.FLEET_ROUTES, *server_internals.CONTROL_ROUTES} <= {*routes}


def test_the_health_of_the_server_says_nothing_else(door):
    assert door.ask("/health", [], method="GET") == 200
    assert not door.why
    assert not door.behind.paths


def spoilt(headers, name, value):
    return [(key, value if key == name else kept) for key, kept in headers]


STRANGERS = {
    "no headers": lambda door: [],
    "an unknown key": lambda door: Key().headers(),
    "another's signature": lambda door: spoilt(
        door.first.headers(), server_internals.KEY_HEADER, b64encode(door.second.public)
    ),
    "no signature": lambda door: spoilt(
        door.first.headers(), server_internals.SIGNATURE_HEADER, b""
    ),
    "no base64": lambda door: spoilt(door.first.headers(), server_internals.KEY_HEADER, b"###"),
    "a minute old": lambda door: door.first.headers(datetime.now(UTC) - timedelta(seconds=61)),
    "of the future": lambda door: door.first.headers(datetime.now(UTC) + timedelta(seconds=10)),
    "of no time zone": lambda door: door.first.headers(stamp=b"2026-01-01T00:00:00"),
    "of no time": lambda door: door.first.headers(stamp=b"now"),
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_request_that_no_registered_key_signed_just_now_is_refused_unread(kind, door):
    assert door.ask(PULL, STRANGERS[kind](door), b"x" * 300) == 401
    assert not door.behind.paths
    assert not door.read


def test_a_recorded_request_is_refused_for_any_route(door):
    recorded = door.first.headers()
    assert door.ask(PULL, recorded) == 200
    assert [door.ask(path, recorded) for path in (PULL, "/v1/fleet/deactivate-node")] == [401, 401]
    assert "has come before" in door.why


def test_a_recorded_request_is_refused_with_a_second_valid_signature_too(door):
    """Of an ECDSA signature (r, s), anybody can make (r, n - s), which is as valid."""
    recorded = door.first.headers()
    assert door.ask(PULL, recorded) == 200
    signature = dict(recorded)[server_internals.SIGNATURE_HEADER]
    r, s = decode_dss_signature(__import__("base64").b64decode(signature))
    twin = encode_dss_signature(r, ORDER_P384 - s)
    stamp = dict(recorded)[server_internals.TIME_HEADER]
    assert server_internals.is_signed_by(door.first.public, stamp, twin)
    again = spoilt(recorded, server_internals.SIGNATURE_HEADER, b64encode(twin))
    assert door.ask(PULL, again) == 401


def test_a_request_that_was_recorded_before_a_restart_is_refused(door):
    recorded = door.first.headers(datetime.now(UTC) - timedelta(seconds=5))
    door.gate.opened = datetime.now(UTC) - timedelta(seconds=2)
    assert door.ask(PULL, recorded) == 401
    assert "before this server started" in door.why


def test_what_was_seen_is_remembered_for_as_long_as_it_could_be_replayed(door):
    for age in (59, 30, 1):
        assert door.ask(PULL, door.first.headers(datetime.now(UTC) - timedelta(seconds=age))) == 200
    assert len(door.gate._seen) == 3
    door.gate._by_age[0] = (datetime.now(UTC) - timedelta(seconds=66), door.gate._by_age[0][1])
    assert door.ask(PULL, door.first.headers()) == 200
    assert len(door.gate._seen) == 3


def test_two_clients_may_sign_the_same_moment(door):
    now = datetime.now(UTC)
    assert [door.ask(PULL, key.headers(now)) for key in (door.first, door.second)] == [200, 200]


def test_a_header_that_is_given_twice_is_refused(door):
    """The gate could take one of them, and Flower the other: that of a recorded request."""
    doubled = [*door.second.headers(), *door.first.headers()]
    assert door.ask(PULL, doubled) == 400
    assert not door.behind.paths


def test_a_revoked_key_is_refused_from_its_next_request_on(door):
    assert door.ask(PULL, door.first.headers()) == 200
    del door.nodes[door.first.public]
    assert door.ask(PULL, door.first.headers()) == 401
    assert door.ask(PULL, door.second.headers()) == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([], 411),
        ([(b"content-length", b"many")], 411),
        ([(b"content-length", b"-1")], 413),
        ([(b"content-length", str(300 * 2**20).encode())], 413),
        ([(b"content-length", b"10"), (b"transfer-encoding", b"chunked")], 411),
    ],
    ids=["none", "no number", "negative", "300 MB", "chunked"],
)
@pytest.mark.parametrize("path", [PULL, PUSH, OBJECT])
def test_a_body_without_a_length_or_with_too_large_a_one_is_never_read(path, headers, status, door):
    signed = [header for header in door.first.headers() if header[0] != b"content-length"]
    assert door.ask(path, [*signed, *headers], b"x" * 300) == status
    assert not door.read


def test_a_client_replies_for_itself_to_what_it_was_asked(door):
    assert door.push(door.first, reply()) == 200
    assert door.behind.bodies == [reply()]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (reply(sender=8), 403),
        (reply(node=8, sender=8, answers="message-to-8"), 403),
        (reply(answers="message-to-8"), 409),
        (reply(answers="message-to-nobody"), 409),
        (b"\xff\xff\xff", 400),
    ],
    ids=["as another", "wholly as another", "to another's", "to none", "unreadable"],
)
def test_a_client_cannot_reply_for_another_nor_to_what_it_was_not_asked(body, status, door):
    assert door.push(door.first, body) == status
    assert not door.behind.paths


def test_a_message_has_one_reply_which_may_be_sent_again(door):
    assert door.push(door.first, reply()) == 200
    assert door.push(door.first, reply()) == 200
    assert door.push(door.first, reply(run=2)) == 409


def test_the_parts_of_a_reply_are_limited_one_by_one_and_in_all(door):
    part = lambda size: door.ask(OBJECT, door.first.headers(length=size))  # noqa: E731
    assert part(10) == 413, "it has been asked nothing, and has nothing to send"
    assert door.push(door.first, reply()) == 200
    assert [part(size) for size in (1001, 1000, 1000, 1000, 900, 101, 100, 1)] == [
        413, 200, 200, 200, 200, 413, 200, 413,
    ]  # fmt: skip
    assert door.push(door.first, reply()) == 200
    assert part(1) == 413, "the same reply once more gives no new allowance"


def test_a_reply_to_the_next_message_has_an_allowance_of_its_own(door, monkeypatch):
    assert door.push(door.first, reply()) == 200
    monkeypatch.setitem(ASKED, "message-to-7", None)
    monkeypatch.setitem(ASKED, "next", 7)
    assert door.push(door.first, reply(answers="next")) == 200
    assert door.ask(OBJECT, door.first.headers(length=1000)) == 200
    assert [*door.gate._budgets[7].replies] == ["next"], "what is answered is forgotten"


def test_pulling_is_not_changed_by_the_gate(door):
    body = PullMessagesRequest(node=Node(node_id=7)).SerializeToString()
    assert door.ask(PULL, door.first.headers(length=len(body)), body) == 200
    assert door.behind.bodies == [body]


@pytest.mark.parametrize("kind", ["websocket", "unknown"])
def test_what_is_no_http_request_is_refused(kind, door):
    answered = []

    async def send(event):
        answered.append(event)

    asyncio.run(door.gate({"type": kind, "path": PULL, "headers": []}, None, send))
    assert answered[0]["status"] == 404


OPERATOR = [(b"authorization", b"Bearer right"), (b"content-length", b"0")]


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/control/start-run", OPERATOR, 200),
        ("/v1/control/list-nodes", OPERATOR, 200),
        ("/v1/control/start-run", OPERATOR[1:], 401),
        ("/v1/control/start-run", [(b"authorization", b"Bearer wrong"), OPERATOR[1]], 401),
        ("/v1/control/start-run", [(b"authorization", b"right"), OPERATOR[1]], 401),
        ("/v1/control/start-run", [OPERATOR[0], *OPERATOR], 400),
        ("/v1/control/start-run", [OPERATOR[0], (b"content-length", b"99999999")], 413),
        ("/v1/control/register-node", OPERATOR, 404),
        ("/v1/control/get-login-details", [], 404),
        ("/v1/control/add-app", OPERATOR, 404),
        ("/v1/runtime/acquire-task", OPERATOR, 404),
        ("/v1/fleet/pull-messages", OPERATOR, 404),
        ("/docs", OPERATOR, 404),
    ],
)
def test_an_operator_needs_the_secret_and_finds_the_routes_of_glocals_commands(
    path, headers, status
):
    door = Door()
    door.gate = gate.OperatorGate(door.behind, "right")
    assert door.ask(path, headers) == status
    assert len(door.behind.paths) == (status == 200)
