"""Aggregations that a few clients cannot move far, whatever they send.

All clients weigh the same: how many examples it has is what a client says itself. A distance is
that between whole messages, over all their tensors together. Whole numbers (counters) are no part
of it: where a rule goes by distances, they become their median.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from glocal.core.bounds import MAX_CLIENTS, require_count
from glocal.core.checks import require_number
from glocal.core.errors import InputError, describe_value
from glocal.core.trees import Params
from glocal.wire.aggregation import as_real

_MAX_ITERATIONS = 1_000


class _Robust:
    """No mean of all messages, and the same weight for every client."""

    is_mean: ClassVar[bool] = False

    def weights(self, num_examples: Tensor) -> Tensor:
        """Ones (clients,)."""
        return torch.ones_like(num_examples, dtype=torch.float64)


@dataclass(frozen=True)
class Median(_Robust):
    """The median of each coordinate (Yin et al. 2018); of an even number, the mean of the middle.

    >>> Median().reduce({"w": torch.tensor([[1.0], [9.0], [2.0]])}, torch.ones(3))
    {'w': tensor([2.])}
    """

    def reduce(self, messages: Params, weights: Tensor) -> Params:
        """The middle of every coordinate's values."""
        medians = {}
        for name, tensor in messages.items():
            ordered = as_real(tensor).sort(dim=0).values
            count = len(ordered)
            medians[name] = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
        return medians


@dataclass(frozen=True)
class TrimmedMean(_Robust):
    """The mean of each coordinate without its largest and smallest values (Yin et al. 2018).

    `trim` is how many values are left out at each end: a number of clients, or below 0.5 a share of
    them, rounded down.

    >>> TrimmedMean(1).reduce({"w": torch.tensor([[1.0], [9.0], [2.0]])}, torch.ones(3))
    {'w': tensor([2.])}
    """

    trim: float

    def __post_init__(self) -> None:
        is_count = _is_whole(self.trim) and self.trim >= 0
        is_share = isinstance(self.trim, float) and 0 <= self.trim < 0.5
        if not is_count and not is_share:
            raise InputError(
                f"aggregation: trimmed_mean has trim = {describe_value(self.trim)}; "
                "a whole number of clients, or a share below 0.5, was expected"
            )

    def reduce(self, messages: Params, weights: Tensor) -> Params:
        """The mean of the values in the middle of every coordinate."""
        count = self.count(len(weights))
        _require_majority("trimmed_mean", count, weights)
        means = {}
        for name, tensor in messages.items():
            ordered = as_real(tensor).sort(dim=0).values
            means[name] = ordered[count : len(weights) - count].mean(0)
        return means

    def count(self, num_clients: int) -> int:
        """How many values are left out at each end.

        >>> TrimmedMean(0.29).count(100), TrimmedMean(2).count(100)
        (29, 2)
        """
        if isinstance(self.trim, int):
            return self.trim
        return math.floor(round(self.trim * num_clients, 9))  # 0.29 * 100 is 28.999999999999996


@dataclass(frozen=True)
class Krum(_Robust):
    """The one message that is nearest to most others (Blanchard et al. 2017).

    A message's score is the sum of squared distances to its nearest others, of which there are
    clients - `byzantine` - 1; the lowest score wins. `byzantine` is how many clients may send
    anything.

    >>> Krum(1).reduce({"w": torch.tensor([[1.0], [9.0], [2.0], [2.5]])}, torch.ones(4))
    {'w': tensor([2.])}
    """

    byzantine: int

    def __post_init__(self) -> None:
        require_count("aggregation: byzantine", self.byzantine, 0, MAX_CLIENTS)

    def reduce(self, messages: Params, weights: Tensor) -> Params:
        """The message with the lowest score."""
        _require_majority("krum", self.byzantine, weights)
        best = _scores(messages, self.byzantine, weights).argmin(keepdim=True)
        return _mean_of(messages, best, weights)


@dataclass(frozen=True)
class MultiKrum(_Robust):
    """The mean of the clients - `byzantine` messages that Krum likes best (Blanchard et al. 2017).

    >>> MultiKrum(1).reduce({"w": torch.tensor([[1.0], [9.0], [2.0]])}, torch.ones(3))
    {'w': tensor([1.5000])}
    """

    byzantine: int

    def __post_init__(self) -> None:
        require_count("aggregation: byzantine", self.byzantine, 0, MAX_CLIENTS)

    def reduce(self, messages: Params, weights: Tensor) -> Params:
        """The mean of the messages with the lowest scores."""
        _require_majority("multi_krum", self.byzantine, weights)
        scores = _scores(messages, self.byzantine, weights)
        best = scores.argsort(stable=True)[: len(weights) - self.byzantine]
        return _mean_of(messages, best, weights)


