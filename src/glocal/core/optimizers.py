"""Optimisers as pure functions: a memory in, a memory out; the same rules as `torch.optim`."""

import math
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from glocal.core.errors import InputError
from glocal.core.trees import Params

Number = TypeVar("Number", float, Tensor)


class Optimiser(Protocol):
    """How slopes move params: a rule with a memory. `Sgd` and `Adam` are two; a rule of your own needs these three."""

    @property
    def about(self) -> str:
        """Its settings in words."""

    def init(self, params: Params) -> Params:
        """The memory before the first step."""

    def step(self, params: Params, slopes: Params, memory: Params, round_index: Tensor) -> tuple[Params, Params]:
        """Params and memory after a step."""


@dataclass(frozen=True, kw_only=True)
class Shrink:
    """The rate is multiplied by `by` after every `every` rounds; deterministic, so that every device knows it by the round."""

    by: float = 0.5
    every: int = 1

    def __post_init__(self) -> None:
        _require("shrink", self.by, 0 < self.by <= 1, "above 0 and at most 1")
        _require("shrink_every", self.every, self.every >= 1, "at least 1")

    def share(self, round_index: Number) -> Number:
        """What is left of the rate in a round.

        >>> [Shrink(by=0.5, every=10).share(t) for t in (0, 9, 10, 25)]
        [1.0, 1.0, 0.5, 0.25]
        """
        left: Number = self.by ** (round_index // self.every)
        return left


@dataclass(frozen=True)
class Sgd:
    """Stochastic gradient descent as in `torch.optim.SGD`; the rate in round t is rate / (1 + decay * t), less what shrinks."""

    rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    decay: float = 0.0
    shrink: Shrink | None = None

    def __post_init__(self) -> None:
        _require("rate", self.rate, self.rate > 0, "above 0")
        _require("momentum", self.momentum, 0 <= self.momentum < 1, "at least 0 and below 1")
        _require_decays(self.weight_decay, self.decay)

    @property
    def varies(self) -> bool:
        """Whether the rate is another from round to round."""
        return bool(self.decay) or self.shrink is not None

    def pace(self, round_index: Number) -> Number:
        """The rate in a round."""
        return _pace(self, round_index)

    @property
    def about(self) -> str:
        """Its settings in words."""
        told = f"rate={self.rate}, momentum={self.momentum}, weight_decay={self.weight_decay}, decay={self.decay}"
        return f"sgd({told}{_shrinks(self.shrink)})"

    def init(self, params: Params) -> Params:
        """A velocity for every tensor, if there is momentum."""
        return {name: torch.zeros_like(tensor) for name, tensor in params.items()} if self.momentum else {}

    def step(self, params: Params, slopes: Params, memory: Params, round_index: Tensor) -> tuple[Params, Params]:
        """One fused pass over each tensor where torch has one: the passes are the cost."""
        velocity = slopes
        if self.weight_decay:
            velocity = {n: torch.add(slope, params[n], alpha=self.weight_decay) for n, slope in slopes.items()}
        if self.momentum:
            velocity = {name: torch.add(slope, memory[name], alpha=self.momentum) for name, slope in velocity.items()}
        if self.varies:
            pace = self.pace(round_index)
            moved = {name: tensor - pace * velocity[name] for name, tensor in params.items()}
        else:
            moved = {name: torch.sub(tensor, velocity[name], alpha=self.rate) for name, tensor in params.items()}
        return moved, velocity if self.momentum else {}


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba 2015) as in `torch.optim.Adam`; the rate in round t is rate / (1 + decay * t), less what shrinks."""

    rate: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decay: float = 0.0
    shrink: Shrink | None = None

    def __post_init__(self) -> None:
        _require("rate", self.rate, self.rate > 0, "above 0")
        _require("betas", self.betas, all(0 <= beta < 1 for beta in self.betas), "each at least 0 and below 1")
        _require_decays(self.weight_decay, self.decay)

    @property
    def about(self) -> str:
        """Its settings in words."""
        settings = f"betas={self.betas}, eps={self.eps}, weight_decay={self.weight_decay}, decay={self.decay}"
        return f"adam(rate={self.rate}, {settings}{_shrinks(self.shrink)})"

    def init(self, params: Params) -> Params:
        """Two moments for every tensor, and how many steps there were."""
        zeros = {f"{moment}/{name}": torch.zeros_like(tensor) for moment in ("first", "second") for name, tensor in params.items()}
        return {**zeros, "steps": torch.zeros((), device=next(iter(params.values())).device)}

    def step(self, params: Params, slopes: Params, memory: Params, round_index: Tensor) -> tuple[Params, Params]:
        """Both moments, freed of their bias, and the step they give."""
        slopes = {name: slope + self.weight_decay * params[name] for name, slope in slopes.items()}
        (fade, spread), steps = self.betas, memory["steps"] + 1
        first = {n: fade * memory[f"first/{n}"] + (1 - fade) * slope for n, slope in slopes.items()}
        second = {n: spread * memory[f"second/{n}"] + (1 - spread) * slope.square() for n, slope in slopes.items()}
        pace = _pace(self, round_index) / _one_minus_power(fade, steps)
        scale = _one_minus_power(spread, steps).sqrt()
        moved = {n: tensor - pace * first[n] / (second[n].sqrt() / scale + self.eps) for n, tensor in params.items()}
        return moved, {**_prefixed("first", first), **_prefixed("second", second), "steps": steps}


@dataclass(frozen=True)
class Apart:
    """Some tensors by a rule of their own: `turns` steps of that rule to each step of the main one.

    They are those `of` so many names, or whose names begin with it. With 0 turns both step together, every time.
    """

    main: Sgd | Adam
    other: Sgd | Adam
    of: str | frozenset[str]
    turns: int = 0

    def __post_init__(self) -> None:
        _require("turns", self.turns, self.turns >= 0, "at least 0")

    @property
    def about(self) -> str:
        """Its settings in words."""
        of = self.of if isinstance(self.of, str) else f"[{', '.join(sorted(self.of))}]"
        return f"{self.main.about}, {of} by {self.other.about}, {self.turns} turns"

    def init(self, params: Params) -> Params:
        """Both memories, and whose turn it is."""
        memories = zip(("main", "other"), (self.main, self.other), self._parts(params), strict=True)
        kept = {f"{side}/{name}": t for side, rule, part in memories if part for name, t in rule.init(part).items()}
        return {**kept, "turn": torch.zeros((), device=next(iter(params.values())).device)}

    def step(self, params: Params, slopes: Params, memory: Params, round_index: Tensor) -> tuple[Params, Params]:
        """Both rules step; what it is not the turn of stays as it was."""
        moved: Params = {}
        kept: Params = {}
        sides = zip(("main", "other"), (self.main, self.other), self._parts(params), self._parts(slopes), strict=True)
        for side, rule, own, down in sides:
            if not own:
                continue
            before = {name.removeprefix(f"{side}/"): t for name, t in memory.items() if name.startswith(f"{side}/")}
            after, memories = rule.step(own, down, before, round_index)
            if self.turns:
                now = (memory["turn"] >= self.turns) == (side == "main")
                after = {name: torch.where(now, tensor, own[name]) for name, tensor in after.items()}
                memories = {name: torch.where(now, tensor, before[name]) for name, tensor in memories.items()}
            moved |= after
            kept |= {f"{side}/{name}": tensor for name, tensor in memories.items()}
        return {name: moved[name] for name in params}, {**kept, "turn": (memory["turn"] + 1) % (self.turns + 1)}

    def _parts(self, tree: Params) -> tuple[Params, Params]:
        """What the main rule moves, and what the other does."""
        of = self.of
        other = {name: t for name, t in tree.items() if (name.startswith(of) if isinstance(of, str) else name in of)}
        return {name: tensor for name, tensor in tree.items() if name not in other}, other


def sgd(rate: float, *, momentum: float = 0.0, weight_decay: float = 0.0, decay: float = 0.0, shrink: Shrink | None = None) -> Sgd:
    """Stochastic gradient descent, with settings by name."""
    return Sgd(rate, momentum, weight_decay, decay, shrink)


def adam(
    rate: float,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decay: float = 0.0,
    shrink: Shrink | None = None,
) -> Adam:
    """Adam, with settings by name."""
    return Adam(rate, betas, eps, weight_decay, decay, shrink)


def _pace(rule: Sgd | Adam, round_index: Number) -> Number:
    pace = rule.rate / (1 + rule.decay * round_index)
    return pace if rule.shrink is None else pace * rule.shrink.share(round_index)


def _shrinks(shrink: Shrink | None) -> str:
    return "" if shrink is None else f", times {shrink.by} every {shrink.every} rounds"


def _one_minus_power(beta: float, steps: Tensor) -> Tensor:
    """1 - beta ** steps, exact also where the power is near 1."""
    return -torch.expm1(steps * math.log(beta)) if beta else torch.ones_like(steps)


def _prefixed(moment: str, tree: Params) -> Params:
    return {f"{moment}/{name}": tensor for name, tensor in tree.items()}


def _require_decays(weight_decay: float, decay: float) -> None:
    _require("weight_decay", weight_decay, weight_decay >= 0, "at least 0")
    _require("decay", decay, decay >= 0, "at least 0")


def _require(name: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise InputError(f"optimiser: {name} is {value}; it must be {expected}")
