"""Server and clients over Flower's protocol in one process: through the gates, without sockets."""

import asyncio
import os
import threading
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest
from flwr.proto.control_pb2 import StopRunRequest
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
    UnregisterNodeFleetRequest,
)
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    Metadata,
    ObjectTree,
    PullObjectRequest,
    PushObjectRequest,
)
from flwr.proto.message_pb2 import Message as ProtoMessage
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
from tests.support import deployed
from tests.support.deployed_runs import private_of, secured, simulated
from tests.support.world import distance

LOOP = asyncio.new_event_loop()
threading.Thread(target=LOOP.run_forever, daemon=True).start()


class Calls(httpx.BaseTransport):
    """Requests as calls of an application in this process."""

    def __init__(self, application):
        self.application = application

    def handle_request(self, request):
        events = []

        async def receive():
            return {"type": "http.request", "body": request.content, "more_body": False}

        async def send(event):
            events.append(event)

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
        body = b"".join(event.get("body", b"") for event in events[1:])
        return httpx.Response(events[0]["status"], headers=events[0]["headers"], content=body)


class Deployment:
    """A server in this process, and clients that call it instead of using a network."""

    def __init__(self, folder):
        self.folder, self.notices, self.stop = Path(folder), [], threading.Event()
        self.connections, self.threads, self.lock = {}, [], threading.Lock()
        self.serve()

    def serve(self):
        """Start or restart the server."""
        self.superlink = SuperLink("secret")
        self.registered = RegisteredNodes(self.folder, self.superlink, self.notices.append)
        self.registered.nodes()
        self.gate = FleetGate(self.superlink.app, self.registered.nodes, self.superlink, 2**20)
        operator = OperatorGate(self.superlink.app, "secret")
        self.operator = control_connection(
            httpx.Client(transport=Calls(lambda: operator)), "secret"
        )
        run = partial(_run_to_end, self.folder, self.gate)
        serving = threading.Thread(
            target=run_tasks,
            args=(self.superlink, run, self.stop),
            kwargs={"every": 0.01},
            daemon=True,
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
            client = prepare_client(own, self.notices.append)
            app = client_app(lambda _, client=client: client)
            runner = ClientAppRunner(app, {"folder": str(own)}, client.project.importable)
            connection = make(self.fleet(name), runner, self.notices.append, self.lock)
            self.connections[name] = connection
            self.threads.append(threading.Thread(target=connection.run, daemon=True))
            self.threads[-1].start()
        return self.connections[names[-1]]

    def run(self, run="first", **more):
        """Start a run, wait for its end, and return how it ended by Flower's own record."""
        number = self.operator.start({"run": run, **more})
        self.until(lambda: self.operator.run(number).finished)
        return self.operator.run(number).details

    def until(self, condition, seconds=60):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "\n".join(self.notices)
            time.sleep(0.02)

    def rows(self, run="first"):
        return read_rows(self.folder / "runs" / run / "rows.jsonl")


@contextmanager
def deployed_here(folder):
    deployment = Deployment(folder)
    try:
        yield deployment
    finally:
        deployment.stop.set()
        for connection in deployment.connections.values():
            connection.stop.set()
        for thread in deployment.threads:
            thread.join(20)


ALL_CLIENTS = [f"client-{number}" for number in range(4)]


@pytest.mark.parametrize("algorithm", ["lg_fedavg", "mtl"])
def test_over_the_protocol_the_results_are_the_simulators_bits(algorithm, tmp_path):
    folder = deployed.project(tmp_path / "here", algorithm=algorithm, clients_per_round=3)
    state, sent = simulated(folder)
    with deployed_here(folder) as deployment:
        deployment.connect(*ALL_CLIENTS)
        assert deployment.run() == "completed"
    server = RunServer(Project.from_folder(folder), "first")
    assert same_bits(server.shared, state.shared)
    for client in range(4):
        assert same_bits(private_of(folder, client).after, state.private.of(client))
    ledger = server.state.ledger
    assert ledger.download.bytes + ledger.upload.bytes == sent


def test_secure_aggregation_goes_over_the_protocol_too(tmp_path):
    folder = secured(deployed.project(tmp_path / "here", rounds=2))
    state, _ = simulated(folder)
    with deployed_here(folder) as deployment:
        deployment.connect(*ALL_CLIENTS)
        assert deployment.run() == "completed"
    assert distance(RunServer(Project.from_folder(folder), "first").shared, state.shared) <= 1e-4
    assert [len(row["clients"]) for row in deployment.rows()] == [4, 4]


COUNTED = """
from pathlib import Path

build, read = model, data

def model():
    with Path(__file__).with_name("built").open("a") as file:
        file.write("model\\n")
    return build()

def data(client):
    with Path(__file__).with_name("built").open("a") as file:
        file.write("data\\n")
    return read(client)
"""


def test_a_clients_model_and_data_are_built_once_in_its_process(tmp_path):
    folder = deployed.project(tmp_path / "here", clients=2, rounds=3)
    for name in ("client-0", "client-1"):
        with (folder / "clients" / name / "federation.py").open("a") as module:
            module.write(COUNTED)
    with deployed_here(folder) as deployment:
        deployment.connect("client-0", "client-1")
        assert deployment.run() == "completed"
        assert deployment.run("second") == "completed"
    for name in ("client-0", "client-1"):
        built = (folder / "clients" / name / "built").read_text().split()
        assert sorted(built) == ["data", "model"]


def hostile(attack, when=("1", "train")):
    """A registered client that runs `attack` in its second round, and else does as it should."""

    def answer(self, received, node):
        metadata = received.message.metadata
        if (metadata.group_id, metadata.message_type) == when:
            attack(self, received, node)
        else:
            Connection._answer(self, received, node)

    return type("Hostile", (Connection,), {"_answer": answer})


def content(kind, body, children=()):
    """An object as Flower stores it."""
    names = ",".join(get_object_id(child) for child in children)
    return f"{kind} {names} {len(body)}".encode() + HEAD_BODY_DIVIDER + body


def register(connection, received, node, tree, metadata=None):
    """Announce a reply made by hand: correct metadata, apart from `metadata`, and any tree."""
    request = received.message.metadata
    correct = {
        "run_id": received.run,
        "message_id": tree.object_id,
        "src_node_id": node,
        "dst_node_id": 1,
        "reply_to_message_id": request.message_id,
        "group_id": request.group_id,
        "created_at": time.time(),
        "ttl": 60.0,
        "message_type": request.message_type,
    }
    request = PushMessagesRequest(
        node=Node(node_id=node),
        messages_list=[
            ProtoMessage(
                metadata=Metadata(**{**correct, **(metadata or {})}), content=ProtoRecordDict()
            )
        ],
        message_object_trees=[tree],
    )
    return connection.fleet.client.PushMessages(request)


def push(connection, received, node, root, *others, metadata=None):
    """Send a reply made by hand, and its objects."""
    children = [ObjectTree(object_id=get_object_id(other)) for other in others]
    tree = ObjectTree(object_id=get_object_id(root), children=children)
    client = connection.fleet.client
    session = register(connection, received, node, tree, metadata).session_id
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
    ("attack", "reason"),
    [
        (unreadable, "its reply cannot be read (DecodeError"),
        (of_another_class, "a ConfigRecord was sent as a message"),
        pytest.param(with_a_deep_tree, "(RecursionError", marks=pytest.mark.slow),
    ],
    ids=["unreadable", "of another class", "too deep"],
)
def test_a_reply_that_cannot_be_read_is_dropped_and_the_round_goes_on(attack, reason, tmp_path):
    folder = deployed.project(tmp_path / "here", clients=3)
    with deployed_here(folder) as deployment:
        deployment.connect("client-0", "client-1")
        deployment.connect("client-2", make=hostile(attack))
        assert deployment.run() == "completed"
    dropped = [row["dropped"] for row in deployment.rows()]
    assert [[*row] for row in dropped] == [[], ["client-2"], []]
    assert reason in dropped[1]["client-2"]


