"""The server's side of Flower: the rounds that a server decides, as messages through a grid."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from cryptography.hazmat.primitives import serialization
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.serverapp import Grid, ServerApp

from glocal.deploy.flower.protocol import Reply, Request, Server
from glocal.deploy.flower.records import read_reply, request_to_record, to_record
from glocal.deploy.flower.secagg_server import secure_mean

_POLL = 0.05  # seconds
_DAY = 24 * 3600.0  # a message's life in seconds; the server decides how long it waits
ADAPT = f"{MessageType.TRAIN}.adapt"


class RunLoop:
    """The rounds of a run: the server's decisions as messages through a grid."""

    def __init__(self, server: Server, grid: Grid) -> None:
        self.server, self.grid = server, WatchedGrid(grid, server.on_reply)

    def run_round(self) -> None:
        """One round: handshakes and adaptation of new clients, training, evaluation when due."""
        self._wait_for_clients()
        if self.server.secure_aggregation:
            self._train_masked()
        else:
            requests = self.server.configure_train()
            self.server.aggregate_train(self._send_and_receive(requests, MessageType.TRAIN))
        self._evaluate()

    def adapt_and_evaluate(self) -> None:
        """No training: new clients fit their private part, then all clients evaluate."""
        self._wait_for_clients()
        self._evaluate()

    def _train_masked(self) -> None:
        """Train; only the mean of the sampled clients' uploads is unmasked."""
        requests = self.server.configure_train()
        mean, replies = secure_mean(
            self.grid,
            requests,
            self.server.payload_schema,
            timeout=self.server.round_timeout,
            max_weight=self.server.max_weight,
        )
        self.server.aggregate_masked(mean, replies)

    def _evaluate(self) -> None:
        """Let every client evaluate its own model, if it is time to."""
        requests = self.server.configure_evaluate()
        if requests:
            replies = self._send_and_receive(requests, MessageType.EVALUATE)
            self.server.aggregate_evaluate(replies)

    def _wait_for_clients(self) -> None:
        """Wait until enough clients are connected, then let new ones fit their private part."""
        while True:
            nodes = {node.node_id: ssh_key(node.public_key) for node in self.grid.get_nodes()}
            pending = self.server.configure_handshake(nodes)
            timeout = self.server.handshake_timeout
            replies = self._send_and_receive(pending, MessageType.QUERY, timeout=timeout)
            self.server.accept_handshakes(replies)
            if not self.server.needs_more_clients():
                break
            time.sleep(_POLL)
        replies = self._send_and_receive(self.server.configure_adaptation(), ADAPT)
        self.server.aggregate_adaptation(replies)

    def _send_and_receive(
        self, requests: Mapping[int, Request], kind: str, *, timeout: float | None = None
    ) -> dict[int, Reply]:
        if not requests:
            return {}
        seconds = self.server.round_timeout if timeout is None else timeout
        replies = self.grid.send_and_receive(messages(requests, kind), timeout=seconds)
        return replies_by_node(replies)


def ssh_key(key: bytes) -> str:
    """A node's public key as the registry has it; "" for none, and for a key of another kind."""
    try:
        public = serialization.load_pem_public_key(key)
    except ValueError:
        return ""
    line = public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return line.decode()


def messages(requests: Mapping[int, Request], kind: str) -> list[Message]:
    """One message per node; what several nodes are sent is packed once."""
    packed: dict[int, ConfigRecord] = {}
    outgoing = []
    for node, request in requests.items():
        tree, record = request.message, None
        if tree is not None:
            record = packed.get(id(tree)) or to_record(tree)
            packed[id(tree)] = record
        content = request_to_record(record, request.instructions)
        group = str(request.instructions.round_index)
        outgoing.append(Message(content, node, kind, group_id=group, ttl=_DAY))
    return outgoing


def replies_by_node(replies: Iterable[Message]) -> dict[int, Reply]:
    """Replies by the node that sent them."""
    return {message.metadata.src_node_id: read_reply(message) for message in replies}


class WatchedGrid(Grid):
    """A grid that reports each reply as it arrives, under the node that the message was sent to.

    Flower would name node 1 as the sender of its own errors.
    """

    def __init__(self, grid: Grid, on_reply: Callable[[int], None]) -> None:
        self.grid, self.on_reply = grid, on_reply

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Send all, and collect replies until all have arrived or the time is up."""
        requests, replies = [*messages], list[Message]()
        pending = dict[str, int]()
        for number, message in zip(self.grid.push_messages(requests), requests, strict=True):
            if number:
                pending[number] = message.metadata.dst_node_id
        end = time.monotonic() + (timeout or float("inf"))
        while pending and time.monotonic() < end:
            for message in self.grid.pull_messages([*pending]):
                node = pending.pop(message.metadata.reply_to_message_id, None)
                if node is not None:
                    message.metadata.__dict__["_src_node_id"] = node
                    replies.append(message)
                    self.on_reply(node)
            if pending:
                time.sleep(_POLL)
        return replies

    def set_run(self, run: object) -> None:
        """Flower has done so."""

    @property
    def run(self):  # type: ignore[no-untyped-def]
        """Flower's run."""
        return self.grid.run

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

    def get_node_ids(self) -> Iterable[int]:
        """The numbers of the connected nodes."""
        return self.grid.get_node_ids()

    def get_nodes(self) -> Iterable[Any]:
        """The connected nodes with their public keys."""
        return self.grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send."""
        return self.grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Receive."""
        return self.grid.pull_messages(message_ids)


def server_app(open_server: Callable[[Mapping[str, object]], Server]) -> ServerApp:
    """A ServerApp for the run that its configuration names, for any Flower installation."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        run_to_end(grid, open_server(context.run_config))

    return app


def run_to_end(grid: Grid, server: Server) -> None:
    """Continue a run from its last round to its end; a failure is recorded."""
    loop = RunLoop(server, grid)
    try:
        if not server.rounds_left:
            loop.adapt_and_evaluate()
        while server.rounds_left:
            loop.run_round()
    except BaseException as error:
        server.on_failure(error)
        raise
    server.finish()
