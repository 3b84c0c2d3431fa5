"""Local only: clients train alone and send nothing. A baseline of Liang et al. 2020, 5.2."""

from functools import cached_property
from typing import ClassVar

from glocal.algorithms.contract import State
from glocal.algorithms.fedavg import FedAvg
from glocal.core.errors import InputError, describe_value
from glocal.core.split import Split
from glocal.core.trees import Params


class LocalOnly(FedAvg):
    """Clients train alone: everything is local, nothing is sent.

    >>> from torch import nn
    >>> from glocal import Adam, classification
    >>> algorithm = LocalOnly(classification(nn.Linear(4, 2)), optimizer=Adam(lr=0.01))
    >>> algorithm.init(algorithm.task.initial_params()).shared
    {}
    """

    word: ClassVar[str] = "local_only"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.local is not None:
            raise InputError(
                f"{self.name}: local is {describe_value(self.local)}, and everything is local; "
                "leave it out"
            )

    @cached_property
    def split(self) -> Split:
        """Nothing is shared."""
        return Split.of(self.task.model, shared=())

    def init(self, params: Params) -> State:
        """Everything is private."""
        return State(shared={}, private=params)