def object_id(number):
    return get_object_id(str(number).encode())


def test_objects_of_several_clients_cannot_be_chained_into_a_tree_that_fills_the_memory(tmp_path):
    """Each tree is consistent by itself; together they would double at every level."""
    folder, statuses = deployed.project(tmp_path / "here", clients=3), {}

    def level(place, connection, received, node):
        below = ObjectTree(object_id=object_id(place - 1)) if place else None
        pair = [below] * 2 if place else [ObjectTree(object_id=object_id("leaf"))]
        top = ObjectTree(object_id=object_id(place), children=pair)
        root = ObjectTree(object_id=object_id(f"root {place}"), children=[top])
        if place:
            deployment.until(lambda: place - 1 in statuses)
        try:
            register(connection, received, node, root)
            statuses[place] = 200
        except httpx.HTTPStatusError as error:
            statuses[place] = error.response.status_code
        connection.fleet.client.DeactivateNode(DeactivateNodeRequest(node_id=node))

    with deployed_here(folder) as deployment:
        for place in range(2):
            deployment.connect(f"client-{place}", make=hostile(partial(level, place)))
        deployment.connect("client-2")
        assert deployment.run() == "completed"
    assert statuses[0] == 200
    assert statuses[1] >= 400
    assert {*deployment.rows()[1]["dropped"]} == {"client-0", "client-1"}


