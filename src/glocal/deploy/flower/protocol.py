"""The messages between server and clients, and what each side can do; Flower carries them."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Protocol

from glocal.core.errors import InputError
from glocal.core.files import Json
from glocal.core.trees import Params
from glocal.wire import Upload


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
class ClientResult:
    """What a client returns: an upload where one is requested, its weight, and metrics."""

    upload: Upload | None
    num_examples: int
    metrics: Json


@dataclass(frozen=True)
class Reply:
    """A client's reply before any check.

    `fault` is the reason why there is no result. `lost` means that the client never sent a reply.
    """

    tensors: Params
    num_examples: int = 0
    metrics: Json | None = None
    fault: str = ""
    lost: bool = False


class DataError(InputError):
    """A client's data, or the code that reads them, cannot be used.

    The message may quote an example: it is for the owner, and never leaves the client.
    """


class Client(Protocol):
    """One client of a federation."""

    @property
    def secure_aggregation(self) -> bool:
        """Whether uploads leave the client only masked."""

    @property
    def shared_names(self) -> list[str]:
        """The names of the shared tensors, in order."""

    def handshake(self, instructions: Instructions) -> Json:
        """Its number, its settings' fingerprint and its weight."""

    def train(self, shared: Params, instructions: Instructions) -> ClientResult:
        """Train for one round."""

    def adapt(self, shared: Params, instructions: Instructions) -> ClientResult:
        """Fit the private part alone, as a new client does."""

    def evaluate(self, shared: Params, instructions: Instructions) -> ClientResult:
        """Evaluate its own model on its own data."""


class Server(Protocol):
    """What a server decides and stores; nodes are Flower's numbers of the clients."""

    @property
    def shared(self) -> Params:
        """The current shared tree."""

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

    def configure_handshake(self, nodes: Mapping[int, str]) -> dict[int, Instructions]:
        """Instructions for the connected nodes, given with their keys, that owe a handshake."""

    def needs_more_clients(self) -> bool:
        """Whether too few clients are connected; an error once the time limit has passed."""

    def accept_handshakes(self, replies: Mapping[int, Reply]) -> None:
        """Accept or refuse the clients of these handshakes."""

    def configure_adaptation(self) -> dict[int, Instructions]:
        """Instructions for the clients that fit their private part before they take part."""

    def aggregate_adaptation(self, replies: Mapping[int, Reply]) -> None:
        """Record which clients have adapted."""

    def configure_train(self) -> dict[int, Instructions]:
        """Instructions for the sampled clients of the next round."""

    def on_reply(self, node: int) -> None:
        """A reply has arrived; others are still awaited."""

    def aggregate_train(self, replies: Mapping[int, Reply]) -> Json:
        """Check all replies, average the valid ones and save the round; its row."""

    def aggregate_masked(self, mean: Params | None, replies: Mapping[int, Reply]) -> Json:
        """The same where only the mean is known, None if too few clients stayed until the end."""

    def configure_evaluate(self) -> dict[int, Instructions]:
        """Instructions for the clients that evaluate now."""

    def aggregate_evaluate(self, replies: Mapping[int, Reply]) -> Json:
        """Save and summarise the evaluation."""

    def finish(self) -> None:
        """The run is done."""

    def on_failure(self, error: BaseException) -> None:
        """The run ended early."""
