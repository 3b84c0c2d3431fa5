"""Server and clients over Flower's own protocol in one process: every request passes the gates, no socket is opened."""

import asyncio
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from flwr.proto.control_pb2 import StopRunRequest
from flwr.proto.fleet_pb2 import (
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
    UnregisterNodeFleetRequest,
)
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import Metadata, ObjectTree, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from flwr.supercore.constant import HEAD_BODY_DIVIDER
from flwr.supercore.inflatable.inflatable_object import get_object_id

from glocal.core.files import read_json, read_rows
from glocal.core.trees import same_bits
from glocal.deploy.certificates import CA, read_client_key
from glocal.deploy.client_process import prepare_client
from glocal.deploy.connection import Connection
from glocal.deploy.flower.client_app import client_app
from glocal.deploy.flower.client_internals import (
    ClientAppRunner,
    FleetConnection,
    ServerRejectedError,
    ServerUnreachableError,
)
from glocal.deploy.flower.gate import FleetGate, OperatorGate
from glocal.deploy.flower.server_internals import SuperLink, control_connection, run_tasks
from glocal.deploy.project import Project
from glocal.deploy.registry import revoke
from glocal.deploy.scaffold import KEY
from glocal.deploy.server import RunServer
from glocal.deploy.server_process import RegisteredNodes, _run_to_end
from tests.deploy.test_flower import private_of, secured, simulated
from tests.support import deployed
from tests.support.world import distance

LOOP = asyncio.new_event_loop()
threading.Thread(target=LOOP.run_forever, daemon=True).start()


class Calls(httpx.BaseTransport):
    """Requests as calls of an application in this process."""

    def __init__(self, application):
        self.application = application

    def handle_request(self, request):
        answered = []

        async def receive():
            return {"type": "http.request", "body": request.content, "more_body": False}

        async def send(event):
            answered.append(event)

        scope = {
            "type": "http",
            "method": request.method,
            "path": request.url.path,
            "raw_path": request.url.raw_path,
            "query_string": b"",
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
            "client": ("here", 0),
        }
        asyncio.run_coroutine_threadsafe(self.application()(scope, receive, send), LOOP).result()
        body = b"".join(event.get("body", b"") for event in answered[1:])
        return httpx.Response(answered[0]["status"], headers=answered[0]["headers"], content=body)


class FederatedData:
    """A server in this process, and clients that reach it by calls instead of a network."""

    def __init__(self, folder):
        self.folder, self.said, self.stop = Path(folder), [], threading.Event()
        self.connections, self.threads, self.lock = {}, [], threading.Lock()
        self.serve()

    def serve(self):
        """Start the server, or start it anew."""
        self.link = SuperLink("secret")
        self.registered = RegisteredNodes(self.folder, self.link, self.said.append)
        self.registered.nodes()
        self.gate = FleetGate(self.link.app, self.registered.nodes, self.link.awaits_reply, 2**20)
        operator = OperatorGate(self.link.app, "secret")
        self.operator = control_connection(
            httpx.Client(transport=Calls(lambda: operator)), "secret"
        )
        work = lambda grid, config: _run_to_end(self.folder, self.gate, grid, config)  # noqa: E731
        serving = threading.Thread(
            target=run_tasks, args=(self.link, work, self.stop), kwargs={"every": 0.01}, daemon=True
        )
        serving.start()

    def fleet(self, name):
        own = self.folder / "clients" / name
        fleet = FleetConnection.to(
            "127.0.0.1:1", (own / CA).read_bytes(), read_client_key(own / KEY)
        )
        fleet.client._client = httpx.Client(transport=Calls(lambda: self.gate))
        return fleet

    def connect(self, *names, make=Connection):
        for name in names:
            own = self.folder / "clients" / name
            member = prepare_client(own, self.said.append)
            app = client_app(lambda _, member=member: member)
            handler = ClientAppRunner(app, {"folder": str(own)}, member.project.importable)
            connection = make(
                self.fleet(name), handler, own / "state/node", self.said.append, self.lock
            )
            self.connections[name] = connection
            self.threads.append(threading.Thread(target=connection.run, daemon=True))
            self.threads[-1].start()
        return self.connections[names[-1]]

    def run(self, run="first", **more):
        """Start a run, wait for its end, and give Flower's own word for it."""
        number = self.operator.start({"run": run, **more})
        self.until(lambda: self.operator.run(number).finished)
        return self.operator.run(number).details

    def until(self, holds, seconds=60):
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, "\n".join(self.said)
            time.sleep(0.02)

    def rows(self, run="first"):
        return read_rows(self.folder / "runs" / run / "rows.jsonl")


