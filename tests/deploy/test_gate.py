"""The gates before Flower's server: which requests pass, and which bodies are never read."""

import asyncio
from base64 import b64decode, b64encode
from datetime import UTC, datetime, timedelta

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import (
    decode_dss_signature,
    encode_dss_signature,
)
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    Message,
    Metadata,
    ObjectTree,
    PullObjectRequest,
)
from flwr.proto.node_pb2 import Node

from glocal.deploy.flower import gate, server_internals

ORDER_P384 = int(
    "ffffffffffffffffffffffffffffffffffffffffffffffffc7634d81f4372ddf581a0db248b0a77aecec196accc52973",
    16,
)
PULL, PUSH, OBJECT = (
    f"/v1/fleet/{name}" for name in ("pull-messages", "push-messages", "push-object")
)
PULL_OBJECT, CONFIRM = "/v1/fleet/pull-object", "/v1/fleet/confirm-message-received"
PENDING = {"message-to-7": 7, "message-to-8": 8}


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
    """The application behind a gate: it records paths and bodies of the requests that pass."""

    def __init__(self):
        self.paths, self.bodies = [], []

    async def __call__(self, scope, receive, send):
        self.paths.append(scope["path"])
        self.bodies.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


class Sent:
    """The server's messages: one object each, and who is to answer."""

    def awaits_reply(self, node, message):
        return PENDING.get(message) == node

    def has_sent(self, node, object_id):
        return object_id == f"object-for-{node}"


class GateFixture:
    """A gate with two registered clients, nodes 7 and 8, and an application behind it."""

    def __init__(self, make=None):
        self.first, self.second = Key(), Key()
        self.nodes = {self.first.public: 7, self.second.public: 8}
        self.behind, self.read = Application(), 0
        opened_at = datetime.now(UTC) - timedelta(seconds=600)
        self.gate = gate.FleetGate(self.behind, lambda: self.nodes, Sent(), 1000, opened_at)

    def request(self, path, headers, body=b"", method="POST"):
        """The status of the response."""
        events = []

        async def receive():
            self.read += len(body)
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(event):
            events.append(event)

        scope = {"type": "http", "method": method, "path": path, "headers": headers}
        asyncio.run(self.gate(scope, receive, send))
        self.reason = events[-1]["body"].decode()
        self.headers = events[0]["headers"]
        return events[0]["status"]

    def push(self, key, body):
        return self.request(PUSH, key.headers(length=len(body)), body)


@pytest.fixture
def fixture():
    return GateFixture()


def leaf(letter):
    return ObjectTree(object_id=letter * 64)


def tree(letter, *children):
    return ObjectTree(object_id=letter * 64, children=children)


def reply(node=7, sender=7, reply_to="message-to-7", run=1, trees=None, messages=1):
    metadata = Metadata(
        run_id=run, message_id="a" * 64, src_node_id=sender, reply_to_message_id=reply_to
    )
    request = PushMessagesRequest(
        node=Node(node_id=node),
        messages_list=[Message(metadata=metadata)] * messages,
        message_object_trees=(leaf("a"),) if trees is None else trees,
    )
    return request.SerializeToString()


def test_a_registered_client_gets_through(fixture):
    assert fixture.request(PULL, fixture.first.headers(length=4), b"body") == 200
    assert fixture.behind.bodies == [b"body"]


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
def test_no_other_route_than_those_of_the_fleet_is_found(path, fixture):
    """Not by a registered client either, and its body is not read."""
    assert fixture.request(path, fixture.first.headers(length=4), b"body") == 404
    assert not fixture.behind.paths
    assert not fixture.read


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "post"])
def test_no_other_method_than_post_is_found(method, fixture):
    assert fixture.request(PULL, fixture.first.headers(length=4), b"body", method) == 404
    assert not fixture.behind.paths


@pytest.mark.parametrize("path", [PULL, "/docs", "/health"])
def test_every_response_of_the_gate_itself_closes_the_connection(path, fixture):
    """A body that was announced is not read, and a stranger keeps no connection."""
    fixture.request(path, [])
    assert (b"connection", b"close") in fixture.headers


def test_all_of_flowers_routes_but_ten_of_the_fleet_are_closed(fixture):
    routes = server_internals.SuperLink("secret").app.openapi()["paths"]
    let_through = {path for path in routes if fixture.request(path, fixture.first.headers()) == 200}
    assert let_through - {"/health"} == {*server_internals.FLEET_ROUTES} - {PUSH}
    assert {*fixture.behind.paths} == let_through - {"/health", PULL_OBJECT, CONFIRM}
    assert {*server_internals.FLEET_ROUTES, *server_internals.CONTROL_ROUTES} <= {*routes}


def test_the_health_route_says_nothing_else(fixture):
    assert fixture.request("/health", [], method="GET") == 200
    assert not fixture.reason
    assert not fixture.behind.paths


