"""Flower's undocumented names on the server side: only this file knows them.

Written for flwr 1.41 and 1.42; `tests/deploy/test_flower_internals.py` names what an upgrade has
removed. Flower's SuperLink stores everything in memory here: our own registry says which clients
may connect, rounds are in our own checkpoints, and no client's upload ends up in a database file.
"""

import hashlib
import hmac
import http.client
import logging
import socket
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.cli.build import build_fab_from_files
from flwr.common import (
    FitIns,
    FitRes,
    Parameters,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.common.constant import (
    ACCESS_TOKEN_KEY,
    NOOP_ACCOUNT_NAME,
    NOOP_FLWR_AID,
    SUPERLINK_NODE_ID,
    TIMESTAMP_HEADER,
    ErrorCode,
    Status,
    SubStatus,
)
from flwr.common.secure_aggregation.secaggplus_constants import (
    RECORD_KEY_CONFIGS as SECAGG_RECORD,
)
from flwr.common.secure_aggregation.secaggplus_constants import Key as SecAggKey
from flwr.common.secure_aggregation.secaggplus_constants import Stage as SecAggStage
from flwr.common.serde import (
    fab_to_proto,
    message_from_proto,
    message_to_proto,
    run_from_proto,
    user_config_to_proto,
)
from flwr.compat.common import recorddict_compat as legacy
from flwr.proto.control_pb2 import ListNodesRequest, ListRunsRequest, StartRunRequest
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree, PullObjectRequest
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    GetNodesRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushAppMessagesRequest,
    PushTaskOutputRequest,
)
from flwr.server.compat.legacy_context import LegacyContext
from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
from flwr.serverapp import Grid
from flwr.supercore.auth.typing import AccountInfo
from flwr.supercore.constant import (
    FLEET_HTTP_PUBLIC_KEY_HEADER,
    FLEET_HTTP_SIGNATURE_HEADER,
    FLWR_IN_MEMORY_DB_NAME,
    NodeStatus,
    TaskType,
)
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    is_valid_sha256_hash,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.logger import FLOWER_LOGGER
from flwr.supercore.object_store import NoObjectInStoreError
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.primitives.asymmetric import (
    generate_key_pairs,
    private_key_to_bytes,
    public_key_to_bytes,
)
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.auth_plugin import ControlAuthnPlugin
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
from flwr.superlink.config_loader import SuperLinkLifespanConfig
from flwr.superlink.main import create_app
from flwr.superlink.servicer.runtime import runtime_handlers as runtime

from glocal.core.errors import InputError, describe_error

__all__ = [  # including the names that secagg_server.py needs
    "CONFIRM",
    "CONTROL_ROUTES",
    "FLEET_ROUTES",
    "KEY_HEADER",
    "MAIN_CONFIGS_RECORD",
    "MAIN_PARAMS_RECORD",
    "PULL_OBJECT",
    "PUSH_MESSAGES",
    "PUSH_OBJECT",
    "SECAGG_RECORD",
    "SIGNATURE_HEADER",
    "TIME_HEADER",
    "ControlConnection",
    "FitIns",
    "FitRes",
    "Grid",
    "Key",
    "LegacyContext",
    "MemoryGrid",
    "RunState",
    "SecAggKey",
    "SecAggPlusWorkflow",
    "SecAggStage",
    "SuperLink",
    "connect_control",
    "is_signed_by",
    "legacy",
    "masked_arrays",
    "ndarrays_to_parameters",
    "parameters_to_ndarrays",
    "public_key_bytes",
    "read_object_id",
    "read_pushed_message",
    "run_tasks",
    "share_sizes",
]