@contextmanager
def federation(folder):
    these = FederatedData(folder)
    try:
        yield these
    finally:
        these.stop.set()
        for connection in these.connections.values():
            connection.stop.set()
        for thread in these.threads:
            thread.join(20)


EVERYBODY = [f"device-{number}" for number in range(4)]


@pytest.mark.parametrize("algorithm", ["lg_fedavg", "mtl"])
def test_over_the_protocol_come_the_simulators_bits(algorithm, tmp_path):
    folder = deployed.project(tmp_path / "here", algorithm=algorithm, clients_per_round=3)
    state, sent = simulated(folder)
    with federation(folder) as these:
        these.connect(*EVERYBODY)
        assert these.run() == "completed"
    conductor = RunServer(Project.from_folder(folder), "first")
    assert same_bits(conductor.shared, state.shared)
    for device in range(4):
        assert same_bits(private_of(folder, device).after, state.private.of(device))
    ledger = conductor.state.ledger
    assert ledger.download.bytes + ledger.upload.bytes == sent


def test_secure_aggregation_goes_over_the_protocol_too(tmp_path):
    folder = secured(deployed.project(tmp_path / "here", rounds=2))
    state, _ = simulated(folder)
    with federation(folder) as these:
        these.connect(*EVERYBODY)
        assert these.run() == "completed"
    assert distance(RunServer(Project.from_folder(folder), "first").shared, state.shared) <= 1e-3
    assert [len(row["clients"]) for row in these.rows()] == [4, 4]


def hostile(attack, when=("1", "train")):
    """A registered client that does as it should, but in its second round what `attack` does."""

    def answer(self, received, node):
        asked = received.message.metadata
        if (asked.group_id, asked.message_type) == when:
            attack(self, received, node)
        else:
            Connection._answer(self, received, node)

    return type("Hostile", (Connection,), {"_answer": answer})


def content(kind, body, children=()):
    """An object as Flower stores it."""
    names = ",".join(get_object_id(child) for child in children)
    return f"{kind} {names} {len(body)}".encode() + HEAD_BODY_DIVIDER + body


def push(connection, received, node, root, *others, metadata=None):
    """A reply made by hand: metadata as they should be, and whatever objects."""
    asked = received.message.metadata
    proper = {
        "run_id": received.run,
        "message_id": get_object_id(root),
        "src_node_id": node,
        "dst_node_id": 1,
        "reply_to_message_id": asked.message_id,
        "group_id": asked.group_id,
        "created_at": time.time(),
        "ttl": 60.0,
        "message_type": asked.message_type,
    }
    children = [ObjectTree(object_id=get_object_id(other)) for other in others]
    request = PushMessagesRequest(
        node=Node(node_id=node),
        messages_list=[
            ProtoMessage(
                metadata=Metadata(**{**proper, **(metadata or {})}), content=ProtoRecordDict()
            )
        ],
        message_object_trees=[ObjectTree(object_id=get_object_id(root), children=children)],
    )
    client = connection.fleet.client
    session = client.PushMessages(request).session_id
    for part in (*others, root):
        stored = PushObjectRequest(
            node=Node(node_id=node),
            run_id=received.run,
            object_id=get_object_id(part),
            object_content=part,
            session_id=session,
        )
        client.PushObject(stored)


def unreadable(connection, received, node):
    push(connection, received, node, content("Message", b"no protobuf at all"))


def of_another_class(connection, received, node):
    push(connection, received, node, content("ConfigRecord", b""))


def with_a_deep_tree(connection, received, node):
    """Every object has the one before as its child, deeper than Python may call."""
    parts = [content("RecordDict", b"")]
    for _ in range(1100):
        parts.append(content("RecordDict", b"", parts[-1:]))
    push(connection, received, node, content("Message", b"", parts[-1:]), *parts)


@pytest.mark.parametrize(
    ("attack", "words"),
    [
        (unreadable, "its reply cannot be read (DecodeError"),
        (of_another_class, "a ConfigRecord was sent as a message"),
        pytest.param(with_a_deep_tree, "(RecursionError", marks=pytest.mark.slow),
    ],
    ids=["unreadable", "of another class", "too deep"],
)
def test_a_reply_that_cannot_be_read_is_dropped_and_the_round_goes_on(attack, words, tmp_path):
    folder = deployed.project(tmp_path / "here", clients=3)
    with federation(folder) as these:
        these.connect("device-0", "device-1")
        these.connect("device-2", make=hostile(attack))
        assert these.run() == "completed"
    dropped = [row["dropped"] for row in these.rows()]
    assert [[*row] for row in dropped] == [[], ["device-2"], []]
    assert words in dropped[1]["device-2"]