def deleted(connection, received, node):
    """A reply whose objects the client has confirmed, as if they were the server's."""
    root = ObjectTree(object_id=object_id("root"))
    register(connection, received, node, root)
    request = ConfirmMessageReceivedRequest(
        node=Node(node_id=node), run_id=received.run, message_object_id=root.object_id
    )
    connection.fleet.client.ConfirmMessageReceived(request)
    connection.fleet.client.DeactivateNode(DeactivateNodeRequest(node_id=node))


def without_objects(connection, received, node):
    """A reply that the server has, and objects that it has lost."""
    root = ObjectTree(object_id=object_id("root"))
    register(connection, received, node, root)
    store = connection.superlink.state.object_store
    with store.lock_store:
        store.delete(root.object_id)


@pytest.mark.parametrize("attack", [deleted, without_objects])
def test_a_reply_whose_objects_are_gone_is_dropped_and_the_run_goes_on(attack, tmp_path):
    folder = deployed.project(tmp_path / "here", clients=2)
    with deployed_here(folder) as deployment:
        deployment.connect("client-0")
        made = hostile(attack)
        made.superlink = deployment.superlink
        deployment.connect("client-1", make=made)
        assert deployment.run() == "completed"
    assert [*deployment.rows()[1]["dropped"]] == ["client-1"]


def test_a_client_cannot_read_what_another_has_sent(tmp_path):
    """Nor learn that it is there, although the server has it."""
    folder, answers = deployed.project(tmp_path / "here", clients=2), {}

    def ask(connection, received, node):
        state = deployment.superlink.state
        deployment.until(lambda: state.message_res_store)
        (reply,) = state.message_res_store
        request = PullObjectRequest(node=Node(node_id=node), run_id=received.run, object_id=reply)
        answers["server"] = state.get_object(received.run, reply) is not None
        answers["client"] = connection.fleet.client.PullObject(request).object_found
        Connection._answer(connection, received, node)

    def unread(connection, received, node):
        """Its reply stays on the server until the other one has asked."""
        part = content("ConfigRecord", b"")
        root = content("Message", b"", [part])
        tree = ObjectTree(
            object_id=get_object_id(root), children=[ObjectTree(object_id=get_object_id(part))]
        )
        register(connection, received, node, tree)
        deployment.until(lambda: answers)
        connection.fleet.client.DeactivateNode(DeactivateNodeRequest(node_id=node))

    with deployed_here(folder) as deployment:
        deployment.connect("client-0", make=hostile(unread))
        deployment.connect("client-1", make=hostile(ask))
        assert deployment.run() == "completed"
    assert answers == {"server": True, "client": False}