# The routes of the public port and those of the operator's socket; every other path is not found.
PUSH_MESSAGES, PUSH_OBJECT = "/v1/fleet/push-messages", "/v1/fleet/push-object"
PULL_OBJECT, CONFIRM = "/v1/fleet/pull-object", "/v1/fleet/confirm-message-received"
FLEET_ROUTES = frozenset(
    {
        PUSH_MESSAGES,
        PUSH_OBJECT,
        PULL_OBJECT,
        CONFIRM,
        "/v1/fleet/activate-node",
        "/v1/fleet/deactivate-node",
        "/v1/fleet/send-node-heartbeat",
        "/v1/fleet/pull-messages",
        "/v1/fleet/get-run",  # Flower's own SuperNode needs this route and the next
        "/v1/fleet/get-fab",
    }
)
CONTROL_ROUTES = frozenset(
    f"/v1/control/{name}" for name in ("start-run", "stop-run", "list-runs", "list-nodes")
)
KEY_HEADER, TIME_HEADER, SIGNATURE_HEADER = (
    name.lower().encode()
    for name in (FLEET_HTTP_PUBLIC_KEY_HEADER, TIMESTAMP_HEADER, FLEET_HTTP_SIGNATURE_HEADER)
)
_HEARTBEAT = 10.0  # seconds between the heartbeats of a run
_BUNDLE = """[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "glocal-app"
version = "1.0.0"
description = "Loads glocal from where it is installed"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "glocal"

[tool.flwr.app.components]
serverapp = "glocal.deploy.apps:server"
clientapp = "glocal.deploy.apps:client"

[tool.flwr.app.config]
folder = ""
run = ""
skip_training = false
"""


