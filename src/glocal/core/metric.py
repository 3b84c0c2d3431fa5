"""The type of a metric: a figure of a client's predictions, with a direction.

A metric is either a sum and a weight per example, which merge over batches and clients, or a
function of all of a client's outputs and targets at once.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from glocal.core.checks import require_flag, require_instance
from glocal.core.errors import InputError, describe_value
from glocal.core.one_line import one_line
from glocal.core.training import Batch

PerExample = Callable[[Tensor, Tensor], Tensor | tuple[Tensor, Tensor]]
OfClient = Callable[[Tensor, Tensor], float | None]
Finish = Callable[[float], float]


@dataclass(frozen=True)
class Metric:
    """A figure of predictions, by exactly one of two functions of (outputs, targets).

    - `per_example` gives one value per example (rows,), or a pair of sums and weights (rows,). A
      client's figure is finish(sum / weight); without a weight above 0 it is undefined.
    - `of_client` gives the figure of all of a client's examples at once, None where undefined.

    `is_fraction` says that the figure is printed as per cent.

    >>> def is_near(outputs, targets):
    ...     return ((outputs - targets).abs() < 1).float()
    >>> near = Metric("near", per_example=is_near, is_fraction=True)
    >>> near.figure(3.0, 4.0)
    0.75
    """

    name: str
    per_example: PerExample | None = None
    of_client: OfClient | None = None
    finish: Finish | None = None
    higher_is_better: bool = True
    is_fraction: bool = False

    def __repr__(self) -> str:
        return one_line(self)

    def __post_init__(self) -> None:
        """Refuse a name with spaces, and anything but one function."""
        if not isinstance(self.name, str) or self.name.split() != [self.name]:
            raise InputError(
                f"metric: the name is {describe_value(self.name)}; a text that is not empty was "
                "expected; write it without spaces, such as 'top_5'"
            )
        if (self.per_example is None) == (self.of_client is None):
            given = "neither" if self.per_example is None else "both"
            raise InputError(
                f"metric: {self.name} has {given} of per_example and of_client; exactly one was "
                "expected; give per_example for means over examples, of_client for all else"
            )

        for part in ("per_example", "of_client", "finish"):
            require_instance(
                f"metric: {part} of {self.name}", getattr(self, part), Callable | None, "a function"
            )
        for part in ("higher_is_better", "is_fraction"):
            require_flag(f"metric: {part} of {self.name}", getattr(self, part))

    def sums(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The sums and the weights of a batch's examples, each (rows,)."""
        assert self.per_example is not None
        values = self.per_example(outputs, batch.y)
        if isinstance(values, tuple):
            return values
        return values, torch.ones_like(values, dtype=torch.float32)

    def figure(self, total: float, weight: float) -> float:
        """The figure of merged sums and weights; NaN where it is undefined."""
        if not weight:
            return math.nan
        return self.finish(total / weight) if self.finish else total / weight


def describe_shapes(outputs: Tensor, targets: Tensor) -> str:
    """The shapes and the targets' type, for errors."""
    shapes = tuple(outputs.shape), tuple(targets.shape)
    return f"outputs are {shapes[0]}, targets {shapes[1]} {targets.dtype}"
