"""Aggregation: how the server makes one message of many.

Where `is_mean` holds, the result is a weighted mean: then a server that sees only sums, such as
one with secure aggregation, is enough.
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from glocal.core.bounds import MAX_EXAMPLES, require_count
from glocal.core.checks import require_choice
from glocal.core.errors import InputError
from glocal.core.trees import Params

WEIGHTINGS = ("examples", "clients")


@runtime_checkable
class Aggregation(Protocol):
    """A rule for messages (clients, ...), the same for every seed that is batched with others."""

    @property
    def is_mean(self) -> bool:
        """Whether the result is the mean of the messages by `weights`."""

    def weights(self, num_examples: Tensor) -> Tensor:
        """The weight of every client (clients,), in float64."""

    def reduce(self, messages: Params, weights: Tensor) -> Params:
        """One message; whole numbers become float64, and are rounded by whoever adds them."""


@dataclass(frozen=True)
class Mean:
    """The mean, weighted by each client's examples, or the same for all (`by` = "clients").

    A client says itself how many examples it has. None weighs more than `max_weight` examples.

    >>> Mean(by="clients").weights(torch.tensor([3, 1]))
    tensor([1., 1.], dtype=torch.float64)
    >>> Mean(max_weight=100).weights(torch.tensor([3, 5000]))
    tensor([  3., 100.], dtype=torch.float64)
    """

    by: str = "examples"
    max_weight: int | None = None

    is_mean: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_choice("aggregation: by", self.by, WEIGHTINGS)
        if self.max_weight is None:
            return
        require_count("aggregation: max_weight", self.max_weight, 1, MAX_EXAMPLES)
        if self.by == "clients":
            raise InputError(
                f"aggregation: max_weight is {self.max_weight}, and a mean by clients weighs all "
                "the same; leave it out"
            )

    def weights(self, num_examples: Tensor) -> Tensor:
        """The examples of every client, or ones (clients,)."""
        if self.by == "clients":
            return torch.ones_like(num_examples, dtype=torch.float64)
        examples = num_examples.double()
        return examples if self.max_weight is None else examples.clamp(max=self.max_weight)

    def reduce(self, messages: Params, weights: Tensor) -> Params:
        """The weighted mean."""
        shares = weights / weights.sum().clamp(min=1e-300)  # nobody counts: no change
        mean = {}
        for name, tensor in messages.items():
            values = as_real(tensor)
            mean[name] = torch.tensordot(shares.to(values.dtype), values, dims=1)
        return mean


def as_real(tensor: Tensor) -> Tensor:
    """Whole numbers (counters) in float64; others as they are."""
    return tensor if tensor.is_floating_point() or tensor.is_complex() else tensor.double()


def require_enough_clients(aggregation: Aggregation, count: int) -> None:
    """Refuse an aggregation that cannot make one message of so many: found by trial on zeros."""
    weights = aggregation.weights(torch.ones(count, dtype=torch.int64))
    aggregation.reduce({"trial": torch.zeros(count, 1)}, weights)