@dataclass(frozen=True)
class GeometricMedian(_Robust):
    """The point with the smallest sum of distances to all messages (Pillutla et al. 2022).

    It is approached by Weiszfeld's `iterations`, which begin where nothing changes: a mean by the
    inverse of the distances, none of which counts as less than `smoothing`.

    >>> rows = {"w": torch.tensor([[0.0], [1.0], [50.0]])}
    >>> round(float(GeometricMedian(iterations=50).reduce(rows, torch.ones(3))["w"]), 1)
    1.0
    """

    iterations: int = 10
    smoothing: float = 1e-6

    def __post_init__(self) -> None:
        require_count("aggregation: iterations", self.iterations, 1, _MAX_ITERATIONS)
        _require_positive("smoothing", self.smoothing)

    def reduce(self, messages: Params, weights: Tensor) -> Params:
        """The point after the last iteration."""
        rows = _in_float64(messages)
        point = {name: torch.zeros_like(tensor[0]) for name, tensor in rows.items()}
        for _ in range(self.iterations):
            inverse = 1 / _distances(rows, point, weights).clamp(min=self.smoothing)
            shares = inverse / inverse.sum()
            point = {name: torch.tensordot(shares, rows[name], dims=1) for name in rows}
        return _with_counters(point, messages, weights)


@dataclass(frozen=True)
class CentredClipping(_Robust):
    """The mean of changes that are clipped around a centre (Karimireddy et al. 2021).

    The centre begins where nothing changes. In each of `iterations` it moves by the mean of the
    differences to it, none of which is longer than `radius`: so far can one client move it, divided
    by the number of clients.

    >>> rows = {"w": torch.tensor([[1.0], [1.0], [40.0]])}
    >>> CentredClipping(radius=4.0).reduce(rows, torch.ones(3))
    {'w': tensor([2.])}
    """

    radius: float
    iterations: int = 1

    def __post_init__(self) -> None:
        _require_positive("radius", self.radius)
        require_count("aggregation: iterations", self.iterations, 1, _MAX_ITERATIONS)

    def reduce(self, messages: Params, weights: Tensor) -> Params:
        """The centre after the last iteration."""
        rows = _in_float64(messages)
        centre = {name: torch.zeros_like(tensor[0]) for name, tensor in rows.items()}
        for _ in range(self.iterations):
            lengths = _distances(rows, centre, weights).clamp(min=1e-300)
            shares = (self.radius / lengths).clamp(max=1.0) / len(weights)
            moved = {}
            for name, tensor in rows.items():
                difference = tensor - centre[name]
                moved[name] = centre[name] + torch.tensordot(shares, difference, dims=1)
            centre = moved
        return _with_counters(centre, messages, weights)


def _scores(messages: Params, byzantine: int, weights: Tensor) -> Tensor:
    """Krum's scores (clients,)."""
    count = len(weights)
    squares = torch.zeros_like(weights).expand(count, count)
    for tensor in _in_float64(messages).values():
        rows = _flat(tensor)  # without products, which would lose digits:
        distances = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
        squares = squares + distances.square()
    nearest = squares.sort(dim=1).values[:, 1 : count - byzantine]  # the first is its own
    return nearest.sum(1)


def _mean_of(messages: Params, clients: Tensor, weights: Tensor) -> Params:
    """The mean of some messages."""
    means = {}
    for name, tensor in _in_float64(messages).items():
        means[name] = tensor.index_select(0, clients).mean(0)
    return _with_counters(means, messages, weights)


def _distances(rows: Params, point: Params, weights: Tensor) -> Tensor:
    """How far every message is from a point (clients,)."""
    squares = torch.zeros_like(weights)
    for name, tensor in rows.items():
        squares = squares + _flat(tensor - point[name]).square().sum(1)
    return squares.sqrt()


def _flat(tensor: Tensor) -> Tensor:
    """One axis after that of clients, for scalars and empty tensors too."""
    return tensor.unsqueeze(-1).flatten(1)


def _in_float64(messages: Params) -> Params:
    """The tensors that distances are about."""
    floats = {}
    for name, tensor in messages.items():
        if tensor.is_floating_point():
            floats[name] = tensor.double()
    return floats


def _with_counters(reduced: Params, messages: Params, weights: Tensor) -> Params:
    """The reduced tensors in their own types, and the median of all others, in their order."""
    others = {name: tensor for name, tensor in messages.items() if name not in reduced}
    medians = Median().reduce(others, weights)
    whole = {}
    for name, tensor in messages.items():
        whole[name] = reduced[name].to(tensor.dtype) if name in reduced else medians[name]
    return whole


def _require_majority(rule: str, byzantine: int, weights: Tensor) -> None:
    if 2 * byzantine >= len(weights):
        raise InputError(
            f"aggregation: {rule}({byzantine}) needs the uploads of at least {2 * byzantine + 1} "
            f"clients in every round, and there are {len(weights)}; sample more clients, or choose "
            "a smaller number"
        )


def _require_positive(name: str, value: object) -> None:
    require_number(f"aggregation: {name}", value, lambda number: number > 0, "above 0")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
