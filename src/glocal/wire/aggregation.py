"""Aggregation: how the server makes one message of many.

Where `is_mean` holds, the result is a weighted mean: then a server that sees only sums, such as
one with secure aggregation, is enough.
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from glocal.core.checks import require_choice
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

    >>> Mean(by="clients").weights(torch.tensor([3, 1]))
    tensor([1., 1.], dtype=torch.float64)
    """

    by: str = "examples"

    is_mean: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_choice("aggregation: by", self.by, WEIGHTINGS)

    def weights(self, num_examples: Tensor) -> Tensor:
        """The examples of every client, or ones (clients,)."""
        return num_examples.double() if self.by == "examples" else _ones(num_examples)

    def reduce(self, messages: Params, weights: Tensor) -> Params:
        """The weighted mean."""
        shares = weights / weights.sum().clamp(min=1e-300)  # nobody counts: no change
        mean = {}
        for name, tensor in messages.items():
            values = _as_real(tensor)
            mean[name] = torch.tensordot(shares.to(values.dtype), values, dims=1)
        return mean


@dataclass(frozen=True)
class Median:
    """The median of each coordinate (Yin et al. 2018); of an even number, the mean of the middle.

    >>> Median().reduce({"w": torch.tensor([[1.0], [9.0], [2.0]])}, torch.ones(3))
    {'w': tensor([2.])}
    """

    is_mean: ClassVar[bool] = False

    def weights(self, num_examples: Tensor) -> Tensor:
        """Ones (clients,)."""
        return _ones(num_examples)

    def reduce(self, messages: Params, weights: Tensor) -> Params:
        """The middle of every coordinate's values."""
        medians = {}
        for name, tensor in messages.items():
            ordered = _as_real(tensor).sort(dim=0).values
            count = len(ordered)
            medians[name] = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
        return medians


def _ones(num_examples: Tensor) -> Tensor:
    return torch.ones_like(num_examples, dtype=torch.float64)


def _as_real(tensor: Tensor) -> Tensor:
    """Whole numbers (counters) in float64; others as they are."""
    return tensor if tensor.is_floating_point() or tensor.is_complex() else tensor.double()