def test_a_reply_counts_for_who_sent_it_whatever_its_content_says(tmp_path):
    """Inside, it says that it is another's, to another message; what was checked at the gate holds."""

    def forged(connection, received, node):
        reply, _ = connection.handler.handle(received, node, connection.lock)
        reply.metadata.__dict__.update(_src_node_id=4711, _reply_to_message_id="f" * 64)
        records = [*reply.content.values()]
        own = [record.deflate() for record in records]
        push(connection, received, node, reply.deflate(), reply.content.deflate(), *own)

    folder = deployed.project(tmp_path / "here", clients=2)
    with federation(folder) as these:
        these.connect("device-0")
        these.connect("device-1", make=hostile(forged))
        assert these.run() == "completed"
    assert [row["clients"] for row in these.rows()] == [["device-0", "device-1"]] * 3


def refused(work, *rest, **more):
    with pytest.raises(httpx.HTTPStatusError) as error:
        work(*rest, **more)
    return error.value.response.status_code


def test_a_client_cannot_speak_for_another_nor_take_what_is_anothers(tmp_path):
    """It knows the other's number and message, which no client is told."""
    folder = deployed.project(tmp_path / "here", clients=2)
    seen, statuses = {}, []

    def attack(connection, received, node):
        other = these.connections["device-0"].fleet.node.node_id
        these.until(lambda: "device-0" in seen)
        message, part = seen["device-0"], content("Message", b"x")
        for metadata in ({"src_node_id": other, "reply_to_message_id": message},
                         {"reply_to_message_id": message}):  # fmt: skip
            statuses.append(refused(push, connection, received, node, part, metadata=metadata))
        fleet = connection.fleet
        requests = [
            (fleet.client.PullMessages, PullMessagesRequest(node=Node(node_id=other))),
            (fleet.client.DeactivateNode, DeactivateNodeRequest(node_id=other)),
            (fleet.client.RegisterNode, RegisterNodeFleetRequest(public_key=fleet.key)),
            (fleet.client.UnregisterNode, UnregisterNodeFleetRequest(node_id=other)),
        ]
        statuses.extend(refused(ask, request) for ask, request in requests)
        Connection._answer(connection, received, node)

    def slow(connection, received, node):
        seen["device-0"] = received.message.metadata.message_id
        these.until(lambda: len(statuses) == 6)
        Connection._answer(connection, received, node)

    with federation(folder) as these:
        these.connect("device-0", make=hostile(slow))
        these.connect("device-1", make=hostile(attack))
        assert these.run() == "completed"
    assert statuses == [403, 409, 401, 401, 404, 404]
    assert [[*row["dropped"]] for row in these.rows()] == [[], [], []]


@pytest.mark.parametrize(
    "when", [("1", "train"), ("3", "evaluate")], ids=["in a round", "at the end"]
)
def test_what_a_client_leaves_on_the_server_is_gone_with_the_next_exchange(when, tmp_path):
    def hoarding(connection, received, node):
        extra = [content("ConfigRecord", bytes([number]) * 1000) for number in range(50)]
        with pytest.MonkeyPatch.context() as patch:
            send = connection.fleet.client.PushObject

            def counted(request):
                send(request)
                held.append(len(these.link.state.object_store))

            patch.setattr(connection.fleet.client, "PushObject", counted)
            push(connection, received, node, content("Message", b"x", extra), *extra)

    held, folder = [], deployed.project(tmp_path / "here", clients=2)
    with federation(folder) as these:
        these.connect("device-0")
        these.connect("device-1", make=hostile(hoarding, when))
        assert these.run() == "completed"
        assert max(held) > 50, "the server held nothing of it"
        assert len(these.link.state.object_store) == 0
        assert not these.link.state.message_ins_store


def test_a_reply_that_comes_too_late_is_refused_and_its_client_goes_on(tmp_path, monkeypatch):
    folder = deployed.project(tmp_path / "here", clients=2, rounds=3)
    short = property(lambda self: 2.0 if self.round_index == 1 else 60.0)
    monkeypatch.setattr(RunServer, "round_timeout", short)

    def late(connection, received, node):
        these.until(lambda: len(these.rows()) == 2)
        Connection._answer(connection, received, node)

    with federation(folder) as these:
        these.connect("device-0")
        these.connect("device-1", make=hostile(late))
        these.run()
        these.until(lambda: any("an answer was not taken (409" in words for words in these.said))
    assert [[*row["dropped"]] for row in these.rows()][:2] == [[], ["device-1"]]


