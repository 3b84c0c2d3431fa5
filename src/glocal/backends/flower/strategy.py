"""The server's half: a strategy whose rounds are conducted by us, and the grid it speaks through."""

import time
from collections.abc import Callable, Iterable, Mapping

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Strategy

from glocal.backends.flower.contract import Conductor, Order, Reply
from glocal.backends.flower.records import asking, reply_of, to_record
from glocal.backends.flower.secure import secure_mean
from glocal.keep import Json

_POLL = 0.5  # seconds
SETTLE = f"{MessageType.TRAIN}.settle"


class SharedPartStrategy(Strategy):
    """Sends the shared part to a cohort, checks and averages what comes back, keeps every round."""

    def __init__(self, conductor: Conductor) -> None:
        self.conductor = conductor
        self.asked: dict[int, Order] = {}

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> list[Message]:
        """Greet who is new, wait for enough devices, let newcomers settle; then the round's messages."""
        self._gather(grid)
        newcomers = self.conductor.newcomers()
        self.conductor.settled(self._exchange(grid, newcomers, SETTLE, to_record(self.conductor.shared)))
        self.asked = self.conductor.orders()
        return messages(self.asked, MessageType.TRAIN, to_record(self.conductor.shared))

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord, MetricRecord]:
        """Check and average; a round without a valid reply fails the run."""
        row = self.conductor.collect(by_node(replies))
        return to_record(self.conductor.shared), _metrics(row)

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> list[Message]:
        """Who tests its own model on its own data now."""
        self.asked = self.conductor.questions()
        return messages(self.asked, MessageType.EVALUATE, to_record(self.conductor.shared))

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """What they found."""
        return _metrics(self.conductor.tested(by_node(replies))) if self.asked else None

    def summary(self) -> None:
        """Nothing to add: the conductor writes down what a run is."""

    def rounds(self, grid: Grid, number: int) -> None:
        """So many rounds by Flower's own loop, with replies watched as they come."""
        watched = WatchedGrid(grid, self.conductor.heard)
        self.start(watched, to_record(self.conductor.shared), number, timeout=self.conductor.round_wait)

    def secure_rounds(self, grid: Grid, number: int) -> None:
        """So many rounds in which only the mean of a cohort is unmasked."""
        watched = WatchedGrid(grid, self.conductor.heard)
        for place in range(number):
            self.configure_train(place, ArrayRecord(), ConfigRecord(), watched)
            wait, heaviest = self.conductor.round_wait, self.conductor.heaviest
            self.conductor.collect_mean(*secure_mean(watched, self.conductor.shared, self.asked, wait=wait, heaviest=heaviest))
            asking_now = self.configure_evaluate(place, ArrayRecord(), ConfigRecord(), watched)
            self.aggregate_evaluate(place, watched.send_and_receive(asking_now, timeout=self.conductor.round_wait))

    def visit(self, grid: Grid) -> None:
        """No round: newcomers learn their private part, then everybody tests."""
        watched = WatchedGrid(grid, self.conductor.heard)
        shared = to_record(self.conductor.shared)
        self._gather(watched)
        self.conductor.settled(self._exchange(watched, self.conductor.newcomers(), SETTLE, shared))
        self.conductor.tested(self._exchange(watched, self.conductor.questions(), MessageType.EVALUATE, shared))

    def _gather(self, grid: Grid) -> None:
        """Until enough devices are there; the conductor gives up when it has waited for too long."""
        while True:
            nodes = {*grid.get_node_ids()}
            strangers = self.conductor.strangers(nodes)
            wait = self.conductor.greeting_wait
            self.conductor.meet(self._exchange(grid, strangers, MessageType.QUERY, None, wait=wait))
            if not self.conductor.lacks(nodes):
                return
            time.sleep(_POLL)

    def _exchange(
        self, grid: Grid, orders: Mapping[int, Order], kind: str, shared: ArrayRecord | None, *, wait: float | None = None
    ) -> dict[int, Reply]:
        if not orders:
            return {}
        timeout = self.conductor.round_wait if wait is None else wait
        return by_node(grid.send_and_receive(messages(orders, kind, shared), timeout=timeout))


def messages(orders: Mapping[int, Order], kind: str, shared: ArrayRecord | None) -> list[Message]:
    """One message per node."""
    return [
        Message(asking(shared, order), node, kind, group_id=str(order.round_index), ttl=24 * 3600) for node, order in orders.items()
    ]


def by_node(replies: Iterable[Message]) -> dict[int, Reply]:
    """Replies by the node that sent them."""
    return {message.metadata.src_node_id: reply_of(message) for message in replies}


def _metrics(row: Json) -> MetricRecord:
    return MetricRecord({name: value for name, value in row.items() if isinstance(value, int | float)})


class WatchedGrid(Grid):
    """A grid whose replies are shown as they come, each under the node that was asked: Flower's own errors come from node 1."""

    def __init__(self, grid: Grid, heard: Callable[[int, Reply], None]) -> None:
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
                    self.heard(node, reply_of(message))
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
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """A message."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Who is connected."""
        return self.grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send."""
        return self.grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Receive."""
        return self.grid.pull_messages(message_ids)


def server_app(open_conductor: Callable[[Mapping[str, object]], Conductor]) -> ServerApp:
    """A ServerApp for the run that its configuration names: it trains, or only takes newcomers in and tests."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        conduct(grid, open_conductor(context.run_config))

    return app


def conduct(grid: Grid, conductor: Conductor) -> None:
    """A run from where it stands to its end; what ends it is written down."""
    strategy = SharedPartStrategy(conductor)
    try:
        if conductor.rounds_left and conductor.secure:
            strategy.secure_rounds(grid, conductor.rounds_left)
        elif conductor.rounds_left:
            strategy.rounds(grid, conductor.rounds_left)
        else:
            strategy.visit(grid)
    except BaseException as error:
        conductor.failed(error)
        raise
    conductor.finish()