def test_a_reply_counts_for_its_sender_whatever_its_content_says(tmp_path):
    """Its content names another sender and another message; the gate has checked the real ones."""

    def forged(connection, received, node):
        reply, _ = connection.runner.handle(received, node, connection.lock)
        reply.metadata.__dict__.update(_src_node_id=4711, _reply_to_message_id="f" * 64)
        records = [*reply.content.values()]
        own = [record.deflate() for record in records]
        push(connection, received, node, reply.deflate(), reply.content.deflate(), *own)

    folder = deployed.project(tmp_path / "here", clients=2)
    with deployed_here(folder) as deployment:
        deployment.connect("client-0")
        deployment.connect("client-1", make=hostile(forged))
        assert deployment.run() == "completed"
    assert [row["clients"] for row in deployment.rows()] == [["client-0", "client-1"]] * 3


def refused(call, *rest, **more):
    """The status with which a call is refused."""
    with pytest.raises(httpx.HTTPStatusError) as error:
        call(*rest, **more)
    return error.value.response.status_code


def test_a_client_cannot_speak_for_another_nor_take_its_messages(tmp_path):
    """Even if it knows the other's node number and message, which no client learns."""
    folder = deployed.project(tmp_path / "here", clients=2)
    seen, statuses = {}, []

    def attack(connection, received, node):
        other = deployment.connections["client-0"].fleet.node.node_id
        key = deployment.connections["client-0"].fleet.key
        deployment.until(lambda: "client-0" in seen)
        message, part = seen["client-0"], content("Message", b"x")
        for metadata in ({"src_node_id": other, "reply_to_message_id": message},
                         {"reply_to_message_id": message}):  # fmt: skip
            statuses.append(refused(push, connection, received, node, part, metadata=metadata))
        fleet = connection.fleet
        requests = [
            (fleet.client.PullMessages, PullMessagesRequest(node=Node(node_id=other))),
            (fleet.client.DeactivateNode, DeactivateNodeRequest(node_id=other)),
            (fleet.client.ActivateNode, ActivateNodeRequest(public_key=key, heartbeat_interval=10)),
            (fleet.client.RegisterNode, RegisterNodeFleetRequest(public_key=fleet.key)),
            (fleet.client.UnregisterNode, UnregisterNodeFleetRequest(node_id=other)),
        ]
        statuses.extend(refused(ask, request) for ask, request in requests)
        Connection._answer(connection, received, node)

    def slow(connection, received, node):
        seen["client-0"] = received.message.metadata.message_id
        deployment.until(lambda: len(statuses) == 7)
        Connection._answer(connection, received, node)

    with deployed_here(folder) as deployment:
        deployment.connect("client-0", make=hostile(slow))
        deployment.connect("client-1", make=hostile(attack))
        assert deployment.run() == "completed"
    assert statuses == [403, 409, 401, 401, 401, 404, 404]
    assert [[*row["dropped"]] for row in deployment.rows()] == [[], [], []]


@pytest.mark.parametrize(
    "when", [("1", "train"), ("3", "evaluate")], ids=["in a round", "at the end"]
)
def test_objects_that_a_client_leaves_on_the_server_are_deleted_with_the_next_batch(when, tmp_path):
    def fill(connection, received, node):
        extra = [content("ConfigRecord", bytes([number]) * 1000) for number in range(50)]
        with pytest.MonkeyPatch.context() as patch:
            send = connection.fleet.client.PushObject

            def counted(request):
                send(request)
                sizes.append(len(deployment.superlink.state.object_store))

            patch.setattr(connection.fleet.client, "PushObject", counted)
            push(connection, received, node, content("Message", b"x", extra), *extra)

    sizes, folder = [], deployed.project(tmp_path / "here", clients=2)
    with deployed_here(folder) as deployment:
        deployment.connect("client-0")
        deployment.connect("client-1", make=hostile(fill, when))
        assert deployment.run() == "completed"
        assert max(sizes) > 50, "the server stored nothing"
        assert len(deployment.superlink.state.object_store) == 0
        assert not deployment.superlink.state.message_ins_store


