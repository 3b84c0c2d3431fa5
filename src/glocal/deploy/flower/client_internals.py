"""Flower's undocumented names on the client side: only this file knows them.

Written for flwr 1.41 and 1.42; `tests/deploy/test_flower_internals.py` names what an upgrade took away. The
server's fleet interface is spoken directly, by a process that listens on no port. What a SuperNode
would do besides, to fetch the app that a run came with and to start it, is left out: nothing that
comes over the wire is ever run.
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
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
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

__all__ = [  # and what secure_client.py is made of
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
    "parameters_to_ndarrays",
    "secaggplus_mod",
]

HEARTBEAT = (
    10.0  # seconds between signs of life, the fewest that Flower allows; after 20 a client is lost
)
_PULL_WAIT = 0.02  # seconds before asking again for a part of a message that is still being stored


class ServerUnreachableError(Exception):
    """The server does not answer, or is not the one that the client's authority has signed."""


class ServerRejectedError(Exception):
    """The server answered, and refused; by 401 it says that it does not know who asks."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(f"{status} {why}".strip())
        self.status = status

    @property
    def unauthorized(self) -> bool:
        """Whether the key is unknown or revoked, the clock is wrong, or the server was started anew."""
        return self.status == 401


@contextmanager
def _errors() -> Iterator[None]:
    """The web client's errors as ours."""
    try:
        yield
    except httpx.HTTPStatusError as error:
        raise ServerRejectedError(error.response.status_code, error.response.text[:200]) from error
    except httpx.TransportError as error:
        raise ServerUnreachableError(f"{error or type(error).__name__}") from error


@dataclass
class _RequestSigner:
    """Signs the time with every request, as Flower's own would; never the same time twice.

    Flower's own brings 20 MB of modules along, and its times may coincide in two threads.
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
    """A message for a client, and the run that it belongs to."""

    message: Message
    run: int


@dataclass
class FleetConnection:
    """One client's line to the server: TLS, its own key, no port of its own."""

    client: FleetHttpClient
    key: bytes
    node: Node = field(default_factory=Node)

    @classmethod
    def to(
        cls, address: str, authority: bytes, key: ec.EllipticCurvePrivateKey
    ) -> "FleetConnection":
        """A line to the server at HOST:PORT whose certificate this authority has signed."""
        client = FleetHttpClient.from_server_address(
            address, False, authority, [_RequestSigner(key)]
        )
        return cls(client, public_key_to_bytes(key.public_key()))

    def connect(self, last: int) -> int:
        """Come in; `last` is the number this client had when it was killed, 0 if it was not."""
        with _errors():
            try:
                self._activate()
            except httpx.HTTPStatusError as error:
                if error.response.status_code == 401 or not last:
                    raise
                # its place is still held, for it never left: only who has the key can leave it now
                self.client.DeactivateNode(DeactivateNodeRequest(node_id=last))
                self._activate()
        return int(self.node.node_id)

    def _activate(self) -> None:
        request = ActivateNodeRequest(public_key=self.key, heartbeat_interval=HEARTBEAT)
        self.node = Node(node_id=self.client.ActivateNode(request).node_id)

    def send_heartbeat(self) -> None:
        """Give a sign of life."""
        request = SendNodeHeartbeatRequest(node=self.node, heartbeat_interval=HEARTBEAT)
        with _errors():
            if not self.client.SendNodeHeartbeat(request).success:
                raise ServerRejectedError(401, "the server does not know this client")

    def receive(self) -> ReceivedMessage | None:
        """The next message, if there is one; its parts are data, and are read as such."""
        with _errors():
            given = self.client.PullMessages(PullMessagesRequest(node=self.node))
            if not given.messages_list:
                return None
            tree, run = given.message_object_trees[0], given.messages_list[0].metadata.run_id
            message = pull_and_inflate_object_from_tree(
                tree,
                make_pull_object_fn_protobuf(self.client.PullObject, self.node, run),
                make_confirm_message_received_fn_protobuf(
                    self.client.ConfirmMessageReceived, self.node, run
                ),
                return_type=Message,
                initial_backoff=_PULL_WAIT,
            )
        message.metadata.__dict__["_message_id"] = tree.object_id
        return ReceivedMessage(message, run)

    def send(self, reply: Message, run: int, seconds: float) -> None:
        """Send a reply, which took so long to work out."""
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
            push_objects(
                get_all_nested_objects(reply),
                make_push_object_fn_protobuf(
                    self.client.PushObject, self.node, run, accepted.session_id
                ),
                object_ids_to_push={*accepted.objects_to_push},
            )

    def disconnect(self) -> None:
        """Say goodbye; a server that cannot be reached finds out by itself."""
        with suppress(httpx.HTTPError):
            self.client.DeactivateNode(DeactivateNodeRequest(node_id=self.node.node_id))
        self.client.close()


@dataclass
class ClientAppRunner:
    """Calls our ClientApp with a client's messages, in this process, inside of `import_context`.

    What SecAgg+ remembers between its stages is in `context.state`: in memory, for one run.
    """

    app: ClientApp
    config: dict[str, Any]
    import_context: Callable[[], AbstractContextManager[object]] = nullcontext
    run: int = 0
    state: RecordDict = field(default_factory=RecordDict)

    def handle(
        self, received: ReceivedMessage, node: int, lock: threading.Lock
    ) -> tuple[Message, float]:
        """The reply, and how many seconds it took; clients of one process take turns."""
        if received.run != self.run:
            self.run, self.state = received.run, RecordDict()
        context = Context(received.run, node, dict(self.config), self.state, {})
        with lock, self.import_context():
            began = time.monotonic()
            try:
                reply = self.app(message=received.message, context=context)
            except Exception as error:  # `client_app` raises words that may leave the client
                words = str(error) if isinstance(error, RuntimeError) else type(error).__name__
                fault = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, words)
                reply = Message(fault, reply_to=received.message)
        return reply, time.monotonic() - began
