"""The server's half: rounds as a conductor decides them, in messages through a grid of Flower's."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from cryptography.hazmat.primitives import serialization
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.serverapp import Grid, ServerApp

from glocal.deploy.flower.protocol import Instructions, Reply, Server
from glocal.deploy.flower.records import instructions_to_record, read_reply, to_record
from glocal.deploy.flower.secagg_server import secure_mean

_POLL = 0.05  # seconds
_DAY = 24 * 3600.0  # a message's life in seconds; how long it is waited for is the conductor's
ADAPT = f"{MessageType.TRAIN}.settle"


class RunLoop:
    """The rounds of a run: what its conductor decides, as messages through a grid."""

    def __init__(self, server: Server, grid: Grid) -> None:
        self.server, self.grid = server, WatchedGrid(grid, server.on_reply)

    def run_round(self) -> None:
        """One round: who is new is greeted and settles, a cohort trains, who is asked tests."""
        self._wait_for_clients()
        if self.server.secure_aggregation:
            self._train_masked()
        else:
            instructions = self.server.configure_train()
            self.server.aggregate_train(
                self._send_and_receive(instructions, MessageType.TRAIN, self._shared())
            )
        self._evaluate()

    def adapt(self) -> None:
        """No round: newcomers learn their private part, then everybody tests."""
        self._wait_for_clients()
        self._evaluate()

    def _shared(self) -> ConfigRecord:
        return to_record(self.server.shared)

    def _train_masked(self) -> None:
        """Only the mean of the cohort is unmasked."""
        instructions = self.server.configure_train()
        wait, max_weight = self.server.round_timeout, self.server.max_weight
        shared = self.server.shared
        mean = secure_mean(self.grid, shared, instructions, wait=wait, max_weight=max_weight)
        self.server.aggregate_masked(*mean)

    def _evaluate(self) -> None:
        """Every device tests its own model, when it is time to."""
        configure_evaluate = self.server.configure_evaluate()
        if configure_evaluate:
            replies = self._send_and_receive(
                configure_evaluate, MessageType.EVALUATE, self._shared()
            )
            self.server.aggregate_evaluate(replies)

    def _wait_for_clients(self) -> None:
        """Until enough devices are there, and newcomers have learnt their private part."""
        while True:
            nodes = {node.node_id: ssh_key(node.public_key) for node in self.grid.get_nodes()}
            configure_handshake = self.server.configure_handshake(nodes)
            wait = self.server.handshake_timeout
            self.server.accept_handshakes(
                self._send_and_receive(configure_handshake, MessageType.QUERY, None, wait=wait)
            )
            if not self.server.needs_more_clients():
                break
            time.sleep(_POLL)
        configure_adaptation = self.server.configure_adaptation()
        self.server.aggregate_adaptation(
            self._send_and_receive(configure_adaptation, ADAPT, self._shared())
        )

    def _send_and_receive(
        self,
        instructions: Mapping[int, Instructions],
        kind: str,
        shared: ConfigRecord | None,
        *,
        wait: float | None = None,
    ) -> dict[int, Reply]:
        if not instructions:
            return {}
        timeout = self.server.round_timeout if wait is None else wait
        return replies_by_node(
            self.grid.send_and_receive(messages(instructions, kind, shared), timeout=timeout)
        )


def ssh_key(key: bytes) -> str:
    """A node's public key as the roster has it; "" for none, and for one of another kind."""
    try:
        public = serialization.load_pem_public_key(key)
    except ValueError:
        return ""
    line = public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return line.decode()


def messages(
    instructions: Mapping[int, Instructions], kind: str, shared: ConfigRecord | None
) -> list[Message]:
    """One message per node."""
    return [
        Message(
            instructions_to_record(shared, order),
            node,
            kind,
            group_id=str(order.round_index),
            ttl=_DAY,
        )
        for node, order in instructions.items()
    ]


def replies_by_node(replies: Iterable[Message]) -> dict[int, Reply]:
    """Replies by the node that sent them."""
    return {message.metadata.src_node_id: read_reply(message) for message in replies}


class WatchedGrid(Grid):
    """A grid whose replies are shown as they come, each under the node that was asked.

    Flower's own errors would come from node 1.
    """

    def __init__(self, grid: Grid, on_reply: Callable[[int], None]) -> None:
        self.grid, self.on_reply = grid, on_reply

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Send all, and collect replies until all are there or the time is up."""
        asked, found = [*messages], list[Message]()
        sent = [*self.grid.push_messages(asked)]
        waiting = {
            number: message.metadata.dst_node_id
            for number, message in zip(sent, asked, strict=True)
            if number
        }
        end = time.monotonic() + (timeout or float("inf"))
        while waiting and time.monotonic() < end:
            for message in self.grid.pull_messages([*waiting]):
                node = waiting.pop(message.metadata.reply_to_message_id, None)
                if node is not None:
                    message.metadata.__dict__["_src_node_id"] = node
                    found.append(message)
                    self.on_reply(node)
            if waiting:
                time.sleep(_POLL)
        return found

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
        """A message."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Who is connected."""
        return self.grid.get_node_ids()

    def get_nodes(self) -> Iterable[Any]:
        """Who is connected, with their public keys."""
        return self.grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send."""
        return self.grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Receive."""
        return self.grid.pull_messages(message_ids)


def server_app(open_server: Callable[[Mapping[str, object]], Server]) -> ServerApp:
    """A ServerApp for the run that its configuration names, in a Flower installation of others."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        run_to_end(grid, open_server(context.run_config))

    return app


def run_to_end(grid: Grid, server: Server) -> None:
    """A run from where it stands to its end; what ends it is written down."""
    rounds = RunLoop(server, grid)
    try:
        if not server.rounds_left:
            rounds.adapt()
        while server.rounds_left:
            rounds.run_round()
    except BaseException as error:
        server.on_failure(error)
        raise
    server.finish()
