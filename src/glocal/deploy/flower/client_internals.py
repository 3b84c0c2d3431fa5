"""Flower's undocumented names on the client side: only this file knows them.

Written for flwr 1.41 and 1.42; `tests/deploy/test_flower_internals.py` names what an upgrade has
removed. Our process uses the server's fleet interface directly and listens on no port. Unlike a
SuperNode, it does not fetch and start the app of a run: nothing that comes over the wire is run.
"""

import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Context, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
from flwr.common.constant import TIMESTAMP_HEADER, ErrorCode
from flwr.common.secure_aggregation.secaggplus_constants import (
    RECORD_KEY_CONFIGS as SECAGG_RECORD,
)
from flwr.common.serde import message_to_proto
from flwr.compat.common import recorddict_compat as legacy
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    pull_and_inflate_object_from_tree,
    push_objects,
)
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from flwr.supernode.fleet_http_client import FleetHttpClient

__all__ = [  # including the names that secagg_client.py needs
    "SECAGG_RECORD",
    "ClientAppRunner",
    "Code",
    "ErrorCode",
    "FitRes",
    "FleetConnection",
    "Message",
    "ReceivedMessage",
    "ServerRejectedError",
    "ServerUnreachableError",
    "Status",
    "legacy",
    "ndarrays_to_parameters",
    "secaggplus_mod",
]

# Seconds between heartbeats, the fewest that Flower allows; without one for 20 a node is offline.
HEARTBEAT = 10.0
_PULL_WAIT = 0.02  # seconds between requests for a part of a message that is not stored yet


class ServerUnreachableError(Exception):
    """The server does not answer, or its certificate is not signed by the client's authority."""


class ServerRejectedError(Exception):
    """The server refused a request; status 401 means that it does not know the client."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"{status} {reason}".strip())
        self.status = status

    @property
    def unauthorized(self) -> bool:
        """An unknown or revoked key, a wrong clock, or a restarted server."""
        return self.status == 401


@contextmanager
def _errors() -> Iterator[None]:
    """Turn the web client's errors into ours."""
    try:
        yield
    except httpx.HTTPStatusError as error:
        raise ServerRejectedError(error.response.status_code, error.response.text[:200]) from error
    except httpx.TransportError as error:
        raise ServerUnreachableError(f"{error or type(error).__name__}") from error


@dataclass
class _RequestSigner:
    """Signs the time with every request, as Flower's own signer would; never the same time twice.

    Flower's own imports 20 MB of modules, and two threads may sign the same time with it.
    """

    private: ec.EllipticCurvePrivateKey
    last: datetime = datetime.min.replace(tzinfo=UTC)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def intercept(self, context: Any, call_next: Callable[[Any], httpx.Response]) -> httpx.Response:
        with self.lock:
            self.last = max(datetime.now(UTC), self.last + timedelta(microseconds=1))
            stamp = self.last.isoformat()
        key = public_key_to_bytes(self.private.public_key())
        signature = sign_message(self.private, stamp.encode("ascii"))
        context.request.headers[FLEET_HTTP_PUBLIC_KEY_HEADER] = b64encode(key).decode()
        context.request.headers[TIMESTAMP_HEADER] = stamp
        context.request.headers[FLEET_HTTP_SIGNATURE_HEADER] = b64encode(signature).decode()
        return call_next(context)


@dataclass
class ReceivedMessage:
    """A message to the client, and the number of its run."""

    message: Message
    run: int


@dataclass
class FleetConnection:
    """One client's connection to the server's fleet interface: TLS, and its own key."""

    client: FleetHttpClient
    key: bytes
    node: Node = field(default_factory=Node)

    @classmethod
    def to(
        cls, address: str, authority: bytes, key: ec.EllipticCurvePrivateKey
    ) -> "FleetConnection":
        """A connection to the server at HOST:PORT whose certificate this authority has signed."""
        signer = _RequestSigner(key)
        client = FleetHttpClient.from_server_address(address, False, authority, [signer])
        return cls(client, public_key_to_bytes(key.public_key()))

    def connect(self) -> int:
        """Connect; the number of the node that stands for this client's key."""
        request = ActivateNodeRequest(public_key=self.key, heartbeat_interval=HEARTBEAT)
        with _errors():
            self.node = Node(node_id=self.client.ActivateNode(request).node_id)
        return int(self.node.node_id)

    def send_heartbeat(self) -> None:
        """Send a heartbeat."""
        request = SendNodeHeartbeatRequest(node=self.node, heartbeat_interval=HEARTBEAT)
        with _errors():
            if not self.client.SendNodeHeartbeat(request).success:
                raise ServerRejectedError(401, "the server does not know this client")

    def receive(self) -> ReceivedMessage | None:
        """The next message, if there is one; its parts are data and read as data."""
        client = self.client
        with _errors():
            response = client.PullMessages(PullMessagesRequest(node=self.node))
            if not response.messages_list:
                return None
            tree, run = response.message_object_trees[0], response.messages_list[0].metadata.run_id
            pull = make_pull_object_fn_protobuf(client.PullObject, self.node, run)
            confirm = make_confirm_message_received_fn_protobuf(
                client.ConfirmMessageReceived, self.node, run
            )
            message = pull_and_inflate_object_from_tree(
                tree, pull, confirm, return_type=Message, initial_backoff=_PULL_WAIT
            )
        message.metadata.__dict__["_message_id"] = tree.object_id
        return ReceivedMessage(message, run)

    def send(self, reply: Message, run: int, seconds: float) -> None:
        """Send a reply, with the seconds that it took to compute."""
        with _errors(), no_object_id_recompute():
            reply.metadata.__dict__["_message_id"] = reply.object_id
            bare = remove_content_from_message(reply) if reply.has_content() else reply
            request = PushMessagesRequest(
                node=self.node,
                messages_list=[message_to_proto(bare)],
                message_object_trees=[get_object_tree(reply)],
                clientapp_runtime_list=[seconds],
            )
            accepted = self.client.PushMessages(request)
            push = make_push_object_fn_protobuf(
                self.client.PushObject, self.node, run, accepted.session_id
            )
            objects = get_all_nested_objects(reply)
            push_objects(objects, push, object_ids_to_push={*accepted.objects_to_push})

    def disconnect(self) -> None:
        """Take the node offline; an unreachable server notices by the missing heartbeats."""
        with suppress(httpx.HTTPError):
            self.client.DeactivateNode(DeactivateNodeRequest(node_id=self.node.node_id))
        self.client.close()


@dataclass
class ClientAppRunner:
    """Calls our ClientApp with a client's messages, in this process, inside `import_context`.

    SecAgg+ stores what it needs between its stages in `context.state`: in memory, for one run.
    """

    app: ClientApp
    config: dict[str, Any]
    import_context: Callable[[], AbstractContextManager[object]] = nullcontext
    run: int = 0
    state: RecordDict = field(default_factory=RecordDict)

    def handle(
        self, received: ReceivedMessage, node: int, lock: threading.Lock
    ) -> tuple[Message, float]:
        """The reply, and the seconds that it took; clients of one process take turns."""
        if received.run != self.run:
            self.run, self.state = received.run, RecordDict()
        context = Context(received.run, node, dict(self.config), self.state, {})
        with lock, self.import_context():
            start = time.monotonic()
            try:
                reply = self.app(message=received.message, context=context)
            except Exception as error:
                # the text of a RuntimeError comes from `client_app` and may leave the client
                is_public = isinstance(error, RuntimeError)
                text = str(error) if is_public else type(error).__name__
                fault = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, text)
                reply = Message(fault, reply_to=received.message)
        return reply, time.monotonic() - start