def test_a_revoked_client_is_refused_from_its_next_request_and_the_run_goes_on_without_it(tmp_path):
    folder = deployed.project(tmp_path / "here", clients=3, rounds=4)

    def stolen(connection, received, node):
        revoke(folder, "device-2")
        statuses.append(refused(connection.fleet.client.PullMessages, PullMessagesRequest()))
        statuses.append(len(these.link.connected_nodes()))
        Connection._answer(connection, received, node)

    statuses = []
    with federation(folder) as these:
        these.connect("device-0", "device-1")
        these.connect("device-2", make=hostile(stolen))
        assert these.run() == "completed"
        these.until(lambda: any("does not let this device in" in words for words in these.said))
    assert statuses == [401, 2]
    assert [len(row["clients"]) for row in these.rows()] == [3, 2, 2, 2]
    assert "device-2 may connect no longer" in these.said
    assert all("device-2" not in row["offline"] for row in these.rows()[2:]), (
        "it is nobody's to wait for"
    )


def test_clients_go_on_by_themselves_with_a_server_that_was_started_anew(tmp_path, monkeypatch):
    """It knows them by their keys, gives them new numbers, and the run goes on from its checkpoint."""
    monkeypatch.setattr("glocal.deploy.connection._RETRY", 0.05)
    folder = deployed.project(tmp_path / "here", clients=2, rounds=2)
    whole = deployed.project(tmp_path / "whole", clients=2, rounds=3)
    with federation(folder) as these:
        these.connect("device-0", "device-1")
        assert these.run() == "completed"
        before = {name: these.connections[name].fleet.node.node_id for name in these.connections}
        these.serve()
        deployed.change(folder / "study.toml", "rounds = 2", "rounds = 3")
        assert these.run() == "completed"
        after = {name: these.connections[name].fleet.node.node_id for name in these.connections}
    assert not {*before.values()} & {*after.values()}
    state, _ = simulated(whole)
    assert same_bits(RunServer(Project.from_folder(folder), "first").shared, state.shared)


def test_a_client_that_was_killed_takes_its_old_place_at_once(tmp_path):
    folder = deployed.project(tmp_path / "here", clients=1)
    with federation(folder) as these:
        killed = these.fleet("device-0")
        number = killed.connect(0)
        with pytest.raises(ServerRejectedError, match=r"^4"):
            these.fleet("device-0").connect(0)
        assert these.fleet("device-0").connect(number) == number
        with pytest.raises(ServerRejectedError):
            these.fleet("device-0").connect(4711)


def test_a_client_that_is_killed_at_work_is_not_waited_for(tmp_path):
    """It comes back at once, but nothing is known there of what it was asked."""

    def killed(connection, received, node):
        connection.fleet.connect(node)

    folder = deployed.project(tmp_path / "here", clients=2)
    with federation(folder) as these:
        these.connect("device-0")
        these.connect("device-1", make=hostile(killed))
        assert these.run() == "completed"
    dropped = [row["dropped"] for row in these.rows()]
    assert [[*row] for row in dropped] == [[], ["device-1"], []]
    why = dropped[1]["device-1"]  # the second where the server looked while it was away
    assert "it was started anew, or cut off" in why


def test_an_answer_is_sent_again_when_the_line_was_down(tmp_path, monkeypatch):
    monkeypatch.setattr("glocal.deploy.connection._RETRY", 0.01)
    folder = deployed.project(tmp_path / "here", clients=2)

    def cut(connection, received, node):
        web, lost = connection.fleet.client._client, []

        def handle(request):
            if request.url.path.endswith("push-object") and len(lost) < 2:
                lost.append(request)
                raise httpx.ReadError("cut")
            return web._transport.handle_request(request)

        connection.fleet.client._client = httpx.Client(transport=httpx.MockTransport(handle))
        Connection._answer(connection, received, node)
        assert len(lost) == 2

    with federation(folder) as these:
        these.connect("device-0")
        these.connect("device-1", make=hostile(cut))
        assert these.run() == "completed"
    assert [[*row["dropped"]] for row in these.rows()] == [[], [], []]


def test_a_client_that_dies_in_the_middle_of_its_answer_is_not_waited_for(tmp_path):
    def half(connection, received, node):
        part = content("ConfigRecord", b"")
        root = content("Message", b"", [part])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(connection.fleet.client, "PushObject", lambda request: None)
            push(connection, received, node, root, part)
        connection.fleet.client.DeactivateNode(DeactivateNodeRequest(node_id=node))

    folder = deployed.project(tmp_path / "here", clients=2, rounds=2)
    with federation(folder) as these:
        these.connect("device-0")
        these.connect("device-1", make=hostile(half))
        assert these.run() == "completed"
    assert "it was started anew, or cut off" in these.rows()[1]["dropped"]["device-1"]


