"""The server's half: rounds as a conductor decides them, in messages through a grid of Flower's."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from cryptography.hazmat.primitives import serialization
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.serverapp import Grid, ServerApp

from glocal.deploy.flower.contract import Conductor, Order, Reply
from glocal.deploy.flower.records import asking, reply_of, to_record
from glocal.deploy.flower.secure_server import secure_mean

_POLL = 0.05  # seconds
_DAY = 24 * 3600.0  # a message's life in seconds; how long it is waited for is the conductor's
SETTLE = f"{MessageType.TRAIN}.settle"


class Rounds:
    """The rounds of a run: what its conductor decides, as messages through a grid."""

    def __init__(self, conductor: Conductor, grid: Grid) -> None:
        self.conductor, self.grid = conductor, WatchedGrid(grid, conductor.heard)

    def train(self) -> None:
        """One round: who is new is greeted and settles, a cohort trains, who is asked tests."""
        self._gather()
        if self.conductor.secure:
            self._train_masked()
        else:
            orders = self.conductor.orders()
            self.conductor.collect(self._exchange(orders, MessageType.TRAIN, self._shared()))
        self._test()

    def visit(self) -> None:
        """No round: newcomers learn their private part, then everybody tests."""
        self._gather()
        self._test()

    def _shared(self) -> ConfigRecord:
        return to_record(self.conductor.shared)

    def _train_masked(self) -> None:
        """Only the mean of the cohort is unmasked."""
        orders = self.conductor.orders()
        wait, heaviest = self.conductor.round_wait, self.conductor.heaviest
        shared = self.conductor.shared
        mean = secure_mean(self.grid, shared, orders, wait=wait, heaviest=heaviest)
        self.conductor.collect_mean(*mean)

    def _test(self) -> None:
        """Every device tests its own model, when it is time to."""
        questions = self.conductor.questions()
        if questions:
            replies = self._exchange(questions, MessageType.EVALUATE, self._shared())
            self.conductor.tested(replies)

    def _gather(self) -> None:
        """Until enough devices are there, and newcomers have learnt their private part."""
        while True:
            nodes = {node.node_id: ssh_key(node.public_key) for node in self.grid.get_nodes()}
            strangers = self.conductor.strangers(nodes)
            wait = self.conductor.greeting_wait
            self.conductor.meet(self._exchange(strangers, MessageType.QUERY, None, wait=wait))
            if not self.conductor.lacks():
                break
            time.sleep(_POLL)
        newcomers = self.conductor.newcomers()
        self.conductor.settled(self._exchange(newcomers, SETTLE, self._shared()))

    def _exchange(
        self,
        orders: Mapping[int, Order],
        kind: str,
        shared: ConfigRecord | None,
        *,
        wait: float | None = None,
    ) -> dict[int, Reply]:
        if not orders:
            return {}
        timeout = self.conductor.round_wait if wait is None else wait
        return by_node(self.grid.send_and_receive(messages(orders, kind, shared), timeout=timeout))


def ssh_key(key: bytes) -> str:
    """A node's public key as the roster has it; "" for none, and for one of another kind."""
    try:
        public = serialization.load_pem_public_key(key)
    except ValueError:
        return ""
    line = public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return line.decode()


def messages(orders: Mapping[int, Order], kind: str, shared: ConfigRecord | None) -> list[Message]:
    """One message per node."""
    return [Message(asking(shared, order), node, kind, group_id=str(order.round_index), ttl=_DAY) for node, order in orders.items()]


def by_node(replies: Iterable[Message]) -> dict[int, Reply]:
    """Replies by the node that sent them."""
    return {message.metadata.src_node_id: reply_of(message) for message in replies}


class WatchedGrid(Grid):
    """A grid whose replies are shown as they come, each under the node that was asked.

    Flower's own errors would come from node 1.
    """

    def __init__(self, grid: Grid, heard: Callable[[int], None]) -> None:
        self.grid, self.heard = grid, heard

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send all, and collect replies until all are there or the time is up."""
        asked, found = [*messages], list[Message]()
        sent = [*self.grid.push_messages(asked)]
        waiting = {number: message.metadata.dst_node_id for number, message in zip(sent, asked, strict=True) if number}
        end = time.monotonic() + (timeout or float("inf"))
        while waiting and time.monotonic() < end:
            for message in self.grid.pull_messages([*waiting]):
                node = waiting.pop(message.metadata.reply_to_message_id, None)
                if node is not None:
                    message.metadata.__dict__["_src_node_id"] = node
                    found.append(message)
                    self.heard(node)
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


def server_app(open_conductor: Callable[[Mapping[str, object]], Conductor]) -> ServerApp:
    """A ServerApp for the run that its configuration names, in a Flower installation of others."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        conduct(grid, open_conductor(context.run_config))

    return app


def conduct(grid: Grid, conductor: Conductor) -> None:
    """A run from where it stands to its end; what ends it is written down."""
    rounds = Rounds(conductor, grid)
    try:
        if not conductor.rounds_left:
            rounds.visit()
        while conductor.rounds_left:
            rounds.train()
    except BaseException as error:
        conductor.failed(error)
        raise
    conductor.finish()
