"""The messages between server and clients, and what each side can do; Flower carries them."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Protocol

from glocal.algorithms.contract import Message
from glocal.core.errors import InputError
from glocal.core.files import Json
from glocal.wire import Schema


@dataclass(frozen=True)
class Instructions:
    """What the server asks of a client in a round of a run.

    `last_included` is the last round whose average includes the client's upload, -1 if there is
    none. From it the client knows which private state to start from. `adapt_epochs` is how many
    epochs a new client fits its private part alone. `missed_rounds` describes the rounds during
    which the client was offline.
    """

    run: str
    round_index: int
    last_included: int = -1
    adapt_epochs: int = 0
    missed_rounds: str = ""

    def to_json(self) -> str:
        """As JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Instructions":
        """From JSON text."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Request:
    """What a client is sent: instructions, and a message where its task needs one.

    Clients that are sent the same have the same message object: it is packed once.
    """

    instructions: Instructions
    message: Message | None = None


@dataclass(frozen=True)
class ClientResult:
    """What a client returns: a payload where one is requested, its weight, and metrics.

    A metric of training is a pair [total, weight]. Those of an evaluation are under "validation"
    and "test", each under its own name.
    """

    payload: Message | None
    num_examples: int
    metrics: Json


@dataclass(frozen=True)
class Reply:
    """A client's reply before any check.

    `payload` are the bytes as they came. `fault` is the reason why there is no result. `lost` means
    that the client never sent a reply.
    """

    payload: bytes = b""
    num_examples: int = 0
    metrics: Json = field(default_factory=dict)
    fault: str = ""
    lost: bool = False


class DataError(InputError):
    """A client's data, or the code that reads them, cannot be used.

    The message may quote an example: it is for the owner, and never leaves the client.
    """


class Client(Protocol):
    """One client of a federation; messages are bytes, which it checks before it reads them."""

    @property
    def secure_aggregation(self) -> bool:
        """Whether uploads leave the client only masked."""

    def handshake(self, instructions: Instructions) -> Json:
        """Its number, its settings' fingerprint and its weight."""

    def train(self, message: bytes, instructions: Instructions) -> ClientResult:
        """Train for one round."""

    def adapt(self, message: bytes, instructions: Instructions) -> ClientResult:
        """Fit the private part alone, as a new client does."""

    def evaluate(self, message: bytes, instructions: Instructions) -> ClientResult:
        """Evaluate its own model on its own data."""


class Server(Protocol):
    """What a server decides and stores; nodes are Flower's numbers of the clients."""

    @property
    def payload_schema(self) -> Schema:
        """What a client sends back: names, shapes and types, in order."""

    @property
    def secure_aggregation(self) -> bool:
        """Whether the server sees only the mean of uploads."""

    @property
    def max_weight(self) -> float:
        """The largest weight of the sampled clients."""

    @property
    def rounds_left(self) -> int:
        """Rounds still to do; at 0, clients only adapt and evaluate."""

    @property
    def round_timeout(self) -> float:
        """Seconds to wait for the replies of a round."""

    @property
    def handshake_timeout(self) -> float:
        """Seconds to wait for the handshakes of new nodes."""

    def configure_handshake(self, nodes: Mapping[int, str]) -> dict[int, Request]:
        """Requests for the connected nodes, given with their keys, that owe a handshake."""

    def needs_more_clients(self) -> bool:
        """Whether too few clients are connected; an error once the time limit has passed."""

    def accept_handshakes(self, replies: Mapping[int, Reply]) -> None:
        """Accept or refuse the clients of these handshakes."""

    def configure_adaptation(self) -> dict[int, Request]:
        """Requests for the clients that fit their private part before they take part."""

    def aggregate_adaptation(self, replies: Mapping[int, Reply]) -> None:
        """Record which clients have adapted."""

    def configure_train(self) -> dict[int, Request]:
        """Requests for the sampled clients of the next round."""

    def on_reply(self, node: int) -> None:
        """A reply has arrived; others are still awaited."""

    def aggregate_train(self, replies: Mapping[int, Reply]) -> Json:
        """Check all replies, collect the valid ones and save the round; its row."""

    def aggregate_masked(self, mean: Message | None, replies: Mapping[int, Reply]) -> Json:
        """The same where only the mean is known, None if too few clients stayed until the end."""

    def configure_evaluate(self) -> dict[int, Request]:
        """Requests for the clients that evaluate now."""

    def aggregate_evaluate(self, replies: Mapping[int, Reply]) -> Json:
        """Save and summarise the evaluation."""

    def finish(self) -> None:
        """The run is done."""

    def on_failure(self, error: BaseException) -> None:
        """The run ended early."""