def test_a_run_chooses_its_name_and_nothing_else(tmp_path):
    """Not the folder, whose Python files would be run; not a place outside of it."""
    folder = deployed.project(tmp_path / "here", clients=1, rounds=1)
    evil = deployed.project(tmp_path / "evil", clients=1)
    with (evil / "federation.py").open("a") as module:
        module.write(f"\nopen({str(tmp_path / 'ran')!r}, 'w').close()\n")
    with federation(folder) as these:
        these.connect("device-0")
        assert these.run("first", folder=str(evil)) == "completed"
        assert "is no plain name of a run" in these.run("../../evil/runs/first")
        assert "is no plain name of a run" in these.run("")
    assert not (tmp_path / "ran").exists()
    assert not (evil / "runs").exists()


def test_the_server_reads_its_files_anew_for_every_run(tmp_path):
    folder = deployed.project(tmp_path / "here", clients=1, rounds=1)
    with federation(folder) as these:
        these.connect("device-0")
        assert these.run() == "completed"
        deployed.change(folder / "federation.py", "nn.Linear(6, 8)", "nn.Linear(6, 8, bias=False)")
        assert "is not the server's; copy the server's files" in these.run("second")


def test_a_run_that_is_stopped_from_outside_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("glocal.deploy.flower.server_internals._HEARTBEAT", 0.05)
    folder = deployed.project(tmp_path / "here", clients=2)
    with federation(folder) as these:
        number = these.operator.start({"run": "first"})
        live = folder / "runs/first/live.json"
        these.until(live.exists)
        these.operator.client.StopRun(StopRunRequest(run_id=number))
        these.until(lambda: read_json(live, dict)["state"] == "failed")
    assert read_json(live, dict)["reason"] == "run: it was stopped"


def test_a_damaged_roster_lets_nobody_new_in_and_keeps_who_was_in(tmp_path):
    folder = deployed.project(tmp_path / "here", clients=1)
    with federation(folder) as these:
        (folder / "roster.json").write_text("[]garbage")
        assert len(these.registered.nodes()) == 1
        assert "those may connect who could before" in these.said[-1]


def test_a_server_that_cannot_be_reached_is_said_once(tmp_path, monkeypatch):
    monkeypatch.setattr("glocal.deploy.connection._RETRY", 0.01)
    monkeypatch.setattr("glocal.deploy.connection._MAX_RETRY", 0.02)
    folder = deployed.project(tmp_path / "here", clients=1)
    with federation(folder) as these:
        fleet = these.fleet("device-0")
        fleet.client._client = httpx.Client(transport=httpx.MockTransport(unreachable))
        connection = Connection(fleet, None, folder / "node", these.said.append, these.lock)
        thread = threading.Thread(target=connection.run, daemon=True)
        thread.start()
        these.until(lambda: len(unreached) > 5)
        connection.stop.set()
        thread.join(10)
    assert [words for words in these.said if "does not answer" in words] == [
        "the server does not answer (Connection refused); trying again"
    ]


class Refusing:
    """A line on which everything is refused, or nothing is answered."""

    def __init__(self, error):
        self.error, self.node = error, Node()

    def connect(self, last):
        raise self.error

    def disconnect(self):
        pass


@pytest.mark.parametrize(
    ("error", "waits"),
    [
        (ServerRejectedError(401, ""), [2, 4, 8, 16, 32, 60, 60]),
        (ServerRejectedError(503, ""), [2, 4, 8, 10, 10, 10, 10]),
        (ServerUnreachableError("cut"), [2, 4, 8, 10, 10, 10, 10]),
    ],
    ids=["unknown", "refused", "unreachable"],
)
def test_a_server_that_does_not_know_a_client_is_asked_again_slowly(
    error, waits, tmp_path, monkeypatch
):
    """A clock, a roster or a server may be put right; one that cannot be reached is tried more often."""
    monkeypatch.setattr("random.uniform", lambda low, high: 1.0)
    connection = Connection(Refusing(error), None, tmp_path / "node", lambda words: None, None)
    waited = []
    monkeypatch.setattr(connection, "_heartbeat_loop", lambda: None)

    def wait(seconds):
        waited.append(seconds)
        if len(waited) == 7:
            connection.stop.set()

    monkeypatch.setattr(connection.stop, "wait", wait)
    connection.run()
    assert waited == waits


unreached = []


def unreachable(request):
    unreached.append(request)
    raise httpx.ConnectError("Connection refused")