def with_header(headers, name, value):
    return [(key, value if key == name else own) for key, own in headers]


UNAUTHENTICATED = {
    "no headers": lambda fixture: [],
    "an unknown key": lambda fixture: Key().headers(),
    "another's signature": lambda fixture: with_header(
        fixture.first.headers(), server_internals.KEY_HEADER, b64encode(fixture.second.public)
    ),
    "no signature": lambda fixture: with_header(
        fixture.first.headers(), server_internals.SIGNATURE_HEADER, b""
    ),
    "no base64": lambda fixture: with_header(
        fixture.first.headers(), server_internals.KEY_HEADER, b"###"
    ),
    "a minute old": lambda fixture: fixture.first.headers(
        datetime.now(UTC) - timedelta(seconds=61)
    ),
    "from the future": lambda fixture: fixture.first.headers(
        datetime.now(UTC) + timedelta(seconds=10)
    ),
    "without a time zone": lambda fixture: fixture.first.headers(stamp=b"2026-01-01T00:00:00"),
    "not a time": lambda fixture: fixture.first.headers(stamp=b"now"),
}


@pytest.mark.parametrize("kind", UNAUTHENTICATED)
def test_a_request_that_no_registered_key_signed_just_now_is_refused_unread(kind, fixture):
    assert fixture.request(PULL, UNAUTHENTICATED[kind](fixture), b"x" * 300) == 401
    assert not fixture.behind.paths
    assert not fixture.read


def test_a_recorded_request_is_refused_for_any_route(fixture):
    recorded = fixture.first.headers()
    assert fixture.request(PULL, recorded) == 200
    assert [fixture.request(path, recorded) for path in (PULL, "/v1/fleet/deactivate-node")] == [
        401,
        401,
    ]
    assert "has come before" in fixture.reason


def test_a_recorded_request_is_refused_with_a_second_valid_signature_too(fixture):
    """From an ECDSA signature (r, s), anyone can make (r, n - s), which is valid too."""
    recorded = fixture.first.headers()
    assert fixture.request(PULL, recorded) == 200
    signature = dict(recorded)[server_internals.SIGNATURE_HEADER]
    r, s = decode_dss_signature(b64decode(signature))
    twin = encode_dss_signature(r, ORDER_P384 - s)
    stamp = dict(recorded)[server_internals.TIME_HEADER]
    assert server_internals.is_signed_by(fixture.first.public, stamp, twin)
    again = with_header(recorded, server_internals.SIGNATURE_HEADER, b64encode(twin))
    assert fixture.request(PULL, again) == 401


def test_a_request_that_was_recorded_before_a_restart_is_refused(fixture):
    recorded = fixture.first.headers(datetime.now(UTC) - timedelta(seconds=5))
    fixture.gate.opened_at = datetime.now(UTC) - timedelta(seconds=2)
    assert fixture.request(PULL, recorded) == 401
    assert "before this server started" in fixture.reason


def test_a_request_is_remembered_for_as_long_as_it_could_be_replayed(fixture):
    for age in (59, 30, 1):
        assert (
            fixture.request(PULL, fixture.first.headers(datetime.now(UTC) - timedelta(seconds=age)))
            == 200
        )
    assert len(fixture.gate._seen) == 3
    fixture.gate._by_age[0] = (
        datetime.now(UTC) - timedelta(seconds=66),
        fixture.gate._by_age[0][1],
    )
    assert fixture.request(PULL, fixture.first.headers()) == 200
    assert len(fixture.gate._seen) == 3


def test_two_clients_may_sign_the_same_moment(fixture):
    now = datetime.now(UTC)
    assert [fixture.request(PULL, key.headers(now)) for key in (fixture.first, fixture.second)] == [
        200,
        200,
    ]


def test_a_repeated_header_is_refused(fixture):
    """The gate could read one of the values, and Flower the other, of a recorded request."""
    doubled = [*fixture.second.headers(), *fixture.first.headers()]
    assert fixture.request(PULL, doubled) == 400
    assert not fixture.behind.paths


def test_a_revoked_key_is_refused_from_its_next_request_on(fixture):
    assert fixture.request(PULL, fixture.first.headers()) == 200
    del fixture.nodes[fixture.first.public]
    assert fixture.request(PULL, fixture.first.headers()) == 401
    assert fixture.request(PULL, fixture.second.headers()) == 200


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
def test_a_body_without_a_length_or_with_a_large_one_is_never_read(path, headers, status, fixture):
    signed = [header for header in fixture.first.headers() if header[0] != b"content-length"]
    assert fixture.request(path, [*signed, *headers], b"x" * 300) == status
    assert not fixture.read


