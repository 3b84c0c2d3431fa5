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
class Order:
    """What a device is asked to do in a round of a run.

    `counted` is the last round in which its answer entered the average, -1 if none did: the device knows from it which private
    state to start from. `epochs` is how long a newcomer learns its private part alone. `missed` tells who was away what happened.
    """

    run: str
    round_index: int
    counted: int = -1
    epochs: int = 0
    missed: str = ""

    def packed(self) -> str:
        """As text."""
        return json.dumps(asdict(self))

    @classmethod
    def unpacked(cls, text: str) -> "Order":
        """Back from text."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Answer:
    """What a device sends back: its upload if it was asked for one, and figures; `examples` is its weight in the average."""

    upload: Upload | None
    examples: int
    figures: Json


@dataclass(frozen=True)
class Reply:
    """An answer as it arrives, its tensors unchecked; `fault` says why there is none, `lost` that the device never gave one."""

    tensors: Params
    examples: int = 0
    figures: Json | None = None
    fault: str = ""
    lost: bool = False


class DataError(InputError):
    """Something is wrong with a device's data, or with the code that reads them.

    The words may quote an example: its owner reads them, and they never leave it.
    """


class Device(Protocol):
    """One device of a federation, on its own disk."""

    @property
    def secure(self) -> bool:
        """Whether its uploads leave it only masked."""

    @property
    def shared_names(self) -> list[str]:
        """The names of what is shared, in their order."""

    def greet(self, order: Order) -> Json:
        """Who it is and what it is ready for."""

    def train(self, shared: Params, order: Order) -> Answer:
        """One round."""

    def settle(self, shared: Params, order: Order) -> Answer:
        """Learn the private part alone, as a newcomer does."""

    def test(self, shared: Params, order: Order) -> Answer:
        """Its own model on its own data."""


class Conductor(Protocol):
    """What a server decides and keeps; nodes are Flower's numbers of the devices."""

    @property
    def shared(self) -> Params:
        """The shared tree as it is now."""

    @property
    def secure(self) -> bool:
        """Whether the server sees only the mean of uploads."""

    @property
    def heaviest(self) -> float:
        """The largest weight of those that are asked."""

    @property
    def rounds_left(self) -> int:
        """How many rounds are still to be done; with none left, devices are only visited."""

    @property
    def round_wait(self) -> float:
        """For how many seconds answers are waited for."""

    @property
    def greeting_wait(self) -> float:
        """For how many seconds who is new may be silent."""

    def strangers(self, nodes: Mapping[int, str]) -> dict[int, Order]:
        """Of those that are there, each with its public key: who has not introduced itself yet."""

    def lacks(self) -> bool:
        """Whether too few devices are there to go on; to be asked again, for it has a limit of its own."""

    def meet(self, greetings: Mapping[int, Reply]) -> None:
        """What they said."""

    def newcomers(self) -> dict[int, Order]:
        """Who should learn its private part before it takes part."""

    def settled(self, replies: Mapping[int, Reply]) -> None:
        """How that went."""

    def orders(self) -> dict[int, Order]:
        """Who is asked to train in the next round."""

    def heard(self, node: int) -> None:
        """An answer has come; others are still awaited."""

    def collect(self, replies: Mapping[int, Reply]) -> Json:
        """Check all answers, average the good ones, keep the round; its row."""

    def collect_mean(self, mean: Params | None, replies: Mapping[int, Reply]) -> Json:
        """The same where only the mean is known; None if too few stayed until the end."""

    def questions(self) -> dict[int, Order]:
        """Who is asked to test its own model now."""

    def tested(self, replies: Mapping[int, Reply]) -> Json:
        """What came of it, summed up."""

    def finish(self) -> None:
        """All is done."""

    def failed(self, error: BaseException) -> None:
        """It ended before that."""