def public_key_bytes(key: str) -> bytes:
    """A client's public key, one line in OpenSSH format, in the form that Flower sends."""
    try:
        public = serialization.load_ssh_public_key(key.encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InputError(
            f"deploy: '{key[:40]}' in the registry is not a client key ({describe_error(error)}); "
            "restore it"
        ) from error
    if not isinstance(public, ec.EllipticCurvePublicKey):
        raise InputError(
            f"deploy: '{key[:40]}' in the registry is of another kind than client keys; restore it"
        )
    return public_key_to_bytes(public)


def is_signed_by(key: bytes, data: bytes, signature: bytes) -> bool:
    """Whether the owner of this registered key signed these data, as Flower's clients sign."""
    public = serialization.load_pem_public_key(key)
    assert isinstance(public, ec.EllipticCurvePublicKey)
    try:
        public.verify(signature, data, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        return False
    return True


def masked_arrays(parts: list[bytes]) -> list[Any]:
    """The arrays of a masked upload; one that cannot be read raises an error."""
    return parameters_to_ndarrays(Parameters(parts, "numpy.ndarray"))


def share_sizes() -> tuple[int, int]:
    """The bytes of a share of a client's mask seed, and those of a share of its private key.

    Shamir's scheme, as Flower has it: a number of four bytes, then as much as the padded secret.
    """
    private, _ = generate_key_pairs()
    secrets = (32, len(private_key_to_bytes(private)))
    seed, key = (4 + 16 * (size // 16 + 1) for size in secrets)
    return seed, key


class PushedMessage(NamedTuple):
    """What the body of PUSH_MESSAGES says: who sends, and which message is answered."""

    senders: frozenset[int]
    answers: str


def read_pushed_message(body: bytes) -> PushedMessage:
    """Read the body of PUSH_MESSAGES; one that is unreadable or inconsistent raises an error.

    Flower stores a message before its objects, and of several messages it reads the first only:
    what it would trip over later is refused here.
    """
    request = PushMessagesRequest.FromString(body)
    (message,), (tree,) = request.messages_list, request.message_object_trees
    if tree.object_id != message.metadata.message_id:
        raise ValueError("the tree is that of another message")
    _children_by_object(tree)
    senders = frozenset({request.node.node_id, message.metadata.src_node_id})
    return PushedMessage(senders, message.metadata.reply_to_message_id)


def read_object_id(path: str, body: bytes) -> str:
    """The object that a request to PULL_OBJECT or CONFIRM is about."""
    if path == PULL_OBJECT:
        return str(PullObjectRequest.FromString(body).object_id)
    return str(ConfirmMessageReceivedRequest.FromString(body).message_object_id)


def _children_by_object(tree: ObjectTree) -> dict[str, tuple[str, ...]]:
    """The children of every object of a tree; an object with two lists of them is refused.

    Flower stores one list per object and repeats it wherever the object occurs. With two lists, a
    tree of three kilobytes would grow to gigabytes.
    """
    children: dict[str, tuple[str, ...]] = {}
    for node in iterate_object_tree(tree):
        own = tuple(child.object_id for child in node.children)
        if not is_valid_sha256_hash(node.object_id):
            raise ValueError(f"'{node.object_id[:80]}' is not an object's number")
        if children.setdefault(node.object_id, own) != own:
            raise ValueError(f"object {node.object_id} has two lists of children")
    return children


class _ConsistentObjectStore(InMemoryObjectStore):
    """Flower's store; all trees that are in it at a time agree on the children of an object."""

    def preregister(self, run_id: int, object_tree: ObjectTree) -> list[str]:
        """Register a tree, after a look at those that other clients have registered."""
        with self.lock_store:
            for name, children in _children_by_object(object_tree).items():
                known = self.store.get(name)
                if known is not None and tuple(known.child_object_ids) != children:
                    raise ValueError(f"object {name} has other children already")
            return super().preregister(run_id, object_tree)


class _ReconnectingState(InMemoryLinkState):
    """Flower's state; a client that was killed connects again at once.

    Flower would refuse the client until its missing heartbeats are noticed, after 20 s. Whoever
    connects has signed the request with the node's key.
    """

    def activate_node(self, node_id: int, heartbeat_interval: float) -> bool:
        """Take the node online, and before that offline if it still counts as online."""
        with self.lock:
            self.deactivate_node(node_id)
            return super().activate_node(node_id, heartbeat_interval)


class _SecretAuthPlugin(ControlAuthnPlugin):
    """Accepts the operator's secret; Flower's no-op account stands for all operators."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    def validate_tokens_in_metadata(
        self, metadata: Sequence[tuple[str, str | bytes]]
    ) -> tuple[bool, AccountInfo | None]:
        token = next((value for name, value in metadata if name == ACCESS_TOKEN_KEY), "")
        token = token if isinstance(token, bytes) else token.encode()
        is_valid = hmac.compare_digest(token, self._secret)
        account = AccountInfo(flwr_aid=NOOP_FLWR_AID, account_name=NOOP_ACCOUNT_NAME)
        return is_valid, account if is_valid else None

    # Flower lets anyone call these three: they return nothing.
    def get_login_details(self) -> None:
        return None

    def get_auth_tokens(self, device_code: str) -> None:
        return None

    def refresh_tokens(self, metadata: Sequence[tuple[str, str | bytes]]) -> tuple[None, None]:
        return None, None


class SuperLink:
    """Flower's server, in memory: its web application `app`, and the few calls that we need."""

    def __init__(self, secret: str) -> None:
        FLOWER_LOGGER.setLevel(logging.WARNING)  # otherwise Flower logs every message
        # Message() insists on one run for the process; MemoryGrid sets the run of every message
        TaskIdentity.task_id, TaskIdentity.run_id = 0, 0
        TaskIdentity.node_id = SUPERLINK_NODE_ID
        self.app = create_app(_config(secret), SuperLinkLifespan)
        self.state = self.app.state.linkstate_factory.state()
        # Flower makes both objects itself
        self.state.__class__ = _ReconnectingState
        self.state.object_store.__class__ = _ConsistentObjectStore

    def register(self, key: bytes, name: str) -> int:
        """Register a client's key; the number of its node."""
        owner = (NOOP_FLWR_AID, NOOP_ACCOUNT_NAME)
        return int(self.state.create_node(*owner, key, heartbeat_interval=0, name=name))

    def unregister(self, node: int) -> None:
        """Remove a node."""
        with suppress(TypeError):  # raised for a node that never connected, after its removal
            self.state.delete_node(NOOP_FLWR_AID, node)

    def connected_nodes(self) -> set[int]:
        """The nodes that are online."""
        online = self.state.get_node_info(statuses=[NodeStatus.ONLINE])
        return {node.node_id for node in online}

    def awaits_reply(self, node: int, message: str) -> bool:
        """Whether that message was sent to that node and has no reply yet."""
        sent = self.state.message_ins_store.get(message)
        return sent is not None and sent.metadata.dst_node_id == node

    def has_sent(self, node: int, object_id: str) -> bool:
        """Whether an object is part of a message to that node which is not yet answered."""
        for number, sent in list(self.state.message_ins_store.items()):
            if sent.metadata.dst_node_id != node:
                continue
            with suppress(NoObjectInStoreError):  # the node has confirmed it
                tree = self.state.object_store.get_object_tree(number)
                if any(part.object_id == object_id for part in iterate_object_tree(tree)):
                    return True
        return False


def _config(secret: str) -> SuperLinkLifespanConfig:
    """Flower without its own listeners, subprocesses, database and event log."""
    return SuperLinkLifespanConfig(
        control_address="127.0.0.1:0",
        health_server_address=None,
        host="127.0.0.1",
        port=0,
        insecure=False,
        certificates=None,
        superexec_auth_secret=None,
        authn_plugin=_SecretAuthPlugin(secret),
        event_log_plugin=None,
        fleet_event_log_plugin=None,
        enable_event_log=False,
        artifact_provider=None,
        enable_supernode_auth=True,
        fleet_api_type="grpc-rere",
        fleet_api_address=None,
        simulation=False,
        ssl_ca_certfile=None,
        ssl_certfile=None,
        ssl_keyfile=None,
        database=FLWR_IN_MEMORY_DB_NAME,
        isolation="process",
        runtime_dependency_install=False,
    )


class MemoryGrid(Grid):
    """The server's end of a run's messages; it calls Flower's handlers in this process.

    Messages are exchanged in batches. What a batch leaves behind (late replies, objects without a
    message) is deleted before the next one, so that no client can fill the memory. A reply is
    identified by the metadata that were checked when it was accepted, not by those in its content.
    """

    def __init__(self, state: Any, task: Any) -> None:
        self._state, self._task = state, task
        self._sent: dict[str, Message] = {}
        self.end_reason = ""  # why the run was ended from outside

    def get_nodes(self) -> Iterable[NodeInfo]:
        """The connected nodes with their public keys."""
        self._require_running()
        return list(runtime.get_nodes(GetNodesRequest(), self._state, self._task).nodes)

    def get_node_ids(self) -> Iterable[int]:
        """The numbers of the connected nodes."""
        return [node.node_id for node in self.get_nodes()]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Send; the number of every message, "" for one that could not be sent."""
        self._require_running()
        self.clear()
        outgoing = list(messages)
        if not outgoing:
            return []
        request, objects = PushAppMessagesRequest(), dict[str, Any]()
        with no_object_id_recompute():
            for message in outgoing:
                own = {"_run_id": self._task.run_id, "_src_node_id": SUPERLINK_NODE_ID}
                message.metadata.__dict__.update(own)
                message.metadata.__dict__["_message_id"] = message.object_id
                request.messages_list.append(message_to_proto(remove_content_from_message(message)))
                request.message_object_trees.append(get_object_tree(message))
                objects.update(get_all_nested_objects(message))
            sent = runtime.push_messages(request, self._state, self._task)
            for name in sent.objects_to_push:
                content = objects[name].deflate()
                self._state.store_object(self._task.run_id, sent.session_id, name, content)
        numbers = [str(number) for number in sent.message_ids]
        for number, message in zip(numbers, outgoing, strict=True):
            if number:
                self._sent[number] = remove_content_from_message(message)
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """The replies that have arrived, each once."""
        self._require_running()
        waiting = list(message_ids)
        replied = self._state.message_ins_id_to_message_res_id
        arrived = [number for number in waiting if number in replied]
        replies = [reply for number in arrived for reply in self._pull_reply(number)]
        others = [number for number in waiting if number not in arrived]
        return [*replies, *self._pull(others), *self._lost(waiting)]

    def _pull_reply(self, number: str) -> list[Message]:
        """The reply to one message; none while parts of it are missing.

        Whatever is wrong with it is the fault of its sender, and an error message takes its place.
        """
        try:
            return [] if self._is_arriving(number) else self._pull([number])
        except Exception as error:  # a hostile client may have deleted or replaced parts
            self._state.delete_messages({number})
            return [self._fault(number, error)]

    def _pull(self, message_ids: list[str]) -> list[Message]:
        """The replies that Flower has, and error messages for clients that it has lost."""
        request = PullAppMessagesRequest(message_ids=message_ids)
        response = runtime.pull_messages(request, self._state, self._task)
        pairs = zip(response.messages_list, response.message_object_trees, strict=True)
        return [self._reply(proto, tree) for proto, tree in pairs]

    def _fault(self, number: str, error: Exception) -> Message:
        """An error message in the place of a reply."""
        reason = f"its reply cannot be read ({describe_error(error)})"
        return Message(Error(ErrorCode.MESSAGE_UNAVAILABLE, reason), reply_to=self._sent[number])

    def _is_arriving(self, number: str) -> bool:
        """Whether parts of an accepted reply are still missing and its sender is online."""
        reply = self._state.message_ins_id_to_message_res_id.get(number)
        if reply is None:
            return False
        tree = self._state.object_store.get_object_tree(reply)
        names = [node.object_id for node in iterate_object_tree(tree)]
        parts = [self._state.get_object(self._task.run_id, name) for name in names]
        node = self._state.message_ins_store[number].metadata.dst_node_id
        online = self._state.get_node_info(node_ids=[node], statuses=[NodeStatus.ONLINE])
        return b"" in parts and bool(online)

    def _reply(self, proto: Any, tree: Any) -> Message:
        """A reply, or an error message in its place."""
        names = [node.object_id for node in iterate_object_tree(tree)]
        parts = {name: self._state.get_object(self._task.run_id, name) for name in names}
        own, number = proto.metadata.message_id, proto.metadata.reply_to_message_id
        confirmed = ConfirmMessageReceivedRequest(message_object_id=own)
        runtime.confirm_message_received(confirmed, self._state, self._task)
        try:
            if not all(parts.values()):
                raise ValueError("a part of it has not arrived")
            reply = inflate_object_from_contents(own, parts)
            if not isinstance(reply, Message):
                raise TypeError(f"a {type(reply).__name__} was sent as a message")
        except Exception as error:  # a broken or hostile client may send anything
            return self._fault(number, error)
        reply.__dict__["_metadata"] = message_from_proto(proto).metadata
        return reply

    def _lost(self, waiting: Iterable[str]) -> list[Message]:
        """An error message for every message that its client has lost and cannot answer.

        A client that connects holds no messages: it lost those of the time before, when it was
        killed or its connection broke. Without this, the server would wait for the round's limit.
        """
        lost = []
        for number in waiting:
            sent = self._state.message_ins_store.get(number)
            if sent is None or not sent.metadata.delivered_at:
                continue
            node = self._state.nodes[sent.metadata.dst_node_id]
            delivered, connected = sent.metadata.delivered_at, node.last_activated_at
            if datetime.fromisoformat(connected) > datetime.fromisoformat(delivered):
                self._state.delete_messages({number})
                fault = Error(ErrorCode.NODE_UNAVAILABLE, "it was restarted or disconnected")
                lost.append(Message(fault, reply_to=self._sent[number]))
        return lost

    def clear(self) -> None:
        """Delete what is left of earlier batches, including replies that come too late."""
        self._state.delete_messages({*self._sent})
        self._sent = {}
        self._state.delete_sessions_in_run(self._task.run_id)
        with suppress(KeyError):  # nothing is stored
            self._state.object_store.delete_objects_in_run(self._task.run_id)

    def _require_running(self) -> None:
        if self.end_reason:
            raise InputError(f"run: {self.end_reason}")

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Not used: `WatchedGrid` waits for replies."""
        raise NotImplementedError

    def set_run(self, run: object) -> None:
        """A grid belongs to one run."""

    @property
    def run(self):  # type: ignore[no-untyped-def]
        """Flower's run."""
        return run_from_proto(self._state.get_run_info(run_ids=[self._task.run_id])[0])

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """A message to a node."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)


RunFunction = Callable[[Grid, Mapping[str, object]], None]


def run_tasks(
    superlink: SuperLink, run: RunFunction, stop: threading.Event, *, every: float = 0.1
) -> None:
    """Until stopped: call `run` in a new thread for every run that an operator starts.

    The app that was sent with the run is ignored, except for the values of its settings.
    """
    request = AcquireTaskRequest(supported_task_types=[*TaskType])
    while not stop.wait(every):
        response = runtime.acquire_task(request, superlink.state)
        if response.token:
            arguments = (superlink.state, response.task, run)
            threading.Thread(target=_run_task, args=arguments, daemon=True).start()


def _run_task(state: Any, task: Any, run: RunFunction) -> None:
    grid, ended = MemoryGrid(state, task), threading.Event()
    threading.Thread(target=_keep_alive, args=(state, task, grid, ended), daemon=True).start()
    outcome, details = SubStatus.FAILED, ""
    try:
        if task.type != TaskType.SERVER_APP:
            raise InputError(f"run: this server only trains; it runs no {task.type}")
        task_input = runtime.pull_task_input(PullTaskInputRequest(), state, task)
        run(grid, run_from_proto(task_input.run).override_config)
        outcome = SubStatus.COMPLETED
    except Exception as error:
        logging.getLogger("glocal").error("a run has ended", exc_info=error)
        details = str(error) if isinstance(error, InputError) else describe_error(error)
    finally:
        ended.set()
        grid.clear()
        finished = PushTaskOutputRequest(sub_status=outcome, details=details)
        runtime.push_task_output(finished, state, task)


def _keep_alive(state: Any, task: Any, grid: MemoryGrid, ended: threading.Event) -> None:
    """Send the run's heartbeats, which Flower expects; it rejects those of a stopped run."""
    while not ended.wait(_HEARTBEAT):
        if not state.acknowledge_task_heartbeat(task.task_id):
            grid.end_reason = "it was stopped"


class RunState(NamedTuple):
    """A run's state as Flower sees it: whether it has ended, and why."""

    finished: bool
    details: str

    @classmethod
    def of(cls, run: Any) -> "RunState":
        """The state in Flower's own record of a run."""
        status = run.status
        return cls(status.status == Status.FINISHED, status.details or status.sub_status)


@dataclass(frozen=True)
class ControlConnection:
    """An operator's connection to a running server."""

    client: ControlHttpClient

    def nodes(self) -> dict[int, tuple[str, bytes]]:
        """Every registered node: its status and public key."""
        listed = self.client.ListNodes(ListNodesRequest()).nodes_info
        return {node.node_id: (node.status, node.public_key) for node in listed}

    def start(self, config: Mapping[str, str | bool]) -> int:
        """Start a run; the server uses its own code and takes only these settings."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # from a dependency of Flower
            bundle, _ = build_fab_from_files({"pyproject.toml": _BUNDLE.encode()})
        fab = fab_to_proto(Fab(hashlib.sha256(bundle).hexdigest(), bundle, {}))
        settings = user_config_to_proto(dict(config))
        request = StartRunRequest(fab=fab, override_config=settings)
        return int(self.client.StartRun(request).run_id)

    def run(self, number: int) -> RunState | None:
        """A run's state; None if this server, after a restart, does not know the run."""
        try:
            runs = self.client.ListRuns(ListRunsRequest(run_id=number)).run_dict
        except httpx.HTTPStatusError as error:
            if error.response.status_code == 404:
                return None
            raise
        return RunState.of(runs[number])

    def latest_run_states(self) -> dict[str, RunState]:
        """The state of the last start of every run, by our own run names."""
        runs = self.client.ListRuns(ListRunsRequest(limit=1000)).run_dict.values()
        starts = sorted(runs, key=lambda run: run.pending_at)
        return {run.override_config["run"].string: RunState.of(run) for run in starts}


@dataclass(frozen=True)
class _Bearer:
    """Sends the operator's secret with every request."""

    secret: str

    def intercept(self, context: Any, call_next: Callable[[Any], httpx.Response]) -> httpx.Response:
        context.request.headers["authorization"] = f"Bearer {self.secret}"
        return call_next(context)


@dataclass(frozen=True)
class _SocketFile(httpx.BaseTransport):
    """Requests through a socket file; httpx's own transport leaks it if nothing answers."""

    path: Path

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        connection = http.client.HTTPConnection("superlink")
        with socket.socket(socket.AF_UNIX) as connection.sock, closing(connection):
            connection.sock.settimeout(30)
            connection.sock.connect(str(self.path))
            headers = dict(request.headers)
            connection.request(request.method, request.url.path, request.content, headers)
            response = connection.getresponse()
            body = response.read()
            return httpx.Response(response.status, headers=response.getheaders(), content=body)


def control_connection(web: httpx.Client, secret: str) -> ControlConnection:
    """An operator's connection, with the secret."""
    version = RuntimeVersionHttpInterceptor(component_name="flwr CLI")
    client = ControlHttpClient("http://superlink", interceptors=[version, _Bearer(secret)])
    client.close()  # its own web client is replaced
    client._client = web
    return ControlConnection(client)


@contextmanager
def connect_control(path: Path, secret: str) -> Iterator[ControlConnection]:
    """A connection through the operator's socket file; a failure is one line."""
    try:
        with httpx.Client(transport=_SocketFile(path)) as web:
            yield control_connection(web, secret)
    except httpx.HTTPStatusError as error:
        raise InputError(
            f"deploy: the server behind {path} refuses ({describe_error(error)}); "
            "see its logs/server.log"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise InputError(
            f"deploy: the server of {path.parent} does not answer ({describe_error(error)}); "
            "start it with `glocal deploy server`"
        ) from error