def test_objects_of_a_reply_that_was_never_whole_are_deleted_before_the_next_round(
    tmp_path, monkeypatch
):
    folder = deployed.project(tmp_path / "here", clients=2, rounds=3)
    short = property(lambda self: 2.0 if self.round_index == 1 else 60.0)
    monkeypatch.setattr(RunServer, "round_timeout", short)
    extra = [content("ConfigRecord", bytes([number]) * 1000) for number in range(50)]
    counts = {}

    def stored():
        store = deployment.superlink.state.object_store
        return sum(store.get(get_object_id(part)) is not None for part in extra)

    def unfinished(connection, received, node):
        root = content("Message", b"x", extra)
        send = connection.fleet.client.PushObject
        with pytest.MonkeyPatch.context() as patch:
            own = lambda request: request.object_content == root or send(request)  # noqa: E731
            patch.setattr(connection.fleet.client, "PushObject", own)
            push(connection, received, node, root, *extra)
        counts["at first"] = stored()

    def counting(connection, received, node):
        messages = [*deployment.superlink.state.message_ins_store.values()]
        old = [message for message in messages if message.metadata.group_id == "1"]
        counts["in the next round"] = stored() + len(old)
        Connection._answer(connection, received, node)

    with deployed_here(folder) as deployment:
        deployment.connect("client-0", make=hostile(counting, ("2", "train")))
        deployment.connect("client-1", make=hostile(unfinished))
        assert deployment.run() == "completed"
    assert [[*row["dropped"]] for row in deployment.rows()] == [[], ["client-1"], []]
    assert counts == {"at first": 50, "in the next round": 0}


def test_a_reply_that_comes_too_late_is_refused_and_its_client_goes_on(tmp_path, monkeypatch):
    folder = deployed.project(tmp_path / "here", clients=2, rounds=3)
    short = property(lambda self: 2.0 if self.round_index == 1 else 60.0)
    monkeypatch.setattr(RunServer, "round_timeout", short)

    def late(connection, received, node):
        deployment.until(lambda: len(deployment.rows()) == 2)
        Connection._answer(connection, received, node)

    with deployed_here(folder) as deployment:
        deployment.connect("client-0")
        deployment.connect("client-1", make=hostile(late))
        deployment.run()
        deployment.until(
            lambda: any("the server rejected a reply (409" in line for line in deployment.notices)
        )
    assert [[*row["dropped"]] for row in deployment.rows()][:2] == [[], ["client-1"]]


def test_a_revoked_client_is_refused_from_its_next_request_and_the_run_goes_on_without_it(tmp_path):
    folder = deployed.project(tmp_path / "here", clients=3, rounds=4)

    def stolen(connection, received, node):
        revoke(folder, "client-2")
        statuses.append(refused(connection.fleet.client.PullMessages, PullMessagesRequest()))
        statuses.append(len(deployment.superlink.connected_nodes()))
        Connection._answer(connection, received, node)

    statuses = []
    with deployed_here(folder) as deployment:
        deployment.connect("client-0", "client-1")
        deployment.connect("client-2", make=hostile(stolen))
        assert deployment.run() == "completed"
        deployment.until(
            lambda: any("does not accept this client" in line for line in deployment.notices)
        )
    assert statuses == [401, 2]
    assert [len(row["clients"]) for row in deployment.rows()] == [3, 2, 2, 2]
    assert "client-2 may not connect any more" in deployment.notices
    assert all("client-2" not in row["offline"] for row in deployment.rows()[2:]), (
        "the server does not wait for it"
    )