def test_a_client_replies_for_itself_to_its_own_messages(fixture):
    assert fixture.push(fixture.first, reply()) == 200
    assert fixture.behind.bodies == [reply()]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (reply(sender=8), 403),
        (reply(node=8, sender=8, reply_to="message-to-8"), 403),
        (reply(reply_to="message-to-8"), 409),
        (reply(reply_to="message-to-none"), 409),
        (b"\xff\xff\xff", 400),
    ],
    ids=["as another", "wholly as another", "to another's", "to none", "unreadable"],
)
def test_a_client_cannot_reply_for_another_nor_to_other_messages(body, status, fixture):
    assert fixture.push(fixture.first, body) == status
    assert not fixture.behind.paths


BAD_TREES = {
    "no tree": {"trees": ()},
    "two trees": {"trees": (leaf("a"), leaf("b"))},
    "two messages": {"messages": 2},
    "the tree of another message": {"trees": (leaf("b"),)},
    "no number": {"trees": (tree("a", leaf("z")),)},
    "two lists of children": {"trees": (tree("a", tree("b", leaf("c")), leaf("b")),)},
    "its own child": {"trees": (tree("a", leaf("a")),)},
}


@pytest.mark.parametrize("kind", BAD_TREES)
def test_a_reply_whose_objects_flower_would_trip_over_is_refused(kind, fixture):
    assert fixture.push(fixture.first, reply(**BAD_TREES[kind])) == 400
    assert not fixture.behind.paths


def test_the_same_object_may_be_in_a_reply_twice(fixture):
    twice = tree("a", tree("b", leaf("c")), tree("b", leaf("c")), leaf("c"))
    assert fixture.push(fixture.first, reply(trees=(twice,))) == 200


@pytest.mark.parametrize("path", [PULL_OBJECT, CONFIRM])
def test_a_client_asks_for_objects_that_were_sent_to_it_and_learns_nothing_of_others(path, fixture):
    def ask(object_id):
        if path == PULL_OBJECT:
            body = PullObjectRequest(object_id=object_id).SerializeToString()
        else:
            body = ConfirmMessageReceivedRequest(message_object_id=object_id).SerializeToString()
        return fixture.request(path, fixture.first.headers(length=len(body)), body)

    assert ask("object-for-7") == 200
    assert fixture.behind.paths == [path]
    assert ask("object-for-8") == ask("object-for-nobody") == 200
    assert fixture.behind.paths == [path]
    assert not fixture.reason
    assert fixture.request(path, fixture.first.headers(length=2), b"\xff\xff") == 400


def test_a_message_has_one_reply_which_may_be_sent_again(fixture):
    assert fixture.push(fixture.first, reply()) == 200
    assert fixture.push(fixture.first, reply()) == 200
    assert fixture.push(fixture.first, reply(run=2)) == 409


def test_the_parts_of_a_reply_are_limited_one_by_one_and_in_all(fixture):
    part = lambda size: fixture.request(OBJECT, fixture.first.headers(length=size))  # noqa: E731
    assert part(10) == 413, "it has no message to reply to"
    assert fixture.push(fixture.first, reply()) == 200
    assert [part(size) for size in (1001, 1000, 1000, 1000, 900, 101, 100, 1)] == [
        413, 200, 200, 200, 200, 413, 200, 413,
    ]  # fmt: skip
    assert fixture.push(fixture.first, reply()) == 200
    assert part(1) == 413, "the same reply again gives no new budget"


def test_a_reply_to_the_next_message_has_a_budget_of_its_own(fixture, monkeypatch):
    assert fixture.push(fixture.first, reply()) == 200
    monkeypatch.setitem(PENDING, "message-to-7", None)
    monkeypatch.setitem(PENDING, "next", 7)
    assert fixture.push(fixture.first, reply(reply_to="next")) == 200
    assert fixture.request(OBJECT, fixture.first.headers(length=1000)) == 200
    assert [*fixture.gate._budgets[7].replies] == ["next"], "a message with a reply is forgotten"


def test_pulling_is_not_changed_by_the_gate(fixture):
    body = PullMessagesRequest(node=Node(node_id=7)).SerializeToString()
    assert fixture.request(PULL, fixture.first.headers(length=len(body)), body) == 200
    assert fixture.behind.bodies == [body]


@pytest.mark.parametrize("kind", ["websocket", "unknown"])
def test_other_requests_than_http_are_refused(kind, fixture):
    events = []

    async def send(event):
        events.append(event)

    asyncio.run(fixture.gate({"type": kind, "path": PULL, "headers": []}, None, send))
    assert events[0]["status"] == 404


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
def test_an_operator_needs_the_secret_and_finds_only_the_routes_of_glocals_commands(
    path, headers, status
):
    fixture = GateFixture()
    fixture.gate = gate.OperatorGate(fixture.behind, "right")
    assert fixture.request(path, headers) == status
    assert len(fixture.behind.paths) == (status == 200)
