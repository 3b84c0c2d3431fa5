"""What passes between a server and its devices, in our own words: Flower's messages are made of these."""

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
    """What a device is asked to do in a round of a run.

    `last_included` is the last round in which its answer entered the average, -1 if none did: the device knows from it which private
    state to start from. `adapt_epochs` is how long a newcomer learns its private part alone. `missed_rounds` tells who was away what happened.
    """

    run: str
    round_index: int
    last_included: int = -1
    adapt_epochs: int = 0
    missed_rounds: str = ""

    def to_json(self) -> str:
        """As text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Instructions":
        """Back from text."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class ClientResult:
    """What a device sends back: its upload if it was asked for one, and figures; `examples` is its weight in the average."""

    upload: Upload | None
    num_examples: int
    metrics: Json


@dataclass(frozen=True)
class Reply:
    """An answer as it arrives, its tensors unchecked; `fault` says why there is none, `lost` that the device never gave one."""

    tensors: Params
    num_examples: int = 0
    metrics: Json | None = None
    fault: str = ""
    lost: bool = False


class DataError(InputError):
    """Something is wrong with a device's data, or with the code that reads them.

    The words may quote an example: its owner reads them, and they never leave it.
    """


class Client(Protocol):
    """One device of a federation, on its own disk."""

    @property
    def secure_aggregation(self) -> bool:
        """Whether its uploads leave it only masked."""

    @property
    def shared_names(self) -> list[str]:
        """The names of what is shared, in their order."""

    def handshake(self, order: Instructions) -> Json:
        """Who it is and what it is ready for."""

    def train(self, shared: Params, order: Instructions) -> ClientResult:
        """One round."""

    def adapt(self, shared: Params, order: Instructions) -> ClientResult:
        """Learn the private part alone, as a newcomer does."""

    def evaluate(self, shared: Params, order: Instructions) -> ClientResult:
        """Its own model on its own data."""


class Server(Protocol):
    """What a server decides and keeps; nodes are Flower's numbers of the devices."""

    @property
    def shared(self) -> Params:
        """The shared tree as it is now."""

    @property
    def secure_aggregation(self) -> bool:
        """Whether the server sees only the mean of uploads."""

    @property
    def max_weight(self) -> float:
        """The largest weight of those that are asked."""

    @property
    def rounds_left(self) -> int:
        """How many rounds are still to be done; with none left, devices are only visited."""

    @property
    def round_timeout(self) -> float:
        """For how many seconds answers are waited for."""

    @property
    def handshake_timeout(self) -> float:
        """For how many seconds who is new may be silent."""

    def configure_handshake(self, nodes: Mapping[int, str]) -> dict[int, Instructions]:
        """Of those that are there, each with its public key: who has not introduced itself yet."""

    def needs_more_clients(self) -> bool:
        """Whether too few devices are there to go on; to be asked again, for it has a limit of its own."""

    def accept_handshakes(self, greetings: Mapping[int, Reply]) -> None:
        """What they said."""

    def configure_adaptation(self) -> dict[int, Instructions]:
        """Who should learn its private part before it takes part."""

    def aggregate_adaptation(self, replies: Mapping[int, Reply]) -> None:
        """How that went."""

    def configure_train(self) -> dict[int, Instructions]:
        """Who is asked to train in the next round."""

    def on_reply(self, node: int) -> None:
        """An answer has come; others are still awaited."""

    def aggregate_train(self, replies: Mapping[int, Reply]) -> Json:
        """Check all answers, average the good ones, keep the round; its row."""

    def aggregate_masked(self, mean: Params | None, replies: Mapping[int, Reply]) -> Json:
        """The same where only the mean is known; None if too few stayed until the end."""

    def configure_evaluate(self) -> dict[int, Instructions]:
        """Who is asked to test its own model now."""

    def aggregate_evaluate(self, replies: Mapping[int, Reply]) -> Json:
        """What came of it, summed up."""

    def finish(self) -> None:
        """All is done."""

    def on_failure(self, error: BaseException) -> None:
        """It ended before that."""