def test_clients_reconnect_by_themselves_to_a_restarted_server(tmp_path, monkeypatch):
    """It knows them by their keys, gives them new node numbers, and the run continues."""
    monkeypatch.setattr("glocal.deploy.connection._RETRY", 0.05)
    folder = deployed.project(tmp_path / "here", clients=2, rounds=2)
    whole = deployed.project(tmp_path / "whole", clients=2, rounds=3)
    with deployed_here(folder) as deployment:
        deployment.connect("client-0", "client-1")
        assert deployment.run() == "completed"
        before = {
            name: deployment.connections[name].fleet.node.node_id for name in deployment.connections
        }
        deployment.serve()
        deployed.change(folder / "study.toml", "rounds = 2", "rounds = 3")
        assert deployment.run() == "completed"
        after = {
            name: deployment.connections[name].fleet.node.node_id for name in deployment.connections
        }
    assert not {*before.values()} & {*after.values()}
    state, _ = simulated(whole)
    assert same_bits(RunServer(Project.from_folder(folder), "first").shared, state.shared)


def test_a_client_that_was_killed_takes_its_old_node_at_once(tmp_path):
    folder = deployed.project(tmp_path / "here", clients=1)
    with deployed_here(folder) as deployment:
        number = deployment.fleet("client-0").connect()
        assert deployment.fleet("client-0").connect() == number


def test_a_client_that_is_killed_at_work_is_not_waited_for(tmp_path):
    """It comes back at once, but has lost the message."""

    def killed(connection, received, node):
        connection.fleet.connect()

    folder = deployed.project(tmp_path / "here", clients=2)
    with deployed_here(folder) as deployment:
        deployment.connect("client-0")
        deployment.connect("client-1", make=hostile(killed))
        assert deployment.run() == "completed"
    dropped = [row["dropped"] for row in deployment.rows()]
    assert [[*row] for row in dropped] == [[], ["client-1"], []]
    assert "it was restarted or disconnected" in dropped[1]["client-1"]


def test_a_reply_is_sent_again_when_the_connection_was_down(tmp_path, monkeypatch):
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

    with deployed_here(folder) as deployment:
        deployment.connect("client-0")
        deployment.connect("client-1", make=hostile(cut))
        assert deployment.run() == "completed"
    assert [[*row["dropped"]] for row in deployment.rows()] == [[], [], []]


def test_a_client_that_dies_in_the_middle_of_its_reply_is_not_waited_for(tmp_path):
    def half(connection, received, node):
        part = content("ConfigRecord", b"")
        root = content("Message", b"", [part])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(connection.fleet.client, "PushObject", lambda request: None)
            push(connection, received, node, root, part)
        connection.fleet.client.DeactivateNode(DeactivateNodeRequest(node_id=node))

    folder = deployed.project(tmp_path / "here", clients=2, rounds=2)
    with deployed_here(folder) as deployment:
        deployment.connect("client-0")
        deployment.connect("client-1", make=hostile(half))
        assert deployment.run() == "completed"
    assert "it was restarted or disconnected" in deployment.rows()[1]["dropped"]["client-1"]


def test_a_run_chooses_its_name_and_nothing_else(tmp_path):
    """Not the folder, whose Python files would be run, and not a path outside of it."""
    folder = deployed.project(tmp_path / "here", clients=1, rounds=1)
    evil = deployed.project(tmp_path / "evil", clients=1)
    with (evil / "federation.py").open("a") as module:
        module.write(f"\nopen({str(tmp_path / 'ran')!r}, 'w').close()\n")
    with deployed_here(folder) as deployment:
        deployment.connect("client-0")
        assert deployment.run("first", folder=str(evil)) == "completed"
        assert "is not a valid run name" in deployment.run("../../evil/runs/first")
        assert "is not a valid run name" in deployment.run("")
    assert not (tmp_path / "ran").exists()
    assert not (evil / "runs").exists()


def test_the_server_reads_its_files_again_for_every_run(tmp_path):
    folder = deployed.project(tmp_path / "here", clients=1, rounds=1)
    with deployed_here(folder) as deployment:
        deployment.connect("client-0")
        assert deployment.run() == "completed"
        deployed.change(folder / "federation.py", "nn.Linear(6, 8)", "nn.Linear(6, 8, bias=False)")
        assert "is not the server's; copy the server's files" in deployment.run("second")


def test_a_run_that_is_stopped_from_outside_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("glocal.deploy.flower.server_internals._HEARTBEAT", 0.05)
    folder = deployed.project(tmp_path / "here", clients=2)
    with deployed_here(folder) as deployment:
        number = deployment.operator.start({"run": "first"})
        live = folder / "runs/first/live.json"
        deployment.until(live.exists)
        deployment.operator.client.StopRun(StopRunRequest(run_id=number))
        deployment.until(lambda: read_json(live, dict)["state"] == "failed")
    assert read_json(live, dict)["reason"] == "run: it was stopped"


def test_with_a_damaged_registry_the_clients_registered_before_may_connect(tmp_path):
    folder = deployed.project(tmp_path / "here", clients=1)
    with deployed_here(folder) as deployment:
        (folder / "registry.json").write_text("[]garbage")
        assert len(deployment.registered.nodes()) == 1
        assert "the clients registered before may connect" in deployment.notices[-1]


def test_a_revocation_in_a_file_that_cannot_be_read_yet_counts_as_soon_as_it_can(
    tmp_path, monkeypatch
):
    folder = deployed.project(tmp_path / "here", clients=2)
    with deployed_here(folder) as deployment:
        revoke(folder, "client-1")
        with monkeypatch.context() as patch:
            patch.setattr("glocal.deploy.registry.Path.read_text", unreadable_file)
            for _ in range(3):
                assert len(deployment.registered.nodes()) == 2
        assert len(deployment.registered.nodes()) == 1
    reports = [line for line in deployment.notices if "the clients registered before" in line]
    assert len(reports) == 1, "a problem is reported once"


def unreadable_file(path, **options):
    raise PermissionError(13, "Permission denied")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_registry_that_root_changes_stays_its_owners(tmp_path):
    folder = deployed.project(tmp_path / "here", clients=2)
    os.chown(folder, 65534, 65534)
    os.chown(folder / "registry.json", 65534, 65534)
    revoke(folder, "client-1")
    status = (folder / "registry.json").stat()
    assert (status.st_uid, status.st_gid) == (65534, 65534)


def test_an_unreachable_server_is_reported_once(tmp_path, monkeypatch):
    monkeypatch.setattr("glocal.deploy.connection._RETRY", 0.01)
    monkeypatch.setattr("glocal.deploy.connection._MAX_RETRY", 0.02)
    folder = deployed.project(tmp_path / "here", clients=1)
    with deployed_here(folder) as deployment:
        fleet = deployment.fleet("client-0")
        fleet.client._client = httpx.Client(transport=httpx.MockTransport(unreachable))
        connection = Connection(fleet, None, deployment.notices.append, deployment.lock)
        thread = threading.Thread(target=connection.run, daemon=True)
        thread.start()
        deployment.until(lambda: len(unreached) > 5)
        connection.stop.set()
        thread.join(10)
    assert [line for line in deployment.notices if "does not answer" in line] == [
        "the server does not answer (Connection refused); trying again"
    ]


class Refusing:
    """A connection that always fails."""

    def __init__(self, error):
        self.error, self.node = error, Node()

    def connect(self):
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
def test_a_client_retries_slowly_at_a_server_that_does_not_know_it(error, waits, monkeypatch):
    """A clock or a registry may be corrected; an unreachable server is tried more often."""
    monkeypatch.setattr("random.uniform", lambda low, high: 1.0)
    connection = Connection(Refusing(error), None, lambda text: None, None)
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
